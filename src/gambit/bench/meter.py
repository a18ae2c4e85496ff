"""Measures a finished search from its events, as one row of the results."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from gambit import events as ev
from gambit.bench.rows import Row, Series, Spent, TaskKey
from gambit.results.record import SearchRecord, fold
from gambit.results.result import SearchResult
from gambit.results.vote import VoteKind, ballots_of, count_votes
from gambit.tree import Trace, TraceState, TraceTree

# What every completed trace can be weighed by.
REVOTES = (VoteKind.MAJORITY, VoteKind.SCORE, VoteKind.POSITION, VoteKind.BEST)
NUM_MOMENTS = 40  # of a series: enough for a curve, little enough for thousands of rows
Judge = Callable[[str, str], bool]  # are two answers equal?


@dataclasses.dataclass(frozen=True, slots=True)
class About:
    """What a search's events do not tell."""

    key: TaskKey
    gold: str
    began: float = 0.0
    shard: str = "1/1"
    log: str | None = None


def measure(about: About, result: SearchResult, events: Sequence[ev.Event], equal: Judge) -> Row:
    """The row of a search; one that was refused before it began has no events."""
    row = _verdict(about, result, equal)
    if not events:
        return row
    record = fold(events)
    samples = [event for event in events if isinstance(event, ev.Sample)]
    done = sorted(record.tree.in_state(TraceState.FINISHED), key=lambda trace: trace.id)
    return dataclasses.replace(
        row,
        right_traces=_num_right(done, about.gold, equal),
        productive=productive_tokens(record.tree),
        queued=sum(isinstance(event, ev.Queued) for event in events),
        waited_steps=record.waiting.steps,
        waited_seconds=record.waiting.seconds,
        steps=max((sample.step for sample in samples), default=0),
        seconds=_spent(samples[-1], result.seconds.total) if samples else Spent(),
        kv_peak=max((sample.kv_used_tokens for sample in samples), default=0),
        kv_capacity=max((sample.kv_capacity_tokens for sample in samples), default=0),
        revotes={kind.value: _is_right(_revote(record, kind, equal), about.gold, equal) for kind in REVOTES},
        unique_lengths=tuple(len(trace.own_tokens) for trace in done),
        total_lengths=tuple(trace.num_tokens for trace in done),
        series=series_of(samples),
        engines=record.num_engines,
    )


def _verdict(about: About, result: SearchResult, equal: Judge) -> Row:
    counts, tokens, verifier = result.counts, result.tokens, result.verifier
    return Row(
        **about.key._asdict(),
        answer=result.answer,
        gold=about.gold,
        correct=result.error is None and _is_right(result.answer, about.gold, equal),
        stop_reason=str(result.stop_reason),
        error=result.error,
        generated=tokens.generated,
        reused=tokens.reused,
        recomputed=tokens.recomputed,
        read_total=result.sharing.total_tokens,
        read_unique=result.sharing.unique_tokens,
        roots=counts.roots,
        branched=counts.branched,
        pruned=counts.pruned,
        evicted=counts.evicted,
        completed=counts.completed,
        cancelled=counts.cancelled,
        verifier_thoughts=verifier.thoughts if verifier else 0,
        verifier_needed=verifier.needed if verifier else 0,
        verifier_in_time=verifier.in_time if verifier else 0,
        verifier_tokens=verifier.tokens if verifier else 0,
        verifier_seconds=verifier.seconds if verifier else 0.0,
        verifier_waited=verifier.seconds_waited if verifier else 0.0,
        began=about.began,
        shard=about.shard,
        log=about.log,
        pool="" if result.pool is None else str(result.pool),
        warmup_tokens=0 if result.pool is None else result.pool.warmup_tokens,
        winning_islands=result.votes[0].islands if result.votes else 0,
    )


def _num_right(traces: Sequence[Trace], gold: str, equal: Judge) -> int:
    """Whether they have a vote or not: some policies let only the surest vote."""
    answers = Counter(trace.answer for trace in traces)
    return sum(count for answer, count in answers.items() if _is_right(answer, gold, equal))


def _is_right(answer: str | None, gold: str, equal: Judge) -> bool:
    return answer is not None and equal(answer, gold)


def _revote(record: SearchRecord, kind: VoteKind, equal: Judge) -> str | None:
    """What the same traces answer under another vote."""
    return count_votes(ballots_of(record.tree, kind), kind, equal).answer


def _spent(sample: ev.Sample, total: float) -> Spent:
    """`total`: with what the vote waited for."""
    return Spent(
        total=total,
        engine=sample.seconds_engine,
        scoring=sample.seconds_scoring,
        tree=sample.seconds_search,
        scheduling=sample.seconds_scheduling,
    )


def productive_tokens(tree: TraceTree) -> int:
    """Generated tokens that some completed trace is made of, the inherited parts of completed children included."""
    needed = [0] * len(tree.traces)  # of each trace, from its first token on
    total = 0
    for trace in reversed(tree.traces):  # children come after their parents
        if trace.state is TraceState.FINISHED:
            needed[trace.id] = trace.num_tokens
        if trace.parent is not None:
            shared = min(trace.inherited, needed[trace.id])
            needed[trace.parent] = max(needed[trace.parent], shared)
        total += max(0, needed[trace.id] - trace.inherited)
    return total


def series_of(samples: Sequence[ev.Sample]) -> Series:
    """At most NUM_MOMENTS of them, evenly spread; the last one is always among them."""
    stride = max(1, -(-len(samples) // (NUM_MOMENTS - 1)))
    chosen = [*samples[:-1:stride], *samples[-1:]]
    return Series(
        seconds=tuple(round(sample.seconds_total, 3) for sample in chosen),
        running=tuple(sample.running for sample in chosen),
        waiting=tuple(sample.waiting for sample in chosen),
        completed=tuple(sample.completed for sample in chosen),
        kv_used=tuple(sample.kv_used_tokens for sample in chosen),
    )
