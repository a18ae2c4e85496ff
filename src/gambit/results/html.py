"""A search result as HTML for notebooks: the answer, the vote table, and the tree as an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from gambit.answers import canonical
from gambit.tree import TraceState

if TYPE_CHECKING:
    from gambit.results.result import SearchResult, TraceOutline

MOST_ANSWERS = 8  # in the vote table
MOST_LABELLED = 40  # traces, above which the rows are too thin for text
WIDTH, LABEL_WIDTH, MARGIN = 720, 90, 6
TREE_HEIGHT, THICKEST_ROW, THINNEST_ROW = 520, 14.0, 2.0
ISLAND_SHADES = ("#4c8fb8", "#b3862c", "#5f9e6e", "#a3688f")  # beside each other on light and on dark
BLUE, ORANGE, GREY = "#2a7bd1", "#c76a1d", "#8d97a5"  # told apart by everybody, on light and on dark


@dataclass(frozen=True, slots=True)
class _Look:
    """How a kind of trace is drawn, and its name in the legend."""

    name: str
    colour: str
    dashes: str = ""


WINNING = _Look("finished with the answer", BLUE)
OTHER = _Look("finished otherwise", ORANGE)
LOOKS = {
    TraceState.PRUNED: _Look("pruned", GREY),
    TraceState.GHOST: _Look("lost its memory", GREY, "5 3"),
    TraceState.CANCELLED: _Look("cut off", GREY, "1 3"),
    TraceState.RUNNING: _Look("no end in the log", GREY, "1 3"),
    TraceState.WAITING: _Look("no end in the log", GREY, "1 3"),
}


def result_html(result: SearchResult) -> str:
    """One element, with all its styles inside it."""
    parts = [_headline(result), _vote_table(result), tree_svg(result.traces, result.answer)]
    return f'<div class="gambit-result" style="max-width:{WIDTH}px">{"".join(parts)}</div>'


def _headline(result: SearchResult) -> str:
    if result.error is not None:
        return f"<p><b>no answer</b>: {escape(result.error)}</p>"
    answer = "no answer" if result.answer is None else escape(result.answer)
    counts, tokens = result.counts, result.tokens
    facts = [
        f"margin {result.margin:.0%}",
        f"{counts.completed:,} of {counts.roots + counts.branched:,} traces completed",
        f"{tokens.generated:,} tokens",
        f"{result.seconds.total:,.1f} s",
        escape(result.policy),
    ]
    return f'<p><b style="font-size:1.3em">{answer}</b> &nbsp; {" · ".join(facts)}</p>'


def _vote_table(result: SearchResult) -> str:
    if not result.votes:
        return ""
    total = sum(entry.weight for entry in result.votes) or 1.0
    rows = "".join(
        f"<tr><td style='text-align:left'>{escape(entry.answer)}</td><td>{entry.weight:.3g}</td>"
        f"<td>{entry.weight / total:.0%}</td><td>{entry.traces}</td><td>{entry.roots}</td>"
        f"{f'<td>{entry.islands}</td>' if result.num_islands > 1 else ''}</tr>"
        for entry in result.votes[:MOST_ANSWERS]
    )
    head = "<th style='text-align:left'>answer</th><th>weight</th><th>share</th><th>traces</th><th>roots</th>"
    head += "<th>islands</th>" if result.num_islands > 1 else ""
    left_out = len(result.votes) - MOST_ANSWERS
    more = f"<p>and {left_out:,} answers with less weight</p>" if left_out > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


# -- the tree --------------------------------------------------------------------------------------------------


def tree_svg(traces: Sequence[TraceOutline], answer: str | None) -> str:
    """Every trace as a line over the decode steps, children below their parents; empty without traces."""
    if not traces:
        return ""
    rows = _rows(traces)
    layout = _Layout.of(traces)
    winner = None if answer is None else canonical(answer)
    looks = [_look(trace, winner) for trace in traces]
    lines = [
        element
        for number, trace in enumerate(traces)
        for element in _drawn(trace, rows[number], None if trace.parent is None else rows[trace.parent], looks[number],
                              layout)
    ]  # fmt: skip
    lines += _island_bars(traces, rows, layout)
    height = layout.row_height * len(traces) + 2 * MARGIN
    opening = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img"'
    label = f'aria-label="Tree of {len(traces)} traces over {layout.last_step} decode steps"'
    font = 'font-family="sans-serif" font-size="10" fill="currentColor"'
    return f"{opening} {label} {font} style='max-width:100%'>{''.join(lines)}</svg>{_legend(looks, layout.last_step)}"


@dataclass(frozen=True, slots=True)
class _Layout:
    last_step: int
    row_height: float
    has_labels: bool

    @classmethod
    def of(cls, traces: Sequence[TraceOutline]) -> _Layout:
        height = max(THINNEST_ROW, min(THICKEST_ROW, TREE_HEIGHT / len(traces)))
        return cls(max(1, *(trace.end_step for trace in traces)), height, len(traces) <= MOST_LABELLED)

    def x(self, step: int) -> float:
        return MARGIN + step / self.last_step * (WIDTH - LABEL_WIDTH - 2 * MARGIN)

    def y(self, row: int) -> float:
        return MARGIN + (row + 0.5) * self.row_height


def _rows(traces: Sequence[TraceOutline]) -> list[int]:
    """The row of each trace: islands one below the other, roots in their order, each followed by its descendants."""
    children: dict[int | None, list[int]] = {}
    for number, trace in enumerate(traces):
        children.setdefault(trace.parent, []).append(number)
    roots = sorted(children.get(None, []), key=lambda number: (traces[number].island, number))
    rows, waiting = [0] * len(traces), roots[::-1]
    for row in range(len(traces)):
        number = waiting.pop()
        rows[number] = row
        waiting += children.get(number, [])[::-1]
    return rows


def _island_bars(traces: Sequence[TraceOutline], rows: Sequence[int], layout: _Layout) -> Iterator[str]:
    """A bar at the left edge beside each island's rows; none where there is one island."""
    members: dict[int, list[int]] = {}
    for trace, row in zip(traces, rows, strict=True):
        members.setdefault(trace.island, []).append(row)
    if len(members) == 1:
        return
    for place, (island, found) in enumerate(sorted(members.items())):
        top, height = layout.y(min(found)) - layout.row_height / 2, layout.row_height * len(found)
        shade = ISLAND_SHADES[place % len(ISLAND_SHADES)]
        gap = min(1.0, height / 4)
        yield (
            f'<rect x="0" y="{top + gap / 2:.1f}" width="{MARGIN / 2:.1f}" height="{height - gap:.1f}" fill="{shade}">'
            f"<title>island {island}: {len(found)} traces</title></rect>"
        )


def _look(trace: TraceOutline, winner: str | None) -> _Look:
    if trace.state is not TraceState.FINISHED:
        return LOOKS[trace.state]
    return WINNING if trace.answer is not None and canonical(trace.answer) == winner else OTHER


def _drawn(trace: TraceOutline, row: int, parent_row: int | None, look: _Look, layout: _Layout) -> Iterator[str]:
    begin, end, y = layout.x(trace.begin_step), layout.x(trace.end_step), layout.y(row)
    style = f'stroke="{look.colour}" stroke-width="{min(2.0, layout.row_height * 0.6):.1f}"'
    dashes = f' stroke-dasharray="{look.dashes}"' if look.dashes else ""
    if parent_row is not None:
        yield f'<path d="M{begin:.1f} {layout.y(parent_row):.1f}V{y:.1f}" fill="none" {style} stroke-opacity=".5"/>'
    yield f'<path d="M{begin:.1f} {y:.1f}H{end:.1f}" fill="none" {style}{dashes}><title>{_title(trace)}</title></path>'
    if trace.state is TraceState.FINISHED and layout.has_labels:
        yield f'<circle cx="{end:.1f}" cy="{y:.1f}" r="2.5" fill="{look.colour}"/>'
        text = "no answer" if trace.answer is None else _shortened(trace.answer)
        yield f'<text x="{end + 6:.1f}" y="{y + 3.5:.1f}">{escape(text)}</text>'


def _title(trace: TraceOutline) -> str:
    score = "not scored" if trace.score is None else f"score {trace.score:.3f}"
    answer = "" if trace.answer is None else f", answer {escape(_shortened(trace.answer))}"
    return f"{trace.state}, {trace.num_tokens:,} tokens, {score}{answer}"


def _shortened(text: str) -> str:
    return text if len(text) <= 14 else f"{text[:13]}…"


def _legend(looks: Sequence[_Look], last_step: int) -> str:
    marks = [
        f'<svg width="22" height="8"><path d="M0 4H22" stroke="{look.colour}" stroke-width="2" '
        f'stroke-dasharray="{look.dashes}"/></svg> {look.name}'
        for look in dict.fromkeys((WINNING, OTHER, *LOOKS.values()))
        if look in looks
    ]
    return f'<p style="font-size:.85em">{" &nbsp; ".join(marks)} &nbsp; over {last_step:,} decode steps</p>'
