"""Folds the events of a search, live or from its log, into its tree, its counts and its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gambit import events as ev
from gambit.errors import UserError
from gambit.results.ballots import ballots_of, count_votes
from gambit.results.early_ends import EarlyEnds
from gambit.results.html import result_html
from gambit.results.outline import TraceOutline, outline_of
from gambit.results.sharing import NOTHING_READ, SearchSharing, sharing_of
from gambit.results.vote import Ballot, VoteEntry, VoteKind, VoteResult
from gambit.tree import TraceState, TraceTree
from gambit.types import Aggregation, StopReason

Equivalent = Callable[[str, str], bool]

STOP_WORDS: Mapping[StopReason, str] = {
    StopReason.COMPLETED: "the planned number of traces is complete",
    StopReason.EXHAUSTED: "no trace was left to run",
    StopReason.POLICY: "the search method had seen enough",
    StopReason.CONSENSUS: "the vote was settled (--consensus-stop)",
    StopReason.BUDGET_TOKENS: "the token budget is used up (--budget-tokens)",
    StopReason.BUDGET_SECONDS: "the time is up (--budget-seconds)",
    StopReason.BUDGET_TRACES: "the trace budget is used up (--budget-traces)",
    StopReason.INTERRUPTED: "interrupted; this is the best vote so far",
    StopReason.FAILED: "it failed before its end",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the traces; `ghosts` are those still ghosts at the end, `evicted` all that ever were."""

    roots: int = 0
    branched: int = 0
    pruned: int = 0
    evicted: int = 0
    completed: int = 0
    cancelled: int = 0
    ghosts: int = 0
    discarded: int = 0  # completed, but without a vote

    @property
    def by_end(self) -> dict[str, int]:
        """All traces, by what became of them, as displays call it."""
        return {
            "completed": self.completed, "pruned": self.pruned, "ghosts": self.ghosts, "cut off": self.cancelled,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long traces waited for KV cache, over all their admissions."""

    traces: int = 0  # that waited at all
    steps: int = 0  # of all traces together
    seconds: float = 0.0
    most_steps: int = 0  # of one trace
    most_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ledger: sampled, inherited from a cached prefix, and computed a second time."""

    generated: int = 0
    reused: int = 0
    recomputed: int = 0


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall clock; `engine` is the forward passes and `search` everything the search adds to them."""

    total: float = 0.0
    engine: float = 0.0
    search: float = 0.0


@dataclass(frozen=True, slots=True)
class VerifierCost:
    """What the second model read, and whether the search would go the same way again."""

    name: str
    thoughts: int
    needed: int  # of these, by a tournament
    in_time: int  # of the needed, those whose scores were there when it came
    tokens: int  # computed, without those it had in its cache
    seconds: float
    seconds_waited: float  # for which the search stood still
    is_repeatable: bool  # no: tournaments took what had arrived (--verifier-async)
    lost: str | None = None  # why it was given up (--verifier-optional)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How the traces of a pool competed: M, K, Δ, w, and why so, in a sentence."""

    islands: int
    swap_size: int
    check_interval: int
    warmup_tokens: int
    why: str
    swap_margin: float = 0.0  # least lead of a parent, in log-odds where scores are chances

    @classmethod
    def of(cls, settings: Mapping[str, ev.Json]) -> PoolShape | None:
        """As a log's header has it; None for methods without tournaments, and for logs that do not say why."""
        fields = dataclasses.fields(cls)
        found = {field.name: settings[field.name] for field in fields if field.name in settings}
        is_whole = all(field.name in found for field in fields if field.default is dataclasses.MISSING)
        return cls(**found) if is_whole and found["why"] else None  # type: ignore[arg-type]

    def after(self, split: ev.IslandsSplit | None) -> PoolShape:
        if split is None:
            return self
        why = f"{split.why} ({self.islands:,} islands up to step {split.step:,})"
        return PoolShape(
            split.islands, split.swap_size, self.check_interval, split.warmup_tokens, why, self.swap_margin
        )

    def __str__(self) -> str:
        islands = "1 island" if self.islands == 1 else f"{self.islands:,} islands"
        lead = f" by a lead of {self.swap_margin:g} or more" if self.swap_margin else ""
        return (
            f"{islands} (M), swaps of {self.swap_size:,} (K){lead}, warm-up of {self.warmup_tokens:,} tokens (w): "
            f"{self.why}"
        )


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found and what it cost."""

    problem_id: str
    answer: str | None
    votes: tuple[VoteEntry, ...]
    margin: float
    num_abstained: int
    policy: str
    seed: int
    counts: Counts
    tokens: Tokens
    seconds: Seconds
    stop_reason: StopReason
    waiting: Waiting = Waiting()
    sharing: SearchSharing = NOTHING_READ
    verifier: VerifierCost | None = None  # where the search had one
    pool: PoolShape | None = None  # of a search with tournaments
    out_dir: str | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None  # why it failed, where it did
    log_error: str | None = None  # why its log is incomplete, where it is
    traces: tuple[TraceOutline, ...] = field(default=(), repr=False, compare=False)  # in this process only

    @classmethod
    def failed(cls, problem_id: str, policy: str, seed: int, error: str) -> SearchResult:
        """Of a search that has nothing to show but why."""
        return cls(
            problem_id, None, (), 0.0, 0, policy, seed, Counts(), Tokens(), Seconds(), StopReason.FAILED, error=error
        )

    def to_json(self) -> dict[str, ev.Json]:
        """Plain values, ready for `json.dumps`; the traces are in the event log."""
        values = dataclasses.asdict(dataclasses.replace(self, traces=()))
        del values["traces"]
        return values

    @property
    def num_islands(self) -> int:
        return 1 if self.pool is None else self.pool.islands

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer, the vote table, the tree."""
        return result_html(self)


@dataclass(slots=True)
class SearchRecord:
    """Everything the events so far say about one search."""

    started: ev.RunStarted
    tree: TraceTree = field(init=False)
    sample: ev.Sample | None = None
    stopped: ev.Stopped | None = None
    voted: ev.Voted | None = None
    verified: ev.VerifierTotals | None = None
    split: ev.IslandsSplit | None = None  # the last

    def __post_init__(self) -> None:
        VoteKind(self.started.vote)  # one that there is not is found here, where its line is known
        self.tree = TraceTree(self.started.capacity, Aggregation(self.started.aggregation))

    def apply(self, event: ev.Event) -> None:
        if isinstance(event, ev.Sample):
            self.sample = event
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
        """The vote among the traces that have finished so far."""
        return count_votes(self.ballots(), self.vote_kind, equivalent)

    def ballots(self) -> list[Ballot]:
        return ballots_of(self.tree, self.vote_kind)

    @property
    def vote_kind(self) -> VoteKind:
        return VoteKind(self.started.vote)

    @property
    def num_islands(self) -> int:
        """Logs from before islands have one."""
        if self.split is not None:
            return self.split.islands
        found = self.started.settings.get("islands", 1)
        return found if isinstance(found, int) else 1

    @property
    def num_engines(self) -> int:
        """That it was spread over."""
        found = self.started.environment.get("engines", 1)
        return found if isinstance(found, int) else 1

    @property
    def counts(self) -> Counts:
        tree = self.tree
        return Counts(
            roots=sum(trace.parent is None for trace in tree.traces),
            branched=sum(trace.parent is not None for trace in tree.traces),
            pruned=tree.count(TraceState.PRUNED),
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
            generated=sum(trace.num_own_tokens for trace in traces),
            reused=sum(trace.reused for trace in traces),
            recomputed=sum(trace.recomputed for trace in traces),
        )

    @property
    def verifier(self) -> VerifierCost | None:
        v = self.verified
        if v is None:
            return None
        return VerifierCost(
            name=v.verifier,
            thoughts=v.thoughts,
            needed=v.needed,
            in_time=v.in_time,
            tokens=v.tokens,
            seconds=v.seconds,
            seconds_waited=v.seconds_waited,
            is_repeatable=not v.is_async,
            lost=v.lost,
        )

    @property
    def seconds(self) -> Seconds:
        s = self.sample
        if s is None:
            return Seconds()
        total = s.seconds_total + (self.verified.seconds_for_vote if self.verified else 0.0)
        return Seconds(total, s.seconds_engine, s.seconds_scoring + s.seconds_scheduling + s.seconds_search)

    @property
    def pool(self) -> PoolShape | None:
        planned = PoolShape.of(self.started.settings)
        return None if planned is None else planned.after(self.split)

    @property
    def early_ends(self) -> EarlyEnds | None:
        """Traces that ended before tournaments began; None where there are none, or no room for any trace to go on."""
        pool, most = self.pool, self.started.settings.get("max_new_tokens")
        if pool is None or (isinstance(most, int) and pool.warmup_tokens >= most):
            return None
        finished = self.tree.in_state(TraceState.FINISHED)
        return EarlyEnds.of((trace.num_tokens, pool.warmup_tokens) for trace in finished)

    def result(self, vote: VoteResult) -> SearchResult:
        """The result; a log that was cut short counts as a failed run with the votes it has."""
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
            traces=outline_of(self.tree),
        )


def voted(vote: VoteResult) -> ev.Voted:
    """The event that announces a vote."""
    return ev.Voted(vote.answer, vote.margin, tuple(dataclasses.asdict(entry) for entry in vote.entries))


IMPOSSIBLE = (AssertionError, LookupError, ValueError, TypeError, AttributeError)  # what an event that cannot be raises


def fold(events: Iterable[ev.Event], log: object = "the log") -> SearchRecord:
    """The record of a whole log; an event that cannot follow those before it is named by its line."""
    record: SearchRecord | None = None
    for number, event in enumerate(events, start=1):
        if record is None and not isinstance(event, ev.RunStarted):
            raise UserError(f"{log} does not begin with RunStarted: it is no log of a Gambit run")
        try:
            record = extended(record, event)
        except IMPOSSIBLE as error:
            raise UserError(
                f"line {number} of {log} cannot follow the lines before it ({error}): it, or one of them, was changed"
            ) from error
    if record is None:
        raise UserError(f"{log} is empty: its run was ended before it began")
    return record


def extended(record: SearchRecord | None, event: ev.Event) -> SearchRecord:
    """With one event more; asserts that it can follow."""
    if record is None:
        assert isinstance(event, ev.RunStarted)
        return SearchRecord(event)
    assert not isinstance(event, ev.RunStarted), "a second run begins"
    assert record.voted is None, "the search had ended"
    is_late = isinstance(event, ev.Voted | ev.Verified | ev.VerifierTotals)  # scores may come until the vote
    assert record.stopped is None or is_late, "the search had stopped"
    record.apply(event)
    return record
