"""Plots of values with their intervals or of curves, one row each, as SVGs that need no library and read on a phone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from gambit.results.html import Markup, tag
from gambit.stats import Floats, Interval

WIDTH, LABELS, VALUES, ROW, TOP = 560, 214, 92, 34, 46
LETTER = 9.1  # wide, of a label in bold
STYLE = """
.dots{--ink:#1f2328;--faint:#66707b;--rule:#d0d7de;--ours:#0072b2;--ground:#fff;font:16px system-ui,sans-serif;\
max-width:560px;width:100%}
@media (prefers-color-scheme:dark){.dots{--ink:#e6edf3;--faint:#8d96a0;--rule:#39414b;--ours:#58a6ff;--ground:#0d1117}}
.dots text{fill:var(--ink)}.dots .title{font-weight:700}.dots .tick{fill:var(--faint);font-size:14px}
.dots .ground{fill:var(--ground)}.dots line{stroke:var(--rule)}
.dots .bar{stroke:var(--ink);stroke-width:2}.dots circle{fill:var(--ink);stroke:var(--ink);stroke-width:2}
.dots .ours text{font-weight:700}.dots .head{paint-order:stroke;stroke:var(--ground);stroke-width:5px}
.dots .ours .bar,.dots .ours circle{stroke:var(--ours)}.dots .ours circle{fill:var(--ours)}
.dots .open .bar,.dots .open circle{stroke:var(--faint)}.dots .open circle{fill:var(--ground)}
"""


@dataclass(frozen=True, slots=True)
class Dot:
    """One row: a value and its interval, in the units of the plot."""

    label: str
    value: float
    low: float
    high: float
    is_ours: bool = False

    @classmethod
    def of(cls, label: str, found: Interval, *, is_ours: bool, scale: float = 1) -> Self:
        """Returns the row of a value; its interval has no width where nothing could be resampled."""
        low, high = (found.value, found.value) if math.isnan(found.low) else (found.low, found.high)
        return cls(label, scale * found.value, scale * low, scale * high, is_ours)


def dot_plot(
    title: str, rows: Sequence[Dot | str], *, unit: str = " %", digits: int = 1, is_difference: bool = False
) -> Markup:
    """Returns the plot, where a text among the rows heads those below it.

    Of differences, the axis holds zero, and rows whose interval holds it are hollow.
    """
    dots = [row for row in rows if isinstance(row, Dot)]
    axis = _Axis(
        [end for dot in dots for end in (dot.low, dot.high)] + [0.0] * is_difference,
        max(LABELS, *(12 + LETTER * len(dot.label) for dot in dots)) if len(rows) > len(dots) else LABELS,
    )
    said, drawn = [], []
    for number, row in enumerate(rows):
        y = TOP + ROW * (number + 0.5)
        if isinstance(row, str):
            drawn.append(tag("text", row, class_="tick head", x=12, y=y + 7))
            continue
        words = f"{row.value:{'+' if is_difference else ''},.{digits}f}{unit}"
        said.append(f"{row.label} {words}")
        drawn.append(_row(row, axis, y, words, is_difference))
    return _plot(f"{title}: {'; '.join(said)}", title, axis, drawn, has_zero=is_difference)


def curve_plot(title: str, x: Floats, curves: Mapping[str, Floats], ours: str) -> Markup:
    """Returns a row per curve over the same `x`: all have the same height at the same value, and the highest beside."""
    axis, top = _Axis([float(x[0]), float(x[-1])]), max(1e-9, *(float(y.max()) for y in curves.values()))
    rows = []
    for number, (label, y) in enumerate(curves.items()):
        bottom = TOP + ROW * (number + 1) - 4
        points = " ".join(f"{axis.across(a)},{bottom - (ROW - 8) * b / top:.1f}" for a, b in zip(x, y, strict=True))
        rows.append(
            tag(
                "g", tag("text", label, x=12, y=bottom - 8),
                tag("polyline", class_="bar", style="fill:none", points=points),
                tag("text", f"{y.max():,.0f}", x=WIDTH - 10, y=bottom - 8, text_anchor="end"),
                class_="ours" if label == ours else None,
            )
        )  # fmt: skip
    said = "; ".join(f"{label} at most {y.max():,.0f}" for label, y in curves.items())
    return _plot(f"{title}: {said}", title, axis, rows)


def stacked(pictures: Sequence[Markup]) -> Markup:
    """Returns pictures below each other as one."""
    inner, top = [], 0.0
    for picture in pictures:
        height = float(str(picture).partition(f'viewBox="0 0 {WIDTH} ')[2].partition('"')[0])
        inner.append(Markup(str(picture).replace("<svg ", f'<svg y="{top:g}" height="{height:g}" ', 1)))
        top += height + 12
    return tag("svg", *inner, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {top - 12:g}", role="img")


class _Axis:
    """The ticks around some values, and the places of values on the plot."""

    def __init__(self, ends: Sequence[float], left: float = LABELS) -> None:
        ends = [*ends, 0.0] if min(ends) == max(ends) else ends  # equal values have no range of their own
        step = _step(max(ends) - min(ends), 4 if left == LABELS else 3)
        first, last = math.floor(min(ends) / step), math.ceil(max(ends) / step)
        self.ticks = [step * number for number in range(first, max(last, first + 1) + 1)]
        self._left = left

    def across(self, value: float) -> float:
        share = (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return round(self._left + (WIDTH - VALUES - self._left) * share, 1)


def _plot(said: str, title: str, axis: _Axis, rows: Sequence[Markup], *, has_zero: bool = False) -> Markup:
    """Returns the frame with its rows; `said` is read aloud instead of the picture."""
    bottom = TOP + ROW * len(rows)
    grid = [
        part
        for tick in axis.ticks
        for part in (
            tag("line", x1=axis.across(tick), x2=axis.across(tick), y1=TOP - 6, y2=bottom,
                stroke_width=3 if has_zero and tick == 0 else 1),
            tag("text", f"{tick:,.10g}", class_="tick", x=axis.across(tick), y=bottom + 18, text_anchor="middle"),
        )
    ]  # fmt: skip
    return tag(
        "svg", tag("title", said), tag("style", Markup(STYLE)),
        tag("rect", class_="ground", width=WIDTH, height=bottom + 28, rx=8),
        tag("text", title, class_="title", x=12, y=26), *grid, *rows,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {bottom + 28}", class_="dots", role="img",
    )  # fmt: skip


def _row(dot: Dot, axis: _Axis, y: float, words: str, is_difference: bool) -> Markup:
    low, middle, high = axis.across(dot.low), axis.across(dot.value), axis.across(dot.high)
    is_open = is_difference and dot.low <= 0 <= dot.high
    kind = " ".join(name for name, is_it in (("ours", dot.is_ours), ("open", is_open)) if is_it)
    return tag(
        "g", tag("text", dot.label, x=12, y=y + 5),
        tag("line", class_="bar", x1=low, x2=high, y1=y, y2=y), tag("circle", cx=middle, cy=y, r=5),
        tag("text", words, x=WIDTH - 10, y=y + 5, text_anchor="end"), class_=kind or None,
    )  # fmt: skip


def _step(span: float, parts: int) -> float:
    """Returns a round distance of ticks: about `parts` times on the span."""
    rough = max(span, 1e-9) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
