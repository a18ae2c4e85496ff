"""Draws a run's tree as an SVG: one line per trace over decode steps, coloured by its running score.

python scripts/draw_tree.py RUN_DIR picture.svg [--answer 42]
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from gambit import events as ev
from gambit.results.record import SearchRecord
from gambit.tree import Trace, TraceState
from gambit.types import RunningScore

WIDTH, ROW, LEFT, TOP = 960, 7, 24, 64
ENDS = {TraceState.PRUNED: "×", TraceState.GHOST: "○"}


def colour(score: float | None) -> str:
    """Red over yellow to green, readable on white and on black."""
    if score is None:
        return "hsl(220 5% 60%)"
    return f"hsl({round(8 + 120 * min(max(score, 0.0), 1.0))} 70% 45%)"


def follow(path: Path) -> tuple[SearchRecord, dict[int, list[tuple[int, float | None]]]]:
    """The record, and for each trace where its score changed."""
    record: SearchRecord | None = None
    scores: dict[int, list[tuple[int, float | None]]] = {}
    for event in ev.read_log(path):
        if isinstance(event, ev.RunStarted):
            record = SearchRecord(event)
            continue
        assert record is not None
        record.apply(event)
        if isinstance(event, ev.Created | ev.Branched):
            trace = record.tree.traces[event.trace]
            scores[event.trace] = [(event.step, mean(trace.score))]
        elif isinstance(event, ev.Scored):
            for trace_id in event.traces:
                scores[trace_id].append((event.step, mean(record.tree.traces[trace_id].score)))
    assert record is not None
    return record, scores


def mean(score: RunningScore) -> float | None:
    return score.total / score.count if score.count else None


def rows_of(traces: list[Trace]) -> dict[int, int]:
    """Children right below their parents, so that a family stays together."""
    children: dict[int | None, list[Trace]] = {}
    for trace in traces:
        children.setdefault(trace.parent, []).append(trace)
    order: list[int] = []
    stack = list(reversed(children.get(None, [])))
    while stack:
        trace = stack.pop()
        order.append(trace.id)
        stack += sorted(children.get(trace.id, []), key=lambda child: child.created_step)
    return {trace_id: row for row, trace_id in enumerate(order)}


def draw(record: SearchRecord, scores: dict[int, list[tuple[int, float | None]]], answer: str | None) -> str:
    traces = record.tree.traces
    rows = rows_of(traces)
    last = max(trace.ended_step or 0 for trace in traces)
    height = TOP + ROW * len(traces) + 34

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 74) * step / last

    def y(trace_id: int) -> float:
        return TOP + ROW * rows[trace_id]

    parts = []
    for trace in traces:
        end = trace.ended_step or last
        if trace.parent is not None:
            parts.append(
                f'<path d="M{x(trace.created_step):.1f} {y(trace.parent):.1f} V{y(trace.id):.1f}" class="branch"/>'
            )
        points = [*scores[trace.id], (end, None)]
        for (begin, value), (stop, _) in itertools.pairwise(points):
            parts.append(
                f'<path d="M{x(begin):.1f} {y(trace.id):.1f} H{x(stop):.1f}" stroke="{colour(value)}" class="trace"/>'
            )
        if trace.state in ENDS:
            mark = ENDS[trace.state]
            parts.append(f'<text x="{x(end) + 2:.1f}" y="{y(trace.id) + 3:.1f}" class="end">{mark}</text>')
        elif trace.state is TraceState.FINISHED:
            style = "right" if trace.answer == answer else "wrong"
            parts.append(f'<text x="{x(end) + 4:.1f}" y="{y(trace.id) + 3:.1f}" class="{style}">{trace.answer}</text>')
    counts = record.counts
    title = (
        f"{counts.roots} roots, {counts.branched} branches, {counts.pruned} pruned (×), {counts.completed} completed"
    )
    legend = "".join(
        f'<rect x="{WIDTH - 254 + 18 * i}" y="14" width="18" height="8" fill="{colour(i / 9)}"/>' for i in range(10)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">
<style>.trace {{ stroke-width: 3 }} .branch {{ stroke: #999; fill: none }} .end {{ font-size: 8px; fill: #999 }}
.right {{ font-size: 8px; font-weight: bold; fill: #2a8f4b }} .wrong {{ font-size: 8px; fill: #d0453a }}
.label {{ font-size: 13px; fill: #888 }}</style>
<text x="{LEFT}" y="24" class="label">{title}</text>
<text x="{LEFT}" y="44" class="label">lines are traces, verticals branches; answers at the end, bold where right</text>
{legend}
<text x="{WIDTH - 260}" y="22" class="label" text-anchor="end">score 0</text>
<text x="{WIDTH - 68}" y="22" class="label">1</text>
{chr(10).join(parts)}
<text x="{LEFT}" y="{height - 10}" class="label">decode steps: 0</text>
<text x="{x(last):.0f}" y="{height - 10}" class="label" text-anchor="end">{last}</text>
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--answer", help="the right one")
    options = parser.parse_args()
    record, scores = follow(options.run / "events.jsonl")
    options.picture.write_text(draw(record, scores, options.answer), encoding="utf-8")


if __name__ == "__main__":
    main()
