"""HTML: elements whose text is escaped, and a search result for notebooks (answer, votes, the tree as an SVG)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
BLUE, ORANGE, GREY = "#2a7bd1", "#c76a1d", "#8d97a5"  # differ for any kind of colour vision, on light and on dark


# -- elements --------------------------------------------------------------------------------------------------


class Markup(str):
    """HTML that stays as it is; any other string is text."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """Returns an element, its text escaped; `_` in names of attributes is `-`, at the end nothing; None is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    written = "".join(f' {key}="{escape(str(value))}"' for key, value in given.items())
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def joined(children: Iterable[str], between: str = "") -> Markup:
    """Returns the children one after the other, text escaped."""
    return Markup(between.join(child if isinstance(child, Markup) else escape(child) for child in children))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], num_names: int) -> Markup:
    """Returns a table; columns after the first `num_names` hold numbers."""

    def line(kind: str, cells: Sequence[str]) -> Markup:
        names = (tag(kind, cell, style="text-align:left") for cell in cells[:num_names])
        return tag("tr", *names, *(tag(kind, cell, class_="number") for cell in cells[num_names:]))

    return tag("table", tag("thead", line("th", columns)), tag("tbody", *(line("td", row) for row in rows)))


def page(title: str, style: str, body: Iterable[str]) -> str:
    """Returns a whole page without external files."""
    meta = Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width">')
    head = tag("head", meta, tag("style", Markup(style)), tag("title", title))
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', *body)), lang='en')}\n"


# -- a result --------------------------------------------------------------------------------------------------


def result_html(result: SearchResult) -> Markup:
    """Returns one element, with all its styles inside it."""
    parts = [_headline(result), *_vote_table(result), tree_svg(result.traces, result.answer)]
    return tag("div", *parts, class_="gambit-result", style=f"max-width:{WIDTH}px")


def _headline(result: SearchResult) -> Markup:
    if result.error is not None:
        return tag("p", tag("b", "no answer"), f": {result.error}")
    counts, tokens = result.counts, result.tokens
    facts = [
        f"margin {result.margin:.0%}",
        f"{counts.completed:,} of {counts.roots + counts.branched:,} traces completed",
        f"{tokens.generated:,} tokens",
        f"{result.seconds.total:,.1f} s",
        result.policy,
    ]
    answer = "no answer" if result.answer is None else result.answer
    return tag("p", tag("b", answer, style="font-size:1.3em"), " \u00a0 ", " · ".join(facts))


def _vote_table(result: SearchResult) -> Iterator[Markup]:
    total = sum(entry.weight for entry in result.votes) or 1.0
    num_columns = 6 if result.num_islands > 1 else 5
    rows = [
        (entry.answer, f"{entry.weight:.3g}", f"{entry.weight / total:.0%}", f"{entry.traces}", f"{entry.roots}",
         f"{entry.islands}")[:num_columns]
        for entry in result.votes[:MOST_ANSWERS]
    ]  # fmt: skip
    if rows:
        yield table(("answer", "weight", "share", "traces", "roots", "islands")[:num_columns], rows, 1)
    if len(result.votes) > len(rows):
        yield tag("p", f"and {len(result.votes) - len(rows):,} answers with less weight")


# -- the tree --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Look:
    """The drawing of a kind of trace, and its name in the legend."""

    name: str
    colour: str
    dashes: str | None = None


WINNING = _Look("finished with the answer", BLUE)
OTHER = _Look("finished otherwise", ORANGE)
LOOKS = {
    TraceState.PRUNED: _Look("pruned", GREY),
    TraceState.GHOST: _Look("lost its memory", GREY, "5 3"),
    TraceState.CANCELLED: _Look("cut off", GREY, "1 3"),
    TraceState.RUNNING: _Look("no end in the log", GREY, "1 3"),
    TraceState.WAITING: _Look("no end in the log", GREY, "1 3"),
}


@dataclass(frozen=True, slots=True)
class _Layout:
    """Places of steps and rows in the drawing."""

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


def tree_svg(traces: Sequence[TraceOutline], answer: str | None) -> Markup:
    """Draws every trace as a line over the decode steps, children below their parents; empty without traces."""
    if not traces:
        return Markup()
    rows, layout = _rows(traces), _Layout.of(traces)
    winner = None if answer is None else canonical(answer)
    looks = [_look(trace, winner) for trace in traces]
    lines = [*_island_bars(traces, rows, layout)]
    for trace, row, look in zip(traces, rows, looks, strict=True):
        lines += _drawn(trace, row, None if trace.parent is None else rows[trace.parent], look, layout)
    height = f"{layout.row_height * len(traces) + 2 * MARGIN:.0f}"
    label = f"Tree of {len(traces)} traces over {layout.last_step} decode steps"
    drawing = tag(
        "svg", *lines, viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height, role="img", aria_label=label,
        font_family="sans-serif", font_size=10, fill="currentColor", style="max-width:100%",
    )  # fmt: skip
    return joined([drawing, _legend(looks, layout.last_step)])


def _rows(traces: Sequence[TraceOutline]) -> list[int]:
    """Returns the row of each trace: island by island, roots in their order, each followed by its descendants."""
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


def _island_bars(traces: Sequence[TraceOutline], rows: Sequence[int], layout: _Layout) -> Iterator[Markup]:
    """Yields a bar at the left edge beside each island's rows; none for a single island."""
    members: dict[int, list[int]] = {}
    for trace, row in zip(traces, rows, strict=True):
        members.setdefault(trace.island, []).append(row)
    if len(members) == 1:
        return
    for place, (island, found) in enumerate(sorted(members.items())):
        top, height = layout.y(min(found)) - layout.row_height / 2, layout.row_height * len(found)
        gap = min(1.0, height / 4)
        yield tag(
            "rect", tag("title", f"island {island}: {len(found)} traces"), x=0, y=f"{top + gap / 2:.1f}",
            width=f"{MARGIN / 2:.1f}", height=f"{height - gap:.1f}", fill=ISLAND_SHADES[place % len(ISLAND_SHADES)],
        )  # fmt: skip


def _look(trace: TraceOutline, winner: str | None) -> _Look:
    if trace.state is not TraceState.FINISHED:
        return LOOKS[trace.state]
    return WINNING if trace.answer is not None and canonical(trace.answer) == winner else OTHER


def _drawn(trace: TraceOutline, row: int, parent_row: int | None, look: _Look, layout: _Layout) -> Iterator[Markup]:
    begin, end, y = layout.x(trace.begin_step), layout.x(trace.end_step), layout.y(row)
    style = {"fill": "none", "stroke": look.colour, "stroke_width": f"{min(2.0, layout.row_height * 0.6):.1f}"}
    if parent_row is not None:
        yield tag("path", d=f"M{begin:.1f} {layout.y(parent_row):.1f}V{y:.1f}", **style, stroke_opacity=".5")
    title = tag("title", _title(trace))
    yield tag("path", title, d=f"M{begin:.1f} {y:.1f}H{end:.1f}", **style, stroke_dasharray=look.dashes)
    if trace.state is TraceState.FINISHED and layout.has_labels:
        yield tag("circle", cx=f"{end:.1f}", cy=f"{y:.1f}", r=2.5, fill=look.colour)
        text = "no answer" if trace.answer is None else _shortened(trace.answer)
        yield tag("text", text, x=f"{end + 6:.1f}", y=f"{y + 3.5:.1f}")


def _title(trace: TraceOutline) -> str:
    score = "not scored" if trace.score is None else f"score {trace.score:.3f}"
    answer = "" if trace.answer is None else f", answer {_shortened(trace.answer)}"
    return f"{trace.state}, {trace.num_tokens:,} tokens, {score}{answer}"


def _shortened(text: str) -> str:
    return text if len(text) <= 14 else f"{text[:13]}…"


def _legend(looks: Sequence[_Look], last_step: int) -> Markup:
    marks = []
    for look in dict.fromkeys((WINNING, OTHER, *LOOKS.values())):
        if look in looks:
            stroke = tag("path", d="M0 4H22", stroke=look.colour, stroke_width=2, stroke_dasharray=look.dashes)
            marks.append(joined([tag("svg", stroke, width=22, height=8), f" {look.name}"]))
    over = f"over {last_step:,} decode steps"
    return tag("p", joined([*marks, over], " \u00a0 "), style="font-size:.85em")
