"""The log as evidence: a changed, doubled, moved or missing line is found by its number, whatever it says."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit.core import events as ev
from gambit.core.errors import UserError
from gambit.results.record import fold
from gambit.results.replay import replay_log
from scripted import ScriptedEngine
from searching import make_settings, run_one


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
    record.tree.check_ended()


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
    assert "log format 3, this version reads up to 2" in refused(tmp_path, [later, *lines[1:]])


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


def forged(lines):
    """The lines as a log of the first format, which has no chain: what is impossible must be found by its sense."""
    for line in lines:
        record = json.loads(line)
        del record["line"], record["chain"]
        yield {**record, "format": 1} if record["event"] == "RunStarted" else record


def test_logs_of_the_first_format_are_read(lines, tmp_path):
    assert read(tmp_path, map(json.dumps, forged(lines))).voted is not None


@settings(max_examples=300)
@given(st.data())
def test_impossible_events_of_an_unchained_log_are_named_and_never_crash(lines, tmp_path_factory, data):
    records = list(forged(lines))
    at = data.draw(st.integers(1, len(records) - 1))
    key = data.draw(st.sampled_from(sorted(records[at])))
    wrong = data.draw(st.sampled_from([None, -1, 10**6, "x", [], {}, 0.5, True, [None]]))
    records[at] = {**records[at], key: wrong}
    try:
        read(tmp_path_factory.mktemp("forged"), map(json.dumps, records))
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


def test_a_forged_vote_of_an_unchained_log_is_found(lines, tmp_path):
    records = list(forged(lines))
    assert replay_log_of(tmp_path, map(json.dumps, records)).verdict.startswith("unverifiable")
    for change in ({"answer": "4711"}, {"margin": 0.99}, {"votes": []}):
        wrong = [*records[:-1], {**records[-1], **change}]
        assert "is not the vote of its traces" in replay_log_of(tmp_path, map(json.dumps, wrong)).verdict


def replay_log_of(tmp_path, lines):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return replay_log(path, lambda first, second: first == second)
