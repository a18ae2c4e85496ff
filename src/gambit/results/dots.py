"""A plot of values with their intervals, one row each, as an SVG that needs no library and reads on a phone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gambit.results.html import Markup, tag

WIDTH, LABELS, PLOT, ROW, TOP = 560, 214, 262, 34, 46
STYLE = """
.dots{--ink:#1f2328;--faint:#66707b;--rule:#d0d7de;--ours:#0072b2;--ground:#fff;font:16px system-ui,sans-serif;\
max-width:560px;width:100%}
@media (prefers-color-scheme:dark){.dots{--ink:#e6edf3;--faint:#8d96a0;--rule:#39414b;--ours:#58a6ff;--ground:#0d1117}}
.dots text{fill:var(--ink)}.dots .title{font-weight:700}.dots .tick{fill:var(--faint);font-size:14px}
.dots .ground{fill:var(--ground)}.dots line{stroke:var(--rule)}
.dots .bar{stroke:var(--ink);stroke-width:2}.dots circle{fill:var(--ink);stroke:var(--ink);stroke-width:2}
.dots .ours text{font-weight:700}
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


def dot_plot(title: str, dots: Sequence[Dot], *, unit: str = " %", is_difference: bool = False) -> Markup:
    """Returns the plot. Of differences, the axis holds zero, and rows whose interval holds it are hollow."""
    ends = [end for dot in dots for end in (dot.low, dot.high)] + [0.0] * is_difference
    step = _step(max(ends) - min(ends))
    first, last = math.floor(min(ends) / step), math.ceil(max(ends) / step)
    ticks = [step * number for number in range(first, max(last, first + 1) + 1)]

    def across(value: float) -> float:
        return round(LABELS + PLOT * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    values = [f"{dot.value:{'+' if is_difference else ''}.1f}{unit}" for dot in dots]
    bottom = TOP + ROW * len(dots)
    grid = [
        part
        for tick in ticks
        for part in (
            tag("line", x1=across(tick), x2=across(tick), y1=TOP - 6, y2=bottom,
                stroke_width=3 if is_difference and tick == 0 else 1),
            tag("text", f"{tick:g}", class_="tick", x=across(tick), y=bottom + 18, text_anchor="middle"),
        )
    ]  # fmt: skip
    rows = [
        _row(
            dot,
            (across(dot.low), across(dot.value), across(dot.high)),
            TOP + ROW * (number + 0.5),
            words,
            is_difference,
        )
        for number, (dot, words) in enumerate(zip(dots, values, strict=True))
    ]
    said = "; ".join(f"{dot.label} {words}" for dot, words in zip(dots, values, strict=True))
    return tag(
        "svg", tag("title", f"{title}: {said}"), tag("style", Markup(STYLE)),
        tag("rect", class_="ground", width=WIDTH, height=bottom + 28, rx=8),
        tag("text", title, class_="title", x=12, y=26), *grid, *rows,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {bottom + 28}", class_="dots", role="img",
    )  # fmt: skip


def _row(dot: Dot, ends: tuple[float, float, float], y: float, words: str, is_difference: bool) -> Markup:
    low, middle, high = ends
    is_open = is_difference and dot.low <= 0 <= dot.high
    kind = " ".join(name for name, is_it in (("ours", dot.is_ours), ("open", is_open)) if is_it)
    return tag(
        "g", tag("text", dot.label, x=12, y=y + 5),
        tag("line", class_="bar", x1=low, x2=high, y1=y, y2=y), tag("circle", cx=middle, cy=y, r=5),
        tag("text", words, x=WIDTH - 10, y=y + 5, text_anchor="end"), class_=kind or None,
    )  # fmt: skip


def _step(span: float) -> float:
    """Returns a round distance of ticks: about five of them on the span."""
    rough = max(span, 1e-9) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
