"""A search's tree as the JSON that the public code of the method's authors exports, for scripts written for it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from gambit import events as ev
from gambit.events import Json
from gambit.results.record import SearchRecord, extended, fold
from gambit.tree import Trace, TraceState


def authors_tree(path: Path) -> dict[str, Json]:
    """Returns stats, nodes by id and roots of the search in a log.

    `score_history` has a trace's score after each thought of its own. Texts are left out, as are finish reasons, which
    theirs always leaves empty, and what their threshold mode keeps.
    """
    record, histories = _folded(path)
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


def _folded(path: Path) -> tuple[SearchRecord, dict[int, list[Json]]]:
    """Returns the record of a search, and of each trace the scores that it has had."""
    events = list(ev.read_log(path))
    fold(events, path)  # which names the line that cannot be
    record, histories = None, defaultdict[int, list[Json]](list)
    for event in events:
        record = extended(record, event)
        if isinstance(event, ev.Scored | ev.Verified):
            for trace in event.traces:
                histories[trace].append(record.tree.score_of(record.tree.traces[trace]))
    assert record is not None, "an empty log cannot be folded"
    return record, histories


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
