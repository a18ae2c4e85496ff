"""The tree of a search in outline: where each trace came from, how long it ran, what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from gambit.tree import Trace, TraceState, TraceTree


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
    """Of every trace, by number; one that has no end yet ends with the last step seen."""
    last = max((max(trace.created_step, trace.ended_step or 0) for trace in tree.traces), default=0)
    return tuple(_outline(tree, trace, last) for trace in tree.traces)


def _outline(tree: TraceTree, trace: Trace, last: int) -> TraceOutline:
    return TraceOutline(
        parent=trace.parent,
        state=trace.state,
        begin_step=trace.created_step,
        end_step=last if trace.ended_step is None else trace.ended_step,
        num_tokens=trace.num_tokens,
        score=tree.score_of(trace),
        answer=trace.answer,
        island=trace.island,
    )
