"""A search rebuilt from its event log alone, and whether the log's vote is the vote of its traces."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gambit import events as ev
from gambit.answers import Equivalent
from gambit.results.ballots import recount_votes
from gambit.results.record import SearchRecord, SearchResult, fold
from gambit.results.vote import VoteResult


@dataclass(frozen=True, slots=True)
class Replay:
    """A search rebuilt from its log, and how far the log can be believed."""

    result: SearchResult
    num_lines: int
    finding: str | None  # what is wrong: it has no end, or its vote is not that of its traces

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.finding is not None:
            return f"not verified: {self.finding}"
        return (
            f"verified: {self.num_lines} lines, none changed or missing; the vote in the log is the vote of its traces"
        )


def replay_log(path: Path, equivalent: Equivalent) -> Replay:
    """A log file, plain or .gz. Answers that the log held equal are so again; `equivalent` is asked for older logs."""
    num_lines = 0

    def counted() -> Iterator[ev.Event]:
        nonlocal num_lines
        for event in ev.read_log(path):
            num_lines += 1
            yield event

    record = fold(counted(), path)
    vote = _vote_again(record, equivalent)
    result = dataclasses.replace(record.result(vote), out_dir=str(path.parent))
    return Replay(result, num_lines, _finding(record, vote))


def replay(path: Path, equivalent: Equivalent) -> SearchResult:
    """The result, rebuilt from a log file alone."""
    return replay_log(path, equivalent).result


def _vote_again(record: SearchRecord, equivalent: Equivalent) -> VoteResult:
    pools = [tuple(map(str, forms)) for entry in _recorded(record) if isinstance(forms := entry.get("forms"), list)]
    if not pools:
        return record.vote(equivalent)
    try:
        return recount_votes(record.ballots(), record.vote_kind, tuple(pools))
    except (KeyError, ValueError):  # an answer that the recorded vote does not mention: the log was changed
        return record.vote(equivalent)


def _finding(record: SearchRecord, vote: VoteResult) -> str | None:
    if record.voted is None:
        return "the log ends before the vote"
    again: list[dict[str, ev.Json]] = [json.loads(json.dumps(dataclasses.asdict(entry))) for entry in vote.entries]
    known = [{name: entry.get(name) for name in told} for told, entry in zip(_recorded(record), again, strict=False)]
    is_same = (record.voted.answer, record.voted.margin) == (vote.answer, vote.margin)
    if is_same and len(again) == len(_recorded(record)) and known == _recorded(record):
        return None
    if record.voted.answer == vote.answer:
        return (
            f"the vote in the log is not the vote of its traces: {vote.answer!r} wins both, by other weights or counts"
        )
    return f"the vote in the log ({record.voted.answer!r}) is not the vote of its traces ({vote.answer!r})"


def _recorded(record: SearchRecord) -> list[dict[str, ev.Json]]:
    return [] if record.voted is None else [dict(entry) for entry in record.voted.votes]
