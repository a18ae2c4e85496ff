"""The result of a search: its answer, its votes, and what it cost."""

import dataclasses
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from typing import Any, ClassVar, Self

from gambit import events as ev
from gambit.results.html import result_html
from gambit.results.vote import VoteEntry
from gambit.tree import Trace, TraceState, TraceTree
from gambit.types import PoolSettings, StopReason, count_of

STOP_WORDS: Mapping[StopReason, str] = {
    StopReason.COMPLETED: "at least the planned number of traces is complete",
    StopReason.EXHAUSTED: "no trace was left to run",
    StopReason.POLICY: "the search method had seen enough",
    StopReason.CONSENSUS: "the vote was settled (--consensus-stop)",
    StopReason.BUDGET_TOKENS: "the token budget is used up (--budget-tokens)",
    StopReason.BUDGET_SECONDS: "the time is up (--budget-seconds)",
    StopReason.BUDGET_TRACES: "the trace budget is used up (--budget-traces)",
    StopReason.INTERRUPTED: "interrupted; the vote is the one so far",
    StopReason.FAILED: "it failed before its end",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of traces by fate; `ghosts` are those still ghosts at the end, `evicted` all that ever were."""

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
        """Returns the numbers of traces by their end, as displays call it."""
        return {
            "completed": self.completed, "pruned": self.pruned, "ghosts": self.ghosts, "cut off": self.cancelled,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Waiting:
    """The time that traces waited for KV cache, over all their admissions."""

    traces: int = 0  # that waited at all
    steps: int = 0  # of all traces together
    seconds: float = 0.0
    most_steps: int = 0  # of one trace
    most_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Cuts:
    """Numbers of traces that could not go on as they would have."""

    forced: int = 0  # to answer; in `Counts` each is one trace with the child that took its place
    looped: int = 0  # repeated themselves, and were forced or ended as complete


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ledger: sampled, inherited from a cached prefix, and computed a second time."""

    generated: int = 0
    reused: int = 0
    recomputed: int = 0

    def __str__(self) -> str:
        return f"{self.generated:,} generated, {self.reused:,} reused, {self.recomputed:,} recomputed"


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall clock; `engine` is the forward passes and `search` everything the search adds to them."""

    total: float = 0.0
    engine: float = 0.0
    search: float = 0.0

    def __str__(self) -> str:
        return f"{self.total:,.1f}, of these {self.engine:,.1f} engine, {self.search:,.1f} search"


@dataclass(frozen=True, slots=True)
class VerifierCost:
    """The work of the second model, and whether the search would go the same way again."""

    # Fields that are those of `VerifierTotals`, the event.
    of_totals: ClassVar = ("thoughts", "needed", "in_time", "tokens", "seconds", "seconds_waited", "lost")
    name: str
    thoughts: int
    needed: int  # of these, by a tournament
    in_time: int  # of the needed, those whose scores were there when it came
    tokens: int  # computed, without those it had in its cache
    seconds: float
    seconds_waited: float  # for which the search stood still
    is_repeatable: bool  # no: tournaments took what had arrived (--verifier-async)
    lost: str | None = None  # why it was given up (--verifier-optional)


def pool_of(settings: Mapping[str, ev.Json], split: ev.IslandsSplit | None) -> PoolSettings | None:
    """Returns the pool of a log's header after its last split; None without tournaments, or without a reason."""
    fields = dataclasses.fields(PoolSettings)
    found: dict[str, Any] = {field.name: settings[field.name] for field in fields if field.name in settings}
    if not found.get("why") or any(field.name not in found for field in fields[:4]):
        return None
    pool = PoolSettings(**found)
    if split is None:
        return pool
    why = f"{split.why} ({pool.islands:,} islands up to step {split.step:,})"
    return dataclasses.replace(
        pool, islands=split.islands, swap_size=split.swap_size, warmup_tokens=split.warmup_tokens, why=why
    )


@dataclass(frozen=True, slots=True)
class TraceOutline:
    """One trace; a trace's number is its place among all."""

    parent: int | None
    state: TraceState  # at the end of the search
    begin_step: int
    end_step: int
    num_tokens: int  # inherited part included
    score: float | None  # None: it finished no thought
    answer: str | None
    island: int = 0


def outline_of(tree: TraceTree) -> tuple[TraceOutline, ...]:
    """Returns the outline of every trace, by number; one that has no end yet ends with the last step seen."""
    last = max((max(trace.created_step, trace.ended_step or 0) for trace in tree.traces), default=0)
    return tuple(
        TraceOutline(
            parent=trace.parent,
            state=trace.state,
            begin_step=trace.created_step,
            end_step=last if trace.ended_step is None else trace.ended_step,
            num_tokens=trace.num_tokens,
            score=tree.score_of(trace),
            answer=trace.answer,
            island=trace.island,
        )
        for trace in tree.traces
    )


MOST_EARLY = 0.5  # share of traces that may end within the warm-up: a search is meant to judge most of them


@dataclass(frozen=True, slots=True)
class EarlyEnds:
    """Completed traces that no tournament could judge, because they ended within the warm-up."""

    warmup_tokens: float
    median_length: float  # of a completed trace, in tokens
    share: float

    @classmethod
    def of(cls, ended: Iterable[tuple[int, int]]) -> Self | None:
        """Takes the tokens of each completed trace and of its search's warm-up; returns None if none has completed."""
        pairs = list(ended)
        if not pairs:
            return None
        lengths, warmups = zip(*pairs, strict=True)
        share = statistics.fmean(length <= warmup for length, warmup in pairs)
        return cls(statistics.median(warmups), statistics.median(lengths), share)

    @property
    def are_most(self) -> bool:
        return self.share > MOST_EARLY

    def sentence(self, whose: str) -> str:
        return (
            f"{self.share:.0%} of {whose} ended within the warm-up of {self.warmup_tokens:,.0f} tokens, before a "
            f"tournament could judge them: give --warmup-tokens {max(1, self.median_length // 2):.0f}, half a trace"
        )


@dataclass(frozen=True, slots=True)
class SearchSharing:
    """Tokens whose keys and values the decode steps of a search read, summed over steps: the cost of attention."""

    total_tokens: int = 0  # each trace reads its whole path: prompt, inherited tokens, its own so far
    unique_tokens: int = 0  # what several paths of a step have in common is read once
    factor: float = 1.0  # total / unique, the most that reading once can save; 1: nothing is shared


LEAST_ISLAND = 8  # votes of an island, on average, from which on it is the scorer that made it agree with itself


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome and the cost of a search."""

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
    sharing: SearchSharing = SearchSharing()
    verifier: VerifierCost | None = None  # where the search had one
    pool: PoolSettings | None = None  # of a search with tournaments
    out_dir: str | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None  # why it failed, where it did
    log_error: str | None = None  # why its log is incomplete, where it is
    # The whole text of the trace of most weight among those that gave the answer, its thinking included; None without
    # an answer, and after a replay, since a log holds token ids.
    text: str | None = field(default=None, repr=False, compare=False)
    cuts: Cuts = Cuts()
    traces: tuple[TraceOutline, ...] = field(default=(), repr=False, compare=False)  # in this process only

    @classmethod
    def failed(cls, problem_id: str, policy: str, seed: int, error: str) -> Self:
        """Returns the result of a search that has nothing to show but its error."""
        return cls(
            problem_id, None, (), 0.0, 0, policy, seed, Counts(), Tokens(), Seconds(), StopReason.FAILED, error=error
        )

    def to_json(self) -> dict[str, ev.Json]:
        """Returns plain values, ready for `json.dumps`; the traces are in the event log."""
        values = dataclasses.asdict(dataclasses.replace(self, traces=()))
        del values["traces"]
        return values

    @property
    def num_islands(self) -> int:
        return 1 if self.pool is None else self.pool.islands

    @property
    def vote_warnings(self) -> tuple[str, ...]:
        """Returns what speaks against the winner without any label: the count of traces, and the islands.

        A scorer that ranks the wrong way round leads each island to a mistake of its own.
        """
        if not self.votes:
            return ()
        winner, most = self.votes[0], max(self.votes, key=lambda entry: entry.traces)
        found = []
        if most.traces > winner.traces:
            found.append(
                f"the scorer overrules the majority: {winner.answer!r} has {count_of(winner.traces, 'trace')} and "
                f"{most.answer!r} {most.traces}, by weight {winner.weight:.2f} to {most.weight:.2f}"
            )
        num_traces = sum(entry.traces for entry in self.votes)
        is_alone = self.num_islands > 1 and 2 * winner.islands <= self.num_islands
        if is_alone and num_traces >= LEAST_ISLAND * self.num_islands:
            found.append(
                f"only {winner.islands} of {self.num_islands} islands found {winner.answer!r}: where that is so of "
                "many problems the scorer misleads the search, compare with --policy sc"
            )
        return tuple(found)

    def __repr__(self) -> str:
        """Returns one line; a notebook shows the picture instead."""
        found = f"error={self.error!r}" if self.error else f"answer={self.answer!r}"
        cost = f"{self.counts.completed} traces, {self.tokens.generated:,} tokens"
        return f"<SearchResult {self.problem_id}: {found}, {self.policy}, {cost}>"

    def _repr_html_(self) -> str:
        """Returns the display of a notebook: the answer, the vote table, the tree."""
        return result_html(self)


def sharing_of(tree: TraceTree, prompt_tokens: int) -> SearchSharing:
    """Returns what the decode steps of an ended search read, as if it had run on one engine.

    A trace is taken to decode one token in every step from its admission on, until it has as many as the log gives it;
    time as a ghost or in the queue is left out. The step that admits a trace counts like any other. Of the traces that
    decode in a step, depth first, each has to read again all but what it has in common with the one before it.
    """
    order = _depth_first(tree)
    total = shared = common = last = 0
    changes: list[tuple[int, bool, int]] = []  # step, whether a trace begins or ends decoding there, its place in order
    for place, trace in enumerate(order):
        written = trace.num_given
        for step, until in zip(trace.admitted_steps, (*trace.queued_tokens, trace.num_own_tokens), strict=False):
            if until > written:  # not so if the log or the engine broke off before the trace's tokens were reported
                total += (until - written) * (prompt_tokens + trace.inherited)
                total += sum(range(written, until))
                changes += [(step, True, place), (step + until - written, False, place)]
                written = until

    def in_common(place: int, other: int) -> int:
        return prompt_tokens + min(trace.inherited for trace in order[place + 1 : other + 1])

    decoding: list[int] = []  # places
    for step, begins, place in sorted(changes):
        shared, last = shared + (step - last) * common, step
        at = bisect_left(decoding, place)
        if not begins:
            del decoding[at]
        near = [*decoding[max(0, at - 1) : at], place, *decoding[at : at + 1]]
        change = sum(starmap(in_common, pairwise(near))) - (in_common(near[0], near[2]) if len(near) == 3 else 0)
        common += change if begins else -change
        if begins:
            decoding.insert(at, place)
    unique = total - shared
    return SearchSharing(total, unique, total / unique if unique else 1.0)


def _depth_first(tree: TraceTree) -> list[Trace]:
    """Returns the traces depth first: each has its `inherited` tokens in common with the one before it.

    A trace hangs on the one whose own token is the last that it inherited. That is not always its parent: a child may
    leave where its parent began, or before.
    """
    below: defaultdict[int | None, list[Trace]] = defaultdict(list)
    for trace in tree.traces:
        holder = trace.parent
        while holder is not None and tree.traces[holder].inherited >= trace.inherited:
            holder = tree.traces[holder].parent
        below[holder].append(trace)
    order, waiting = [], sorted(below[None], key=lambda trace: trace.inherited)
    while waiting:
        order.append(waiting.pop())
        waiting += sorted(below[order[-1].id], key=lambda trace: trace.inherited)
    return order
