"""Folds the events of a search, live or from its log, into its tree, its counts and its result."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gambit import events as ev
from gambit.answers import Equivalent, Grader
from gambit.errors import UserError
from gambit.events import Json
from gambit.results.result import (
    Counts,
    Cuts,
    EarlyEnds,
    SearchResult,
    Seconds,
    Tokens,
    VerifierCost,
    Waiting,
    outline_of,
    pool_of,
    sharing_of,
)
from gambit.results.vote import Ballot, VoteEntry, VoteKind, VoteResult, ballots_of, count_votes, recount_votes
from gambit.tree import Trace, TraceState, TraceTree
from gambit.types import Aggregation, PoolSettings, StopReason


@dataclass(slots=True)
class SearchRecord:
    """The state of one search after its events so far."""

    started: ev.RunStarted
    tree: TraceTree = field(init=False)
    sample: ev.Sample | None = None
    stopped: ev.Stopped | None = None
    voted: ev.Voted | None = None
    verified: ev.VerifierTotals | None = None
    split: ev.IslandsSplit | None = None  # the last
    num_events: int = 1
    kv_share: float = 0.0  # the most of the KV cache that samples saw in use

    def __post_init__(self) -> None:
        VoteKind(self.started.vote)  # one that there is not is found here, where its line is known
        self.tree = TraceTree(self.started.capacity, Aggregation(self.started.aggregation))

    def apply(self, event: ev.Event) -> None:
        self.num_events += 1
        if isinstance(event, ev.Sample):
            self.sample = event
            self.kv_share = max(self.kv_share, event.kv_used_tokens / max(event.kv_capacity_tokens, 1))
        elif isinstance(event, ev.Stopped):
            self.stopped = event
        elif isinstance(event, ev.Voted):
            self.voted = event
        elif isinstance(event, ev.VerifierTotals):
            self.verified = event
        else:
            self.split = event if isinstance(event, ev.IslandsSplit) else self.split
            self.tree.apply(event)

    def vote(self, equivalent: Equivalent) -> VoteResult:
        """Returns the vote among the traces that have finished so far."""
        return count_votes(self.ballots(), self.vote_kind, equivalent)

    def ballots(self) -> list[Ballot]:
        return ballots_of(self.tree, self.vote_kind)

    def winners(self, votes: Sequence[VoteEntry]) -> list[Trace]:
        """Returns the trace of most weight of each answer of a vote, the first among equals."""
        ballots = self.ballots()
        sides = ([ballot for ballot in ballots if ballot.answer in entry.forms] for entry in votes)
        return [self.tree.traces[max(side, key=lambda vote: (vote.weight, -vote.trace)).trace] for side in sides]

    def winning_text(self, votes: Sequence[VoteEntry], text_of: Callable[[Sequence[int]], str]) -> str | None:
        """Returns the text of the trace of most weight behind the answer; None without an answer."""
        return next((text_of(self.tree.tokens_of(trace.id)) for trace in self.winners(votes[:1])), None)

    @property
    def vote_kind(self) -> VoteKind:
        return VoteKind(self.started.vote)

    @property
    def num_islands(self) -> int:
        """Returns the number of islands now; logs from before islands have one."""
        if self.split is not None:
            return self.split.islands
        found = self.started.settings.get("islands", 1)
        return found if isinstance(found, int) else 1

    @property
    def num_engines(self) -> int:
        """Returns the number of engines that the search was spread over."""
        found = self.started.environment.get("engines", 1)
        return found if isinstance(found, int) else 1

    @property
    def counts(self) -> Counts:
        tree = self.tree
        return Counts(
            roots=sum(trace.parent is None for trace in tree.traces),
            branched=sum(trace.parent is not None for trace in tree.traces) - tree.num_forced,
            pruned=tree.count(TraceState.PRUNED) - tree.num_forced,
            evicted=sum(trace.was_evicted for trace in tree.traces),
            completed=tree.count(TraceState.FINISHED),
            cancelled=tree.count(TraceState.CANCELLED),
            ghosts=tree.count(TraceState.GHOST),
            discarded=sum(trace.is_discarded for trace in tree.traces),
        )

    @property
    def waiting(self) -> Waiting:
        waited = [trace for trace in self.tree.traces if trace.waited_steps]
        return Waiting(
            traces=len(waited),
            steps=sum(trace.waited_steps for trace in waited),
            seconds=sum(trace.waited_seconds for trace in waited),
            most_steps=max((trace.waited_steps for trace in waited), default=0),
            most_seconds=max((trace.waited_seconds for trace in waited), default=0.0),
        )

    @property
    def tokens(self) -> Tokens:
        traces = self.tree.traces
        return Tokens(
            generated=sum(max(trace.num_own_tokens - trace.num_given, 0) for trace in traces),
            reused=sum(trace.reused for trace in traces),
            recomputed=sum(trace.recomputed for trace in traces),
        )

    @property
    def verifier(self) -> VerifierCost | None:
        totals = self.verified
        if totals is None:
            return None
        same = {name: getattr(totals, name) for name in VerifierCost.of_totals}
        return VerifierCost(name=totals.verifier, is_repeatable=not totals.is_async, **same)

    @property
    def seconds(self) -> Seconds:
        s = self.sample
        if s is None:
            return Seconds()
        total = s.seconds_total + (self.verified.seconds_for_vote if self.verified else 0.0)
        return Seconds(total, s.seconds_engine, s.seconds_scoring + s.seconds_scheduling + s.seconds_search)

    @property
    def pool(self) -> PoolSettings | None:
        return pool_of(self.started.settings, self.split)

    @property
    def early_ends(self) -> EarlyEnds | None:
        """Returns the traces that ended before tournaments began; None without any, or if no trace could go on."""
        pool, most = self.pool, self.started.settings.get("max_new_tokens")
        if pool is None or (isinstance(most, int) and pool.warmup_tokens >= most):
            return None
        finished = self.tree.in_state(TraceState.FINISHED)
        return EarlyEnds.of((trace.num_tokens, pool.warmup_tokens) for trace in finished)

    def result(self, vote: VoteResult) -> SearchResult:
        """Returns the result; a log that was cut short counts as a failed run with the votes it has."""
        started = self.started
        return SearchResult(
            problem_id=started.problem_id,
            answer=vote.answer,
            votes=vote.entries,
            margin=vote.margin,
            num_abstained=vote.num_abstained,
            policy=started.policy,
            seed=started.seed,
            counts=self.counts,
            tokens=self.tokens,
            seconds=self.seconds,
            stop_reason=self.stopped.reason if self.stopped else StopReason.FAILED,
            waiting=self.waiting,
            sharing=sharing_of(self.tree, len(started.prompt_tokens)),
            verifier=self.verifier,
            pool=self.pool,
            cuts=Cuts(self.tree.num_forced, self.tree.num_looped),
            traces=outline_of(self.tree),
        )


def voted(vote: VoteResult) -> ev.Voted:
    """Returns the event that announces a vote."""
    return ev.Voted(vote.answer, vote.margin, tuple(dataclasses.asdict(entry) for entry in vote.entries))


IMPOSSIBLE = (AssertionError, LookupError, ValueError, TypeError, AttributeError)  # raised by an event that cannot be


def fold(
    events: Iterable[ev.Event],
    log: object = "the log",
    on_event: Callable[[SearchRecord, ev.Event], None] = lambda record, event: None,
) -> SearchRecord:
    """Returns the record of a whole log; reports the record after each event, which is then known to be possible.

    Raises UserError with the line of an event that cannot follow those before it.
    """
    record: SearchRecord | None = None
    for number, event in enumerate(events, start=1):
        if record is None and not isinstance(event, ev.RunStarted):
            raise UserError(f"{log} does not begin with RunStarted: it is no log of a Gambit run")
        try:
            record = extended(record, event)
            on_event(record, event)
        except IMPOSSIBLE as error:
            raise UserError(
                f"line {number} of {log} cannot follow the lines before it ({error}): it, or one of them, was changed"
            ) from error
    if record is None:
        raise UserError(f"{log} is empty: its run was ended before it began")
    return record


def extended(record: SearchRecord | None, event: ev.Event) -> SearchRecord:
    """Returns the record after one more event, which it asserts to be possible there."""
    if record is None:
        assert isinstance(event, ev.RunStarted)
        return SearchRecord(event)
    assert not isinstance(event, ev.RunStarted), "a second run begins"
    assert record.voted is None, "the search had ended"
    is_late = isinstance(event, ev.Voted | ev.Verified | ev.VerifierTotals)  # scores may come until the vote
    assert record.stopped is None or is_late, "the search had stopped"
    record.apply(event)
    return record


@dataclass(frozen=True, slots=True)
class Replay:
    """A search rebuilt from its log, and how far the log can be believed."""

    result: SearchResult
    num_lines: int
    finding: str | None  # what is wrong: it has no end, or its vote is not that of its traces

    @property
    def verdict(self) -> str:
        """Returns one sentence about the log."""
        if self.finding is not None:
            return f"not verified: {self.finding}"
        return (
            f"verified: {self.num_lines} lines, none changed or missing; the vote in the log is the vote of its traces"
        )


def replay_log(path: Path, equivalent: Equivalent) -> Replay:
    """Rebuilds a search from a log file, plain or .gz.

    Answers that the log held equal are so again; `equivalent` decides for older logs, which do not say.
    """
    record = fold(ev.read_log(path), path)
    vote = _vote_again(record, equivalent)
    result = dataclasses.replace(record.result(vote), out_dir=str(path.parent))
    return Replay(result, record.num_events, _finding(record, vote))


def replay(path: Path | str, equivalent: Equivalent | None = None) -> SearchResult:
    """Returns the result, rebuilt from a log file alone.

    `equivalent(first, second)` compares answers of logs that do not say which are equal; by default a `Grader` does.
    """
    with Grader() as grader:  # starts no process before it is needed
        return replay_log(Path(path), equivalent or grader.equivalent).result


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
    logged = _recorded(record)
    known = [{name: entry.get(name) for name in before} for before, entry in zip(logged, again, strict=False)]
    is_same = (record.voted.answer, record.voted.margin) == (vote.answer, vote.margin)
    if is_same and len(again) == len(logged) and known == logged:
        return None
    if record.voted.answer == vote.answer:
        return (
            f"the vote in the log is not the vote of its traces: {vote.answer!r} wins both, by other weights or counts"
        )
    return f"the vote in the log ({record.voted.answer!r}) is not the vote of its traces ({vote.answer!r})"


def _recorded(record: SearchRecord) -> list[dict[str, ev.Json]]:
    return [] if record.voted is None else [dict(entry) for entry in record.voted.votes]


# -- the authors' form of a tree --------------------------------------------------------------------------------


def authors_tree(path: Path) -> dict[str, Json]:
    """Returns stats, nodes by id and roots of the search in a log.

    `score_history` has a trace's score after each thought of its own. Texts are left out, as are finish reasons, which
    theirs always leaves empty, and what their threshold mode keeps.
    """
    histories = defaultdict[int, list[Json]](list)  # the scores that each trace has had

    def note(record: SearchRecord, event: ev.Event) -> None:
        if isinstance(event, ev.Scored | ev.Verified):
            for trace in event.traces:
                histories[trace].append(record.tree.score_of(record.tree.traces[trace]))

    record = fold(ev.read_log(path), path, note)
    tree = record.tree
    children: dict[int, list[Json]] = defaultdict(list)
    for trace in tree.traces:
        if trace.parent is not None:
            children[trace.parent].append(str(trace.id))
    nodes: dict[str, Json] = {
        str(trace.id): _node(trace, tree.score_of(trace), histories[trace.id], children[trace.id])
        | {"output_token_ids": list(tree.tokens_of(trace.id))}
        for trace in tree.traces
    }
    roots: list[Json] = [str(trace.id) for trace in tree.traces if trace.parent is None]
    stats: dict[str, Json] = {
        "total_nodes": len(nodes),
        "active_count": sum(trace.is_active for trace in tree.traces),
        "completed_count": tree.count(TraceState.FINISHED),
        "pruned_count": tree.count(TraceState.PRUNED) + tree.count(TraceState.CANCELLED),
        "max_depth": max((trace.depth for trace in tree.traces), default=0),
        "num_roots": len(roots),
        "branch_counter": len(nodes) - len(roots),
        "current_step": record.sample.step if record.sample is not None else 0,
    }
    return {"stats": stats, "nodes": nodes, "roots": roots, "completed_traces": []}


def _node(trace: Trace, score: float | None, history: list[Json], children: list[Json]) -> dict[str, Json]:
    """Returns all of a node but its tokens, which are those from the prompt on."""
    return {
        "req_id": str(trace.id),
        "parent_id": None if trace.parent is None else str(trace.parent),
        "branch_depth": trace.depth,
        "created_at_step": trace.created_step,
        "branch_parent_output_len": trace.inherited,
        "score_history": history,
        "latest_score": history[-1] if history else None,
        "avg_score": score,
        "is_active": trace.is_active,
        "is_completed": trace.state is TraceState.FINISHED,
        "is_pruned": trace.state in (TraceState.PRUNED, TraceState.CANCELLED),
        "children": children,
        "output_token_count": trace.num_tokens,
        "finish_reason": None,
        "stop_reason": None,
        "final_score": score,
    }
