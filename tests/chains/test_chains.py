"""Long chains: every problem is read back from its English by other code, and its answer computed anew."""

import hashlib
import json
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise

import pytest
from benchmarks.long_chains.problems import PHRASES, prompt

from gambit.chains import SPLITS, generate, parse_spec
from gambit.chains.amounts import LARGEST
from gambit.chains.problems import split_of
from gambit.chains.words import Draws, words_of
from gambit.errors import UserError
from support import ROOT
from support.tables import table

SPECS = ("chains:2", "chains:8", "chains:16", "chains:12,shuffled,idle=3", "chains:64,idle=16", "moves:2", "moves:12")
COUNT = 12  # problems of each split
# Hashes of the first 100 problems: whoever measures on these problems measures on the same ones.
KEPT = {"chains:16": "d7d395aad2c7983f", "moves:8": "1821c09c773e60a8"}


@cache
def problems(spec, split, count):
    return generate(spec, split, count, seed=5)


def drawn(spec, count=COUNT):
    return [row for split in SPLITS for row in problems(spec, split, count)]


# -- a second reader of the English ----------------------------------------------------------------------------


def sentences(question):
    return re.split(r"(?<=[.?]) ", question)


def mentioned(sentence, words):
    return [word for word in re.findall(r"\w+", sentence) if word in words]


def has(sentence, words):
    return re.search(rf"\b(?:{words})\b", sentence) is not None


def derived(sentence, values, others, number):
    """The amount that a sentence states, from those that it names."""
    if len(others) == 2:
        left, right = values[others[0]], values[others[1]]
        if has(sentence, "together|sum|combined|in total|in all|plus|added"):
            return left + right
        return right - left if has(sentence, "taken from|[Ss]ubtract|Subtracting") else left - right
    if number is not None:
        return values[others[0]] + (-number if has(sentence, "fewer|minus|lower|less") else number)
    if has(sentence, "half"):
        assert values[others[0]] % 2 == 0
        return values[others[0]] // 2
    return values[others[0]] * (3 if has(sentence, "three|triple|3") else 2)


def answer_of_chain(row):
    names = {step["name"] for step in row["steps"] + row["idle"]}
    *facts, question = sentences(row["question"])
    open_facts, values = list(facts), {}
    while open_facts:
        before = len(open_facts)
        for sentence in list(open_facts):
            *others, last = who = mentioned(sentence, names)
            subject_last = sentence.startswith(("Compared", "Subtract"))
            subject, others = (last, others) if subject_last else (who[0], who[1:])
            number = re.search(r"\b(\d+)\b(?! times)", sentence)
            if not others:
                values[subject] = int(number[1])
            elif all(other in values for other in others):
                values[subject] = derived(sentence, values, others, number and int(number[1]))
            else:
                continue
            open_facts.remove(sentence)
        assert len(open_facts) < before
    return values, values[mentioned(question, names)[0]]


def answer_of_moves(row):
    start, *facts, question, _ = sentences(row["question"])
    places = list(row["start"])
    if row["layout"] == "queue":
        state = mentioned(start, set(row["start"].values()))
        for sentence in facts:
            after_queue_move(state, sentence, mentioned(sentence, set(state)))
        return state[places.index(mentioned(question, set(places))[0])]
    where = dict(re.findall(r"the (\w+) is in the (\w+)", start))
    for sentence in facts:
        named = list(dict.fromkeys(mentioned(sentence, {*where, *places})))
        there = [where.get(word, word) for word in named]  # a thing stands for its place
        next_place = dict(zip(there, [*there[1:], there[0]], strict=True))
        where = {thing: next_place.get(place, place) for thing, place in where.items()}
    return where[mentioned(question, set(where))[0]]


def after_queue_move(state, sentence, who):
    first = who[0]
    if len(who) > 1 and not has(sentence, "behind|after|in front of|before|ahead"):
        i, j = state.index(first), state.index(who[1])
        state[i], state[j] = state[j], state[i]
        return
    state.remove(first)
    if len(who) > 1:
        state.insert(state.index(who[1]) + has(sentence, "behind|after"), first)
    else:
        state.insert(0 if has(sentence, "front|first|leads?|ahead") else len(state), first)


# -- what holds for every problem ------------------------------------------------------------------------------


@table("spec", [spec for spec in SPECS if spec.startswith("chains")])
def test_amounts_follow_from_the_sentences(spec):
    for row in drawn(spec):
        values, answer = answer_of_chain(row)
        assert answer == int(row["answer"]), row["question"]
        assert values == {step["name"]: step["value"] for step in row["steps"] + row["idle"]}
        assert all(0 < value <= LARGEST for value in values.values())
        assert row["num_steps"] == len(row["steps"]) == parse_spec(spec).steps
        assert len(row["idle"]) == parse_spec(spec).idle


@table("spec", [spec for spec in SPECS if spec.startswith("chains")])
def test_the_answer_of_a_chain_hangs_on_every_step(spec):
    """A slip of one in any step changes what comes out at the end."""
    for row in drawn(spec):
        for slipped in row["steps"]:
            values = {}
            for step in row["steps"]:
                values[step["name"]] = eval(step["expression"], {}, values) + (step is slipped)
            assert values[row["steps"][-1]["name"]] != int(row["answer"])


def test_slips_are_rarely_given_away():
    """After a slip of up to twelve, hardly any later amount is a fraction, negative or out of range."""
    rows, draws, odd = drawn("chains:16", count=100), Draws("slips"), 0
    for row in rows:
        values, place = {}, draws.below(16)
        slip = draws.between(1, 12) * draws.one((-1, 1))
        for number, step in enumerate(row["steps"]):
            values[step["name"]] = eval(step["expression"], {}, values) + slip * (number == place)
        odd += any(value <= 0 or value > LARGEST or value != int(value) for value in values.values())
    assert odd / len(rows) < 0.1


@table("spec", [spec for spec in SPECS if spec.startswith("moves")])
def test_places_follow_from_the_sentences(spec):
    for row in drawn(spec):
        assert answer_of_moves(row) == row["answer"], row["question"]
        assert re.fullmatch(r"\w+", row["answer"]) and len(row["start"]) >= 6
        states = [row["start"], *(step["value"] for step in row["steps"])]
        assert len(row["steps"]) == row["num_steps"] == parse_spec(spec).steps
        assert all(
            a != b and sorted(a.values()) == sorted(b.values()) and list(a) == list(b) for a, b in pairwise(states)
        )


def test_moves_cannot_be_guessed():
    """No name is the answer more often than one in six and some, wherever it stands in the text."""
    rows = drawn("moves:12", count=75)
    for guess in (0, 1, -1, -2):
        right = 0
        for row in rows:
            words = set(row["start"] if row["layout"] == "slots" else row["start"].values())
            right += mentioned(row["question"], words)[guess] == row["answer"]
        assert right / len(rows) < 0.26


@table("spec", SPECS)
def test_splits_share_neither_structures_nor_words(spec):
    structures = [{structure(row) for row in problems(spec, split, COUNT)} for split in SPLITS]
    assert all(len(found) == COUNT for found in structures)
    assert len(set.union(*structures)) == COUNT * len(SPLITS)
    assert len({row["id"] for row in drawn(spec)}) == COUNT * len(SPLITS)


def structure(row):
    """The problem without its words."""
    if row["family"].startswith("moves"):
        order = list(row["start"].values())
        asked = row["answer"] if row["layout"] == "queue" else list(row["start"]).index(row["answer"])
        states = [tuple(order.index(word) for word in step["value"].values()) for step in row["steps"]]
        return (*states, asked if isinstance(asked, int) else order.index(asked))
    numbered = {step["name"]: f"#{number}" for number, step in enumerate(row["steps"])}
    return tuple(re.sub(r"[A-Z]\w+", lambda name: numbered[name[0]], step["expression"]) for step in row["steps"])


def test_words_belong_to_one_split():
    owners = {}
    for split in SPLITS:
        words = words_of(split)
        for kind in ("names", "things", "containers", "objects", "places"):
            for word in getattr(words, kind):
                assert owners.setdefault(word, (split, kind)) == (split, kind)
        for town in (town for endings in words.towns for town in endings):
            assert owners.setdefault(town, split) == split
        for relation, wordings in words.wordings.items():
            assert len(set(wordings)) >= 3
            for wording in wordings:
                assert owners.setdefault(wording, (split, relation)) == (split, relation)
    assert len({frozenset(words_of(split).wordings) for split in SPLITS}) == 1
    assert {split_of(hashlib.sha256(bytes([i])).hexdigest()) for i in range(64)} == set(SPLITS)


@table("spec", KEPT)
def test_the_first_hundred_problems_are_kept(spec):
    text = json.dumps([generate(spec, split, 100) for split in SPLITS], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == KEPT[spec]


def test_more_problems_begin_with_the_same_ones():
    assert generate("chains:8", "dev", 3) == generate("chains:8", "dev", 9)[:3]
    assert generate("chains:8", "dev", 3) != generate("chains:8", "dev", 3, seed=1)


def test_prompts_end_with_how_to_write():
    for phrase, text in PHRASES.items():
        assert prompt("Why?", phrase) == f"Why?\n\n{text}" and "\\boxed{}" in text


@table(
    ("spec", "reason"),
    [
        ("chain:8", "names no family"),
        ("chains", "STEPS is a whole number from 2 to 64, not ''"),
        ("chains:1", "from 2 to 64, not '1'"),
        ("chains:65", "from 2 to 64"),
        ("chains:8.0", "not '8.0'"),
        ("chains:8,idle=17", "idle is a whole number from 0 to 16, not '17'"),
        ("chains:8,idle=-1", "not '-1'"),
        ("chains:8,sorted", "chains take no option 'sorted', but idle, shuffled, split"),
        ("chains:8,shuffled,shuffled", "an option twice"),
        ("moves:8,shuffled", "moves take no option 'shuffled', but split"),
        ("moves:8,split=val", "there is no split 'val', but train, dev, judge, test"),
    ],
)
def test_bad_sizes_have_one_sentence(spec, reason):
    with pytest.raises(UserError, match=re.escape(reason)):
        parse_spec(spec)


def test_specs_read_back():
    for spec in SPECS:
        assert str(parse_spec(spec)) == spec
        assert parse_spec(f"{spec},split=dev").split == "dev" and str(parse_spec(f"{spec},split=dev")) == spec


def test_the_command_writes_lines_and_mistakes_are_told():
    command = [sys.executable, str(ROOT / "benchmarks/long_chains/problems.py")]
    done = subprocess.run([*command, "moves:3", "dev", "2", "--seed", "4"], capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == generate("moves:3", "dev", 2, 4)
    bad = subprocess.run([*command, "moves:300", "dev", "2"], capture_output=True, text=True)
    assert bad.returncode == 1 and bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1
