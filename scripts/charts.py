"""Points and lines with intervals over an axis, as an SVG in the style of the dot plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gambit.results.dots import STYLE, WIDTH
from gambit.results.html import Markup, tag

LEFT, RIGHT, TOP, HEIGHT, BOTTOM = 56, 20, 62, 270, 50
MORE_STYLE = """
.dots{--other:#b35900}
@media (prefers-color-scheme:dark){.dots{--other:#f0a04b}}
.dots .ours text{fill:var(--ours)}.dots .other text{fill:var(--other)}
.dots .other .bar,.dots .other circle{stroke:var(--other)}.dots .other circle{fill:var(--other)}
.dots polyline{fill:none;stroke:var(--ink);stroke-width:2.5}
.dots .ours polyline{stroke:var(--ours)}.dots .other polyline{stroke:var(--other);stroke-dasharray:7 4}
.dots g text{font-size:15px}
"""

Place = Callable[[float], float]  # from a value to where it is drawn


class Point(NamedTuple):
    """A value over a place of the axis, with its interval where it has one, and its label."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""
    label_at: tuple[float, float, str] = (10, 5, "start")


class Series(NamedTuple):
    """Points of one kind: `ours`, `other` or neither. A line joins them where `is_line` is true."""

    points: Sequence[Point]
    kind: str = ""
    is_line: bool = False


class Axis(NamedTuple):
    """A range with its ticks and its name."""

    name: str
    ticks: Sequence[float]

    def share(self, value: float) -> float:
        """Returns where a value lies between the first tick (0) and the last (1)."""
        return (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])


def chart(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Markup:
    bottom = TOP + HEIGHT

    def across(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * x.share(value), 1)

    def up(value: float) -> float:
        return round(bottom - HEIGHT * y.share(value), 1)

    grid = [
        part
        for tick in y.ticks
        for part in (
            tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=up(tick), y2=up(tick), stroke_width=1),
            tag("text", f"{tick:g}", class_="tick", x=LEFT - 8, y=up(tick) + 5, text_anchor="end"),
        )
    ]
    grid += [tag("text", f"{t:g}", class_="tick", x=across(t), y=bottom + 20, text_anchor="middle") for t in x.ticks]
    names = [
        tag("text", y.name, class_="tick", x=12, y=46),
        tag("text", x.name, class_="tick", x=WIDTH - RIGHT, y=bottom + 40, text_anchor="end"),
    ]
    drawn = [
        tag("g", *_line(each, across, up), *(part for p in each.points for part in _point(p, across, up)),
            class_=each.kind or None)
        for each in series
    ]  # fmt: skip
    said = "; ".join(f"{p.label or f'{p.x:g}'} {p.y:g}" for each in series for p in each.points)
    height = bottom + BOTTOM
    return tag(
        "svg", tag("title", f"{title}: {said}"), tag("style", Markup(STYLE + MORE_STYLE)),
        tag("rect", class_="ground", width=WIDTH, height=height, rx=8),
        tag("text", title, class_="title", x=12, y=26), *grid, *names, *drawn,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", class_="dots", role="img",
    )  # fmt: skip


def _line(series: Series, across: Place, up: Place) -> list[Markup]:
    points = " ".join(f"{across(p.x)},{up(p.y)}" for p in series.points)
    return [tag("polyline", points=points)] if series.is_line else []


def _point(point: Point, across: Place, up: Place) -> list[Markup]:
    x, y = across(point.x), up(point.y)
    aside, below, anchor = point.label_at
    parts = []
    if point.low is not None and point.high is not None:
        parts.append(tag("line", class_="bar", x1=x, x2=x, y1=up(point.low), y2=up(point.high)))
    parts.append(tag("circle", cx=x, cy=y, r=5))
    if point.label:
        parts.append(tag("text", point.label, x=x + aside, y=y + below, text_anchor=anchor))
    return parts
