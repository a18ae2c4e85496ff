"""Writes long chains of dependent steps as word problems: amounts derived from amounts, and things that change places.

    python benchmarks/long_chains/problems.py chains:16 dev 150 > dev.jsonl

The same words, split, count and seed give the same problems on every Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where it is run as a script
from benchmarks.long_chains.vocabulary import SPLITS, WORDS, Words

T = TypeVar("T")
STEPS, IDLE = (2, 64), (0, 16)  # fewest and most
LARGEST = 999
LARGE = 250  # above it, amounts rather shrink
MOST_OPEN = 3  # amounts that no sentence has used yet
ENTITIES = (6, 7)  # people in a queue, or places: guessing pays at most one time in six
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
TRIES = 12  # arrangements drawn, of which the one whose answer hangs on the most moves is kept
PATIENCE = 2000  # drawn in a row without a new problem before a size counts as exhausted

PHRASES = {
    "lines": "Solve this step by step. Write one step per line, and end each line with the value found in that step. "
    "Put your final answer within \\boxed{}.",
    "paragraphs": "Work through this one step at a time. Write each step as a short paragraph of its own, with a blank "
    "line after it, and end it with the value found. Put your final answer within \\boxed{}.",
    "numbered": "Please reason step by step in a numbered list: one step per line, each line ending with its result. "
    "Then give the final answer in \\boxed{}.",
    "plain": "Please reason step by step, and put your final answer within \\boxed{}.",
}


def prompt(question: str, phrase: str = "lines") -> str:
    """Returns what the model is given: the question and how to write the solution."""
    return f"{question}\n\n{PHRASES[phrase]}"


@dataclass(frozen=True, slots=True)
class Spec:
    """A family of problems and their size, such as `chains:16,shuffled,idle=2`."""

    family: str
    steps: int
    shuffled: bool = False
    idle: int = 0

    def __str__(self) -> str:
        idle = f",idle={self.idle}" if self.idle else ""
        return f"{self.family}:{self.steps}{',shuffled' if self.shuffled else ''}{idle}"


def parse_spec(text: str) -> Spec:
    """Reads `chains:STEPS[,shuffled][,idle=N]` or `moves:STEPS`, or raises ValueError with one sentence."""
    family, _, rest = text.partition(":")
    if family not in ("chains", "moves"):
        raise ValueError(f"{text!r} names no family of problems: write chains:STEPS[,shuffled][,idle=N] or moves:STEPS")
    size, *options = rest.split(",")
    steps = _size(text, "STEPS", size, STEPS)
    if family == "moves":
        if options:
            raise ValueError(f"{text!r}: moves come in order and are all needed, so that moves:STEPS takes no options")
        return Spec(family, steps)
    idle = 0
    for option in options:
        if option.startswith("idle="):
            idle = _size(text, "idle", option.removeprefix("idle="), IDLE)
        elif option != "shuffled":
            raise ValueError(f"{text!r}: chains know the options shuffled and idle=N, not {option!r}")
    if len({option.partition("=")[0] for option in options}) < len(options):
        raise ValueError(f"{text!r} gives an option twice")
    return Spec(family, steps, "shuffled" in options, idle)


def _size(text: str, what: str, digits: str, limits: tuple[int, int]) -> int:
    if not re.fullmatch("[0-9]{1,6}", digits) or not limits[0] <= int(digits) <= limits[1]:
        raise ValueError(f"{text!r}: {what} is a whole number from {limits[0]} to {limits[1]}, not {digits!r}")
    return int(digits)


class Draws:
    """Random choices made from `random()` alone, the one method that all Python versions promise to keep."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed).random

    def below(self, end: int) -> int:
        return int(self.random() * end)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def one(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Draws without putting back; all of them are a shuffle."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def _digest(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


def split_of(key: str) -> str:
    """Returns the split that a problem belongs to by the hash of its structure and numbers."""
    return SPLITS[int(key[:8], 16) % len(SPLITS)]


# -- amounts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Amount:
    """One sentence: how an amount follows from earlier ones."""

    relation: str
    sides: tuple[int, ...]  # positions of the earlier amounts
    number: int  # where the sentence states one, else 0
    value: int

    def expression(self, names: Sequence[str]) -> str:
        left, right = (*(names[side] for side in self.sides), "", "")[:2]
        return {
            "given": f"{self.number}",
            "more": f"{left} + {self.number}",
            "fewer": f"{left} - {self.number}",
            "twice": f"2 * {left}",
            "thrice": f"3 * {left}",
            "half": f"{left} / 2",
            "together": f"{left} + {right}",
            "difference": f"{left} - {right}",
        }[self.relation]


def _given(draws: Draws) -> Amount:
    number = draws.between(6, 99)
    return Amount("given", (), number, number)


def _from_one(draws: Draws, amounts: Sequence[Amount], side: int) -> Amount:
    """Derives an amount from one. Only stated numbers are halved: after a slip no fraction gives it away."""
    value = amounts[side].value
    low = min(3, value)
    numbers = {"more": draws.between(3, 99), "fewer": draws.between(low, max(low, min(99, value // 2)))}
    found = {
        "more": value + numbers["more"],
        "fewer": value - numbers["fewer"],
        "twice": 2 * value,
        "thrice": 3 * value,
        "half": value // 2 if amounts[side].relation == "given" and value % 2 == 0 else 0,
    }
    options = [relation for relation, result in found.items() if 1 <= result <= LARGEST]
    if value > LARGE and "fewer" in options:
        options += ["fewer"] * 3
    relation = draws.one(options)
    return Amount(relation, (side,), numbers.get(relation, 0), found[relation])


def _from_two(draws: Draws, amounts: Sequence[Amount], sides: Sequence[int]) -> Amount | None:
    """Adds two amounts or subtracts the clearly smaller one, so that a slip rarely makes the difference negative."""
    small, large = sorted(sides, key=lambda side: amounts[side].value)
    total = amounts[small].value + amounts[large].value
    options = ["together"] if total <= LARGEST else []
    if 2 * amounts[large].value >= 3 * amounts[small].value:
        options += ["difference"] * (3 if amounts[large].value > LARGE else 1)
    if not options:
        return None
    if draws.one(options) == "together":
        return Amount("together", tuple(draws.some(sides, 2)), 0, total)
    return Amount("difference", (large, small), 0, amounts[large].value - amounts[small].value)


def _next_amount(draws: Draws, amounts: Sequence[Amount], unused: Sequence[int], left: int) -> Amount | None:
    """Derives the next amount such that the last one, `left` sentences on, hangs on every other."""
    used = [side for side in range(len(amounts)) if side not in unused]
    if len(unused) > left or (len(unused) > 1 and draws.random() < 0.4):
        return _from_two(draws, amounts, draws.some(unused, 2))
    if used and len(unused) < min(left, MOST_OPEN) and draws.random() < 0.2:
        return _from_one(draws, amounts, draws.one(used))
    side = draws.one(unused)
    if used and draws.random() < 0.3:
        return _from_two(draws, amounts, [side, draws.one(used)])
    return _from_one(draws, amounts, side)


def _amounts(draws: Draws, steps: int) -> list[Amount] | None:
    """Draws a chain; None where it cannot be finished, or where something cancels out."""
    amounts: list[Amount] = []
    unused: list[int] = []
    givens = 1 + (steps > 3 and draws.below(2))
    for _ in range(PATIENCE):
        left = steps - len(amounts)
        amount = _given(draws) if len(amounts) < givens else _next_amount(draws, amounts, unused, left)
        if amount is None or amount.value in {other.value for other in amounts}:
            continue
        unused = [side for side in unused if side not in amount.sides] + [len(amounts)]
        amounts.append(amount)
        if left == 1:
            return amounts if all(_effects(amounts)) else None
    return None


def _effects(amounts: Sequence[Amount]) -> list[Fraction]:
    """Returns by how much the last amount changes where another is off by one."""
    weights = [Fraction(0) for _ in amounts]
    weights[-1] = Fraction(1)
    for amount, weight in zip(reversed(amounts), reversed(weights), strict=True):
        factors = {"twice": [2], "thrice": [3], "half": [Fraction(1, 2)], "difference": [1, -1]}
        for side, factor in zip(amount.sides, factors.get(amount.relation, [1, 1]), strict=False):
            weights[side] += weight * factor
    return weights


def _amounts_key(amounts: Sequence[Amount]) -> str:
    """Hashes structure and numbers; names and the order of commuting sides do not matter."""
    keys: list[str] = []
    for amount in amounts:
        sides = [keys[side] for side in amount.sides]
        keys.append(_digest(amount.relation, amount.number, *(sorted(sides) if len(sides) > 1 else sides)))
    return keys[-1]


def _add_idle(draws: Draws, amounts: list[Amount], count: int) -> list[Amount]:
    """Appends amounts that the question does not need, derived like the others."""
    amounts = list(amounts)
    for _ in range(count):
        two = _from_two(draws, amounts, draws.some(range(len(amounts)), 2)) if draws.random() < 0.3 else None
        one = _given(draws) if draws.random() < 0.2 else _from_one(draws, amounts, draws.below(len(amounts)))
        amounts.append(two or one)
    return amounts


def _order(draws: Draws, spec: Spec, amounts: Sequence[Amount]) -> list[int]:
    """Returns the order of the sentences: idle ones stand anywhere behind what they are derived from."""
    if spec.shuffled:
        return draws.some(range(len(amounts)), len(amounts))
    order = list(range(spec.steps))
    for index in range(spec.steps, len(amounts)):
        first = max((order.index(side) + 1 for side in amounts[index].sides), default=0)
        order.insert(draws.between(first, len(order)), index)
    return order


def _owners(draws: Draws, words: Words, count: int) -> tuple[list[str], list[str]]:
    """Draws people, or places of one kind: the one word that marks each, and how a sentence calls it."""
    if draws.below(2):
        names = draws.some(words.names, count)
        return names, names
    towns = [draws.one(endings) for endings in draws.some(words.towns, count)]
    container = draws.one(words.containers)
    return towns, [f"the {town} {container}" for town in towns]


def _chain(draws: Draws, spec: Spec, words: Words) -> tuple[str, dict[str, Any]] | None:
    amounts = _amounts(draws, spec.steps)
    if amounts is None:
        return None
    key = _amounts_key(amounts)
    amounts = _add_idle(draws, amounts, spec.idle)
    names, owners = _owners(draws, words, len(amounts))
    thing = draws.one(words.things)

    def sentence(relation: str, who: Sequence[int], number: int) -> str:
        letters = dict(zip("abc", (owners[index] for index in who), strict=False))
        text = draws.one(words.wordings[relation]).format(things=thing, k=number, **letters)
        return text[0].upper() + text[1:]

    said = [sentence(a.relation, (index, *a.sides), a.number) for index, a in enumerate(amounts)]
    asked = sentence("ask", (spec.steps - 1,), 0)
    steps = [
        {"name": name, "expression": amount.expression(names), "value": amount.value}
        for name, amount in zip(names, amounts, strict=True)
    ]
    question = " ".join([*(said[index] for index in _order(draws, spec, amounts)), asked])
    answer = str(steps[spec.steps - 1]["value"])
    return key, {"question": question, "answer": answer, "steps": steps[: spec.steps], "idle": steps[spec.steps :]}


# -- moves -----------------------------------------------------------------------------------------------------

Move = tuple[str, tuple[int, ...]]  # relation, and the entities or places that it names
RELATIONS = {
    "queue": ("front", "back", "trade", "behind", "before"),
    "slots": ("swap", "swap", "exchange", "contents", "rotate"),
}


def moved(state: Sequence[T], move: str, named: Sequence[Any]) -> list[T]:
    """Returns the arrangement after a move. `named` are entities, but places (positions) in exchange and contents."""
    state = list(state)
    if move in ("front", "back", "behind", "before"):
        state.remove(named[0])
        anchor = {"front": 0, "back": len(state)}.get(move)
        place = state.index(named[1]) + (move == "behind") if anchor is None else anchor
        state.insert(place, named[0])
        return state
    if move == "exchange":
        places = [state.index(named[0]), named[1]]
    else:
        places = list(named) if move == "contents" else [state.index(entity) for entity in named]
    there = [state[place] for place in places]
    for place, entity in zip(places, there[-1:] + there[:-1], strict=True):  # each goes where the next one was
        state[place] = entity
    return state


def _moves(draws: Draws, kind: str, size: int, steps: int) -> list[Move]:
    relations = RELATIONS[kind]
    state, found = list(range(size)), list[Move]()
    while len(found) < steps:
        move = draws.one(relations)
        count = {"front": 1, "back": 1, "rotate": 3}.get(move, 2)
        named = draws.some(range(size), count)
        if kind == "slots" and move != "contents" and 0 not in named and draws.below(2):
            named[draws.below(count) if move != "exchange" else 0] = 0  # one thing moves often: it may be asked for
        after = moved(state, move, named)
        if after != state and not (found and moved(after, *found[-1]) == after):
            state = after
            found.append((move, tuple(named)))
    return found


def _states(size: int, moves: Sequence[Move]) -> list[list[int]]:
    """Returns the arrangement at the start and after every move."""
    states = [list(range(size))]
    for move in moves:
        states.append(moved(states[-1], *move))
    return states


def _dependent(kind: str, size: int, moves: Sequence[Move]) -> list[int]:
    """Counts for every question the moves without which its answer would differ."""
    end = _states(size, moves)[-1]
    others = [_states(size, [*moves[:skip], *moves[skip + 1 :]])[-1] for skip in range(len(moves))]
    if kind == "queue":
        return [sum(other[place] != end[place] for other in others) for place in range(size)]
    return [sum(other.index(thing) != end.index(thing) for other in others) for thing in range(size)]


def _arrangement(draws: Draws, spec: Spec, words: Words) -> tuple[str, dict[str, Any]] | None:
    kind, size = draws.one(("queue", "slots")), draws.one(ENTITIES)
    best: tuple[int, int, list[Move]] = (-1, 0, [])
    for _ in range(TRIES):
        moves = _moves(draws, kind, size, spec.steps)
        weights = _dependent(kind, size, moves)
        asked = draws.one([index for index, weight in enumerate(weights) if weight == max(weights)])
        if max(weights) > best[0]:
            best = (max(weights), asked, moves)
    _, asked, moves = best
    entities = draws.some(words.names if kind == "queue" else words.objects, size)
    places = draws.some(words.places, size) if kind == "slots" else list(ORDINALS[:size])
    state = list(entities)
    said, steps = [_start(draws, words, kind, entities, places)], []
    for move, named in moves:
        text, named_ones = _said(draws, words, move, named, entities, places)
        state = moved(state, move, named_ones)
        said.append(text)
        steps.append({"name": entities[named[0]], "expression": text, "value": dict(zip(places, state, strict=True))})
    ask = draws.one(words.wordings["who" if kind == "queue" else "where"])
    said.append(ask.format(place=places[asked], a=entities[asked]) + " Answer with one word.")
    answer = state[asked] if kind == "queue" else places[state.index(entities[asked])]
    start = dict(zip(places, entities, strict=True))
    key = _digest(kind, _states(size, moves), asked)
    return key, {"question": " ".join(said), "answer": answer, "layout": kind, "start": start, "steps": steps}


def _start(draws: Draws, words: Words, kind: str, entities: Sequence[str], places: Sequence[str]) -> str:
    facts = [f"the {thing} is in the {place}" for thing, place in zip(entities, places, strict=True)]
    listed = entities if kind == "queue" else draws.some(facts, len(facts))
    text = ", ".join(listed[:-1]) + f" and {listed[-1]}"
    return draws.one(words.wordings[kind]).format(names=text, facts=text)


def _said(
    draws: Draws, words: Words, move: str, named: Sequence[int], entities: Sequence[str], places: Sequence[str]
) -> tuple[str, list[Any]]:
    """Returns the sentence of a move, and what it names: entities by their words, places by position."""
    letters = {"contents": "pq", "exchange": "ap"}.get(move, "abc")
    texts = {x: (places if x in "pq" else entities)[index] for x, index in zip(letters, named, strict=False)}
    things = [index if x in "pq" else entities[index] for x, index in zip(letters, named, strict=False)]
    return draws.one(words.wordings[move]).format(**texts), things


# -- rows ------------------------------------------------------------------------------------------------------

_FAMILIES: dict[str, Callable[[Draws, Spec, Words], tuple[str, dict[str, Any]] | None]] = {
    "chains": _chain,
    "moves": _arrangement,
}


def stream(spec: Spec, split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields different problems of one split without end, or raises ValueError once there seem to be no more."""
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}: choose one of {', '.join(SPLITS)}")
    draws = Draws(f"{spec} {split} {seed}")
    seen: set[str] = set()
    failures = 0
    while failures < PATIENCE:
        failures += 1
        drawn = _FAMILIES[spec.family](draws, spec, WORDS[split])
        if drawn is None or drawn[0] in seen or split_of(drawn[0]) != split:
            continue
        seen.add(drawn[0])
        failures = 0
        name = re.sub("[^a-z0-9]+", "-", str(spec))
        head = {"id": f"{name}-{split}-{seed}-{len(seen) - 1:05d}", "family": str(spec), "split": split}
        yield {**head, "num_steps": spec.steps, **drawn[1]}
    raise ValueError(f"{spec} has no more than about {len(seen)} different problems in the split {split!r}")


def generate(spec: str, split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns the first problems of a split, the same on every Python."""
    rows = stream(parse_spec(spec), split, seed)
    return [next(rows) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", metavar="SPEC", help="chains:STEPS[,shuffled][,idle=N] or moves:STEPS")
    parser.add_argument("split", metavar="SPLIT", choices=SPLITS, help=" or ".join(SPLITS))
    parser.add_argument("count", metavar="COUNT", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        for row in generate(args.spec, args.split, args.count, args.seed):
            print(json.dumps(row))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
