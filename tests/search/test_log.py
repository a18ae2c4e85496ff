"""The log as evidence: a changed, doubled, moved or missing line is found by its number, whatever it says."""

import gzip
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit import events as ev
from gambit.errors import UserError
from gambit.events import BrokenChainError, Chain
from gambit.results.record import fold, replay_log
from gambit.types import EndReason, StopReason, TraceConfidence
from support.scripted import ScriptedEngine
from support.searching import check_ended, make_settings, run_one


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with ev.LogWriter(path) as log:
        for event in run_one(ScriptedEngine(seed=3, kv_tokens=150), make_settings(capacity=4, islands=2)).events:
            log.write(event)
    return path.read_text().splitlines()


def read(tmp_path, lines):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return fold(ev.read_log(path))


def refused(tmp_path, lines):
    with pytest.raises(UserError, match=r"line \d+|empty|does not begin") as caught:
        read(tmp_path, lines)
    return str(caught.value)


def test_an_untouched_log_is_read(lines, tmp_path):
    record = read(tmp_path, lines)
    assert record.voted is not None and len(lines) > 30
    check_ended(record.tree)


def test_every_single_line_that_is_missing_doubled_or_moved_is_named(lines, tmp_path):
    for at in range(len(lines) - 1):
        for changed in ([*lines[:at], *lines[at + 1 :]], [*lines[: at + 1], *lines[at:]]):
            where = refused(tmp_path, changed)
            assert at == 0 or f"line {at + 1}:" in where or f"line {at + 2}:" in where
        moved = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
        refused(tmp_path, moved)


def test_a_log_that_is_cut_short_is_read_as_far_as_it_goes(lines, tmp_path):
    assert read(tmp_path, lines[:-1]).voted is None
    assert read(tmp_path, lines[: len(lines) // 2]).stopped is None


def test_what_is_no_event_is_named(lines, tmp_path):
    for name in ("Vanished", None):
        strange = json.dumps({**json.loads(lines[3]), "event": name})
        assert f"line 4: not an event of this log format (unknown event {name!r})" in refused(
            tmp_path, [*lines[:3], strange, *lines[4:]]
        )
    later = json.dumps({**json.loads(lines[0]), "format": 3})
    assert "log format 3, this version reads 2" in refused(tmp_path, [later, *lines[1:]])


def test_a_log_written_twice_into_one_file_is_refused(lines, tmp_path):
    assert f"line {len(lines) + 1}" in refused(tmp_path, lines + lines)


@settings(max_examples=200)
@given(st.data())
def test_any_changed_number_or_word_is_found(lines, tmp_path_factory, data):
    at = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.integers(0, len(lines[at]) - 1))
    letter = data.draw(st.sampled_from('0123456789abcxyz{}[],:"'))
    if lines[at][place] == letter:
        return
    changed = lines[at][:place] + letter + lines[at][place + 1 :]
    refused(tmp_path_factory.mktemp("changed"), [*lines[:at], changed, *lines[at + 1 :]])


def unlinked(lines):
    for line in lines:
        record = json.loads(line)
        del record["line"], record["chain"]
        yield record


def linked_again(records):
    """The records as a log whose chain is right: what is impossible must be found by its sense."""
    chain = Chain()
    return [chain.link(json.dumps(record, separators=(",", ":"))) for record in records]


@settings(max_examples=300)
@given(st.data())
def test_impossible_events_of_a_forged_log_are_named_and_never_crash(lines, tmp_path_factory, data):
    records = list(unlinked(lines))
    at = data.draw(st.integers(1, len(records) - 1))
    key = data.draw(st.sampled_from(sorted(records[at])))
    wrong = data.draw(st.sampled_from([None, -1, 10**6, "x", [], {}, 0.5, True, [None]]))
    records[at] = {**records[at], key: wrong}
    try:
        read(tmp_path_factory.mktemp("forged"), linked_again(records))
    except UserError as error:
        assert "line " in str(error)


# -- the vote in the log ---------------------------------------------------------------------------------------------


def replayed(tmp_path, lines):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))

    def ask(first, second):
        raise AssertionError(f"the log says which answers are equal: {first} and {second} need no grader")

    return replay_log(path, ask)


def test_a_replay_needs_no_grader_and_says_that_the_vote_is_that_of_the_traces(lines, tmp_path):
    found = replayed(tmp_path, lines)
    assert found.finding is None and found.verdict.startswith(f"verified: {len(lines)} lines")
    assert found.result.answer == read(tmp_path, lines).voted.answer


def test_a_log_without_an_end_is_not_verified(lines, tmp_path):
    assert "ends before the vote" in replay_log_of(tmp_path, lines[:-1]).verdict


def test_a_forged_vote_is_found(lines, tmp_path):
    records = list(unlinked(lines))
    assert replay_log_of(tmp_path, linked_again(records)).finding is None
    for change in ({"answer": "4711"}, {"margin": 0.99}, {"votes": []}):
        wrong = [*records[:-1], {**records[-1], **change}]
        assert "is not the vote of its traces" in replay_log_of(tmp_path, linked_again(wrong)).verdict


def replay_log_of(tmp_path, lines):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return replay_log(path, lambda first, second: first == second)


EVERY_KIND = [
    ev.Created(1, 0, 2), ev.Branched(2, 1, 0, 5, 0.7), ev.Admitted(3, 1, 4, 1, 2), ev.Queued(4, 1, 6),
    ev.Scored(5, (0, 1), (0.5, 0.25), (3, 7)), ev.Verified(6, (0,), (0.5,), (3,), (5,), (None,)),
    ev.Pruned(7, 1, "tournament", 0.1, (1, 2), "½"), ev.Evicted(8, 1, "floor", None, ()),
    ev.Finished(9, 0, EndReason.LENGTH, "é", (4, 5), TraceConfidence(3, 1.0, 2.0, 3.0, 4.0)),
    ev.Finished(9, 0, EndReason.STOP, None, (4, 5)),
    ev.Discarded(9, 0, "late"), ev.Cancelled(9, 1, (7,)), ev.Waited(9, (0,), (3,), (0.125,)),
    ev.Stopped(9, StopReason.BUDGET_TOKENS), ev.Voted("é", 0.5, ({"answer": "é", "weight": 1.0},)),
]  # fmt: skip


@pytest.mark.parametrize("event", EVERY_KIND, ids=lambda event: type(event).__name__)
def test_an_event_is_read_as_it_was_written(event):
    line = ev.to_json(event)
    assert ev.from_json(line) == event and type(ev.from_json(line)) is type(event)
    chained = Chain().link(line)
    assert ev.from_json(chained) == event, "also with its place in a chain"
    assert ": " not in line and ", " not in line and json.loads(chained)["line"] == 1


def test_a_log_is_on_the_disk_line_by_line_and_has_one_writer(tmp_path):
    path = tmp_path / "new" / "folder" / "events.jsonl"
    log = ev.LogWriter(path)
    for count, event in enumerate(EVERY_KIND, start=1):
        log.write(event)
        assert len(path.read_text(encoding="utf-8").splitlines()) == count, "before it is closed"
    assert "½" in path.read_text(encoding="utf-8") and log.path == path
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write(EVERY_KIND[0])
    with pytest.raises(FileExistsError):
        ev.LogWriter(path)  # two runs that begin at the same moment do not write into one log
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(EVERY_KIND)


def test_a_chain_numbers_its_lines_and_tells_what_does_not_fit():
    writer, reader = Chain(), Chain()
    first, second = (writer.link(json.dumps({"a": number}, separators=(",", ":"))) for number in (1, 2))
    record = json.loads(first)
    reader.unlink(first, record)
    assert record == {"a": 1} and (reader.num_lines, writer.num_lines) == (1, 2), "both fields are taken out"
    changed = second.replace('"a":2', '"a":3')
    with pytest.raises(
        BrokenChainError, match=r"^it does not fit the lines before it: it, or one of them, was changed$"
    ):
        reader.unlink(changed, json.loads(changed))
    with pytest.raises(BrokenChainError, match=r"^it is numbered null: lines are missing, doubled or out of order$"):
        Chain().unlink('{"a":1}', {"a": 1})
    bare = '{"a":1,"line":1}'
    with pytest.raises(BrokenChainError, match="it does not fit"):
        Chain().unlink(bare, json.loads(bare))


def test_the_chain_is_a_hash_over_all_lines_so_far():
    """Written down, for logs of earlier runs must still fit."""
    chain = Chain()
    assert [chain.link('{"a":1}'), chain.link('{"a":1}')] == [
        '{"a":1,"line":1,"chain":"7de053a59153d749"}', '{"a":1,"line":2,"chain":"2efe6ad7187d4a6a"}',
    ]  # fmt: skip


def test_a_compressed_log_is_read_also_when_it_was_never_finished(lines, tmp_path):
    content = "".join(f"{line}\n" for line in lines)
    path = tmp_path / "events.jsonl.gz"
    path.write_bytes(gzip.compress(content.encode()))
    assert fold(ev.read_log(path)).voted is not None
    path.write_bytes(gzip.compress(content.encode())[:-20])
    assert fold(ev.read_log(path)).voted is None


READ_AND_WRITE = """
import gzip, sys
from pathlib import Path
from gambit import events as ev
path = Path(sys.argv[1]) / "events.jsonl"
event = ev.Created(1, 0)
with ev.LogWriter(path) as log:
    log.write(ev.RunStarted(2, "p", "½?", "gambit", "score", "mean", 0, 1, 1, (), {}, {}))
list(ev.read_log(path))
packed = path.with_suffix(".gz")
packed.write_bytes(gzip.compress(path.read_bytes()))
assert [event.question for event in ev.read_log(packed)] == ["½?"]
"""


def test_a_log_is_read_and_written_in_utf_8_whatever_the_machine_speaks(tmp_path):
    """Python warns of a file that is opened without saying so."""
    strict = [option for module in ("gambit.events", "gzip") for option in ("-W", f"error::EncodingWarning:{module}")]
    options = ["-X", "warn_default_encoding", *strict]
    subprocess.run([sys.executable, *options, "-c", READ_AND_WRITE, str(tmp_path)], check=True)


@pytest.mark.parametrize("escape", ["\\ud800", "\\uDFFF"])
def test_half_a_character_in_a_log_is_refused(lines, tmp_path, escape):
    record = next(unlinked(lines))
    text = json.dumps({**record, "question": "HERE"}, separators=(",", ":")).replace("HERE", escape)
    path = tmp_path / "events.jsonl"
    path.write_text(Chain().link(text) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"line 1: not an event of this log format \(.*surrogates not allowed"):
        list(ev.read_log(path))
