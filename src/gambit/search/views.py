"""What a policy sees of a search: traces of the tree, with how far the engine has got, as frozen views."""

from __future__ import annotations

from gambit.policies.base import FinishedView, TraceView
from gambit.tree import Trace, TraceTree
from gambit.types import Progress


def trace_view(tree: TraceTree, trace: Trace, progress: Progress | None) -> TraceView:
    """A logically active trace; without progress it is a ghost."""
    num_tokens = progress.num_tokens if progress else trace.num_tokens
    return TraceView(
        id=trace.id,
        state=trace.state,
        score=tree.score_of(trace),
        num_scored=trace.score.count,
        num_generated=num_tokens - trace.inherited,
        num_tokens=num_tokens,
        boundary_tokens=trace.boundary_tokens,
        is_thinking=progress.is_thinking if progress else True,
        island=trace.island,
    )


def finished_view(tree: TraceTree, trace: Trace) -> FinishedView:
    return FinishedView(trace.id, trace.answer, tree.score_of(trace), trace.num_tokens, trace.confidence, trace.island)
