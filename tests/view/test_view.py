"""The data behind the tree page: it equals the replayed tree, texts come back whole, and hostile words stay words."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import itertools
import json
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from gambit import events as ev
from gambit.cli.app import app
from gambit.errors import UserError
from gambit.events import Chain
from gambit.models.files import locate
from gambit.storage.run_folder import find_log
from gambit.text.tokenizers import load_tokenizer
from gambit.tree import TraceState
from gambit.types import StopReason
from gambit.view import write_page
from gambit.view.data import PageData, build, pool_columns
from gambit.view.history import follow
from gambit.view.text import model_name, read_tokens
from support.browser import HOSTILE, LAST_STEP, QUESTION, Story
from support.scripted import ScriptedEngine
from support.searching import make, options, run_one, schedules, st
from support.tables import table
from support.tiny import tiny_sentencepiece_tokenizer, word_tokenizer


def page_of(events) -> tuple[PageData, list[bytes], object, object]:
    """Data, own texts, the history and the token texts, all without a tokenizer."""
    history = follow(events)
    tokens = [token for trace in history.record.tree.traces for token in trace.own_tokens]
    text = read_tokens([*tokens, *history.record.started.prompt_tokens], None)
    data, store = build(history, text, lambda a, b: a == b)
    ends = list(itertools.accumulate(data.traces.text, initial=0))
    own = [zlib.decompress(base64.b64decode(store[a:b])) for a, b in itertools.pairwise(ends)]
    return data, own, history, text


def whole_texts(data: PageData, own: list[bytes]) -> list[bytes]:
    """As the page assembles them."""
    found: list[bytes] = []
    for parent, cut, text in zip(data.traces.parent, data.traces.cut, own, strict=True):
        found.append(text if parent < 0 else found[parent][:cut] + text)
    return found


def thoughts_of(data: PageData):
    """(steps, scores, tokens, bytes) of each trace, undone from differences."""
    ends = list(itertools.accumulate(data.traces.thoughts, initial=0))
    columns = data.thoughts
    for a, b in itertools.pairwise(ends):
        summed = [list(itertools.accumulate(column[a:b])) for column in (columns.step, columns.tokens, columns.bytes)]
        yield summed[0], columns.score[a:b], summed[1], summed[2]


@settings(max_examples=60)
@given(schedules, options, st.integers(1, 6))
def test_columns_equal_the_replayed_tree(schedule, choice, swap):
    watched = run_one(ScriptedEngine(**schedule), make(choice, swap))
    data, own, _, text = page_of(watched.events)
    tree, columns = watched.search.record.tree, data.traces
    for trace in tree.traces:
        i = trace.id
        assert columns.parent[i] == (-1 if trace.parent is None else trace.parent)
        assert data.states[columns.state[i]] == trace.state
        assert (columns.created[i], columns.ended[i]) == (trace.created_step, trace.ended_step)
        assert (columns.inherited[i], columns.own[i]) == (trace.inherited, len(trace.own_tokens))
        assert columns.answer[i] == trace.answer
        assert columns.left[i] == -1 if trace.state is TraceState.GHOST else columns.left[i] >= trace.ended_step
    for trace, whole in zip(tree.traces, whole_texts(data, own), strict=True):
        assert whole == text.join(tree.tokens_of(trace.id))


@settings(max_examples=60)
@given(schedules, options, st.integers(1, 6))
def test_thoughts_lie_where_the_log_has_them_and_fold_to_the_scores(schedule, choice, swap):
    watched = run_one(ScriptedEngine(**schedule), make(choice, swap))
    data, _, _, text = page_of(watched.events)
    logged: dict[int, list[tuple[int, float, int]]] = {trace.id: [] for trace in watched.search.record.tree.traces}
    for event in watched.events:
        if isinstance(event, ev.Scored):
            for trace, score, tokens in zip(event.traces, event.scores, event.num_tokens, strict=True):
                logged[trace].append((event.step, score, tokens))
    tree, scores = watched.search.record.tree, []
    for i, (steps, own_scores, tokens, positions) in enumerate(thoughts_of(data)):
        assert [(step, length) for step, _, length in logged[i]] == list(zip(steps, tokens, strict=True))
        assert own_scores == pytest.approx([score for _, score, _ in logged[i]], rel=1e-3)
        inherited = scores[tree.traces[i].parent][: data.traces.seen[i]] if data.traces.seen[i] else []
        scores.append([*inherited, *own_scores])
        if scores[i]:
            assert np.mean(scores[i]) == pytest.approx(tree.score_of(tree.traces[i]), rel=1e-3)
        words = tree.tokens_of(i)
        assert positions == [len(text.join(words[:length])) for length in tokens]


@settings(max_examples=60)
@given(schedules, options, st.integers(1, 6))
def test_the_pool_is_the_size_that_samples_say(schedule, choice, swap):
    events = run_one(ScriptedEngine(**schedule), make(choice, swap)).events
    pool = pool_columns(follow(events))
    later = {event.step: event for event in events if isinstance(event, ev.Sample)}  # the last of each step
    changed_after = {e.step for e, after in itertools.pairwise(events) if isinstance(e, ev.Sample)
                     and not isinstance(after, ev.Voted) and after.step == e.step}  # fmt: skip
    for step, sample in later.items():
        at = max(place for place, changed in enumerate(pool.step) if changed <= step)
        if step not in changed_after or step == events[-2].step:
            assert pool.running[at] + pool.waiting[at] == sample.running + sample.waiting
            assert (pool.ghosts[at], pool.completed[at]) == (sample.ghosts, sample.completed)


# -- texts -----------------------------------------------------------------------------------------------------


@table("make_tokenizer", [word_tokenizer, tiny_sentencepiece_tokenizer])
def test_token_texts_joined_are_the_decoded_text(make_tokenizer):
    tokenizer = make_tokenizer()
    tokens = tokenizer.encode("a so é \N{PARTY POPPER}日本 a b\n\n b a.", add_special_tokens=False)
    text = read_tokens(tokens, tokenizer)
    assert text.join(tokens).decode() == tokenizer.decode(tokens)
    assert [len(text.join(tokens[:i])) for i in range(len(tokens) + 1)] == text.offsets(tokens).tolist()


def test_token_texts_of_the_bundled_model():
    tokenizer = load_tokenizer(locate("pawn"))
    tokens = tokenizer.encode(
        "a = 17; b = 61; c = a * b; c?<think>\nc = 17 * 61 = 67\n\n</think>", add_special_tokens=False
    )
    assert read_tokens(tokens, tokenizer).join(tokens).decode() == tokenizer.decode(tokens)


def test_without_a_tokenizer_tokens_are_numbers_and_the_page_says_why(tmp_path: Path):
    story = Story(tmp_path)
    story.events[0] = dataclasses.replace(story.header, environment={"engine": {"model": "/nowhere/at-all"}})
    write_page(story.write(), tmp_path / "page.html")
    data = _embedded(tmp_path / "page.html")
    [notice] = data["run"]["notices"]
    assert "token numbers" in notice and "/nowhere/at-all" in notice and not data["run"]["is_decoded"]
    prompt = " ".join(map(str, story.header.prompt_tokens))
    assert data["run"]["prompt"].strip() == prompt


def test_a_tokenizer_may_be_given_by_name_or_loaded(tmp_path: Path):
    story = Story(tmp_path)
    moved = (tmp_path / "tokenizer").rename(tmp_path / "elsewhere")
    log = story.write()
    for tokenizer in (str(moved), load_tokenizer(str(moved))):
        write_page(log, tmp_path / "page.html", tokenizer)
        run = _embedded(tmp_path / "page.html")["run"]
        assert (run["prompt"], run["notices"]) == ("so?", [])


def test_a_page_names_no_folder_of_the_machine():
    assert model_name("/home/someone/gambit/pawn/model") == "pawn"
    assert model_name("/home/someone/models/Qwen3-4B") == "Qwen3-4B"
    assert model_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"


# -- the page --------------------------------------------------------------------------------------------------


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self._script: str | None = None

    def handle_starttag(self, tag, attrs):
        self.opened.append(tag)
        self._script = dict(attrs).get("id", "code") if tag == "script" else None

    def handle_data(self, data):
        if self._script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    def handle_endtag(self, tag):
        self._script = None


def _parsed(page: Path) -> _Elements:
    parser = _Elements()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


def _embedded(page: Path):
    return json.loads(_parsed(page).scripts["data"])


def test_hostile_words_stay_words(tmp_path: Path):
    write_page(Story(tmp_path).write(), tmp_path / "page.html")
    parsed = _parsed(tmp_path / "page.html")
    assert sorted(parsed.scripts) == ["code", "data", "texts"]
    assert not {"b", "img"} & set(parsed.opened)
    data = json.loads(parsed.scripts["data"])
    assert data["run"]["question"] == QUESTION and HOSTILE in data["run"]["problem"]


def test_the_page_asks_nobody_for_anything(tmp_path: Path):
    write_page(Story(tmp_path).write(), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in text
    assert "http://" not in text and "https://" not in text and "{{" not in text


def test_the_story_is_told_by_the_columns(tmp_path: Path):
    story = Story(tmp_path)
    write_page(story.write(), tmp_path / "page.html")
    data = _embedded(tmp_path / "page.html")
    traces = data["traces"]
    states = [data["states"][state] for state in traces["state"]]
    assert states == ["finished", "pruned", "pruned", "finished", "cancelled"]
    assert traces["parent"] == [-1, -1, -1, 0, 3]
    assert traces["ended"] == [300, 200, 160, 350, 400] and traces["left"] == [300, 200, 240, 350, 400]
    assert traces["waits"] == [[], [], [], [200, 220], []]
    assert traces["seen"] == [0, 0, 0, 2, 3]
    assert [(row["answer"], row["traces"], row["roots"]) for row in data["votes"]] == [("7", [0], [0]), ("9", [3], [0])]
    assert [row["weight"] for row in data["votes"]] == [0.7, 0.5]  # (0.9 + 0.5) / 2, (0.9 + 0.5 + 0.1) / 3
    pool = data["pool"]
    at = {
        step: tuple(pool[name][i] for name in ("running", "waiting", "ghosts", "completed"))
        for i, step in enumerate(pool["step"])
    }
    assert at == {0: (3, 0, 0, 0), 160: (2, 0, 1, 0), 200: (1, 1, 1, 0), 220: (2, 0, 1, 0), 240: (3, 0, 0, 0),
                  300: (2, 0, 0, 1), 350: (1, 0, 0, 2), 400: (0, 0, 0, 2)}  # fmt: skip


def test_discarded_traces_have_no_vote_and_pruned_ones_may(tmp_path: Path):
    story = Story(tmp_path)
    at = next(i for i, event in enumerate(story.events) if isinstance(event, ev.Cancelled))
    story.events.insert(at, ev.Discarded(360, 3, "below the others"))
    pruned = next(i for i, event in enumerate(story.events) if isinstance(event, ev.Pruned))
    story.events[pruned] = dataclasses.replace(story.events[pruned], answer="9")
    write_page(story.write(), tmp_path / "page.html")
    data = _embedded(tmp_path / "page.html")
    assert [(row["answer"], row["traces"], row["roots"]) for row in data["votes"]] == [("7", [0], [0]), ("9", [1], [1])]
    assert data["traces"]["answer"][3] == "9" and data["traces"]["weight"] == [0.7, 0.2, 0, 0, 0]


@pytest.mark.parametrize("num_events", range(1, 26))
def test_a_log_cut_short_anywhere_makes_a_page(tmp_path: Path, num_events: int):
    story = Story(tmp_path)
    write_page(story.write(num_events), tmp_path / "page.html")
    data = _embedded(tmp_path / "page.html")
    assert bool(data["run"]["notices"]) == (num_events < 24)  # Stopped is the 24th


# -- finding the log -------------------------------------------------------------------------------------------


def test_a_log_is_found_by_file_folder_or_parent(tmp_path: Path):
    (tmp_path / "run").mkdir()
    log = Story(tmp_path / "run").write()
    assert find_log(log) == find_log(tmp_path / "run") == find_log(tmp_path) == log


def test_a_folder_with_no_log_or_with_several_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"no events\.jsonl in"):
        find_log(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        Story(tmp_path / name).write()
    with pytest.raises(UserError, match="holds 2 runs: name one"):
        find_log(tmp_path)


def test_compressed_logs_are_read_also_when_cut(tmp_path: Path):
    story = Story(tmp_path)
    plain = story.write().read_bytes()
    packed = tmp_path / "events.jsonl.gz"
    packed.write_bytes(gzip.compress(plain))
    assert list(ev.read_log(packed)) == list(ev.read_log(story.log))
    packed.write_bytes(gzip.compress(plain)[:-300])
    some = list(ev.read_log(packed))
    assert 0 < len(some) < len(story.events) and some == list(ev.read_log(story.log))[: len(some)]


def test_the_command_writes_beside_the_log_and_says_where(tmp_path: Path):
    Story(tmp_path).write()
    result = CliRunner().invoke(app, ["view", str(tmp_path)])
    assert (result.exit_code, result.stdout.strip()) == (0, str(tmp_path / "tree.html"))
    assert (tmp_path / "tree.html").is_file()
    elsewhere = tmp_path / "new" / "page.html"
    assert CliRunner().invoke(app, ["view", str(tmp_path / "events.jsonl"), "--out", str(elsewhere)]).exit_code == 0
    assert elsewhere.is_file()


def test_the_command_refuses_what_is_no_run(tmp_path: Path):
    result = CliRunner().invoke(app, ["view", str(tmp_path / "nothing")])
    assert result.exit_code == 2 and "give the folder of a run" in " ".join(result.stderr.split())
    Story(tmp_path).write()
    result = CliRunner().invoke(app, ["view", str(tmp_path), "--tokenizer", "/nowhere"])
    assert result.exit_code == 2 and "/nowhere" in result.stderr


def test_the_page_tells_how_many_traces_ended_in_which_way():
    from gambit.view.data import _facts
    from support.scripted import ScriptedEngine
    from support.searching import make_settings, run_one

    engine = ScriptedEngine(seed=2, finish_chance=0.05, kv_tokens=200)
    watched = run_one(engine, make_settings(capacity=8, budget_tokens=260, hard_floor=0.45))
    result = watched.search.result
    ends = [result.counts.completed, result.counts.pruned, result.counts.ghosts, result.counts.cancelled]
    assert all(ends) and len(set(ends)) > 1, "each way to end has to occur"
    facts = dict(_facts(follow(watched.events), result))
    assert facts["sharing"].startswith(f"{result.sharing.factor:.2f}: ")
    said = facts["traces"]
    words = ("completed", "pruned", "ghosts", "cut off")
    assert ": " + ", ".join(f"{n} {word}" for n, word in zip(ends, words, strict=True)) + "; planned: " in said


# -- forged logs -------------------------------------------------------------------------------------------------


def test_a_forged_step_number_takes_no_memory(tmp_path):
    story = Story(tmp_path)
    ordinary, forged = follow(story.events), follow([*story.events[:-3], ev.Stopped(10**15, StopReason.EXHAUSTED)])
    assert pool_columns(forged) == pool_columns(ordinary) and pool_columns(forged).step[-1] == LAST_STEP
    assert forged.last_step == 10**15, "tens of petabytes, had every step its place"


FORGED = [
    (0, "capacity", 10**30, "line 1: not an event of this log format (capacity is 1000"),
    (0, "seed", 0.5, "line 1: not an event of this log format (seed is 0.5)"),
    (0, "question", "half \ud83c", "line 1: not an event of this log format ("),
    (0, "vote", "applause", "events.jsonl cannot follow the lines before it"),
    (1, "step", None, "line 2: not an event of this log format (step is None)"),
    (1, "step", -1, "(step is -1)"),
    (1, "trace", True, "(trace is True)"),
    (8, "scores", [None, 0.1], "(scores is [None, 0.1])"),
    (8, "num_tokens", [10**10, 1], "(num_tokens is [10000000000, 1])"),
    (10, "trace", 10**9, "events.jsonl cannot follow the lines before it"),
    (10, "tokens", [-1], "line 11: not an event of this log format (tokens is [-1])"),
    (10, "tokens", {"a": 1}, "(tokens is {'a': 1})"),
    (19, "answer", ["7"], "line 20: not an event of this log format (answer is ['7'])"),
    (19, "confidence", [1, 2, 3, 4, "5"], "(confidence is [1, 2, 3, 4, '5'])"),
    (22, "seconds_total", 10**400, "line 23: not an event of this log format (seconds_total is 1000"),
    (24, "votes", [1], "(votes is [1])"),
]


@pytest.mark.parametrize("command", ["view", "replay"])
def test_an_empty_log_is_refused_by_its_name(tmp_path, command):
    (tmp_path / "none.jsonl").touch()
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [command, str(tmp_path / "none.jsonl")])
    assert done.exit_code == 2 and "none.jsonl is empty" in done.stderr


@pytest.mark.parametrize(("place", "name", "value", "culprit"), FORGED)
def test_a_forged_field_is_refused_with_its_line(tmp_path, place, name, value, culprit):
    records = [json.loads(ev.to_json(event)) for event in Story(tmp_path).events]
    assert name in records[place]
    records[place][name] = value
    chain = Chain()
    log = tmp_path / "events.jsonl"
    log.write_text("".join(chain.link(json.dumps(record, separators=(",", ":"))) + "\n" for record in records))
    for command in ("view", "replay"):
        done = CliRunner(env={"COLUMNS": "400"}).invoke(app, [command, str(log)])
        assert done.exit_code == 2 and culprit in done.stderr, (command, done.output)
        assert done.stderr.count("\n") == 1 and len(done.stderr) < 400
