"""An animation of two searches for one problem, side by side, made from their event logs alone.

Height is the mean score of a trace's thoughts, and time runs to the right. The cells below are the places of the pool,
coloured when their traces have finished. The picture is an SVG that moves by CSS. It begins with the end, held for a
moment, and shows the end wherever it stands still.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gambit import events as ev
from gambit.answers import Equivalent
from gambit.errors import UserError
from gambit.results.html import Markup, joined, tag
from gambit.results.record import SearchRecord
from gambit.tree import Trace, TraceState

WIDTH, HEIGHT = 800, 602
LANE_WIDTH, LANES_X = 368, (16, 416)
PLOT_TOP, PLOT_HEIGHT, AXIS_Y, CELLS_TOP, COUNTERS_Y, ANSWER_Y, LEGEND_Y = 106, 216, 330, 366, 432, 488, 532
NUM_FRAMES = 48
MOST_LETTERS = 8  # of an answer, which shares its line with the count of traces
SECONDS, SHARE_MOVING = 14.0, 0.72  # of one round; after that the end stands still
HELD = 2.5  # seconds of the end before the first round begins
NAMES = {"gambit": "Gambit", "sc": "Plain voting", "step": "STEP", "deepconf": "DeepConf", "slim-sc": "Slim-SC"}
STYLE = """
:root{--ground:#fff;--ink:#1f2328;--faint:#818b98;--cell:#d5dae0;--right:#0072b2;--wrong:#d55e00}
@media (prefers-color-scheme:dark){:root{--ground:#0d1117;--ink:#e6edf3;--faint:#7d8590;--cell:#39414b;\
--right:#58a6ff;--wrong:#f0883e}}
.ground{fill:var(--ground)}text{font:22px system-ui,sans-serif;fill:var(--ink)}
.title{font-size:26px;font-weight:700}.answer{font-size:40px;font-weight:700}
path{fill:none;stroke-width:1.5;stroke-linejoin:round}
.pruned{stroke:var(--faint);opacity:.5}.right{stroke:var(--right);opacity:.6}.wrong{stroke:var(--wrong);opacity:.6}
.hero{stroke-width:4;opacity:1}.cross{stroke:var(--faint)}.axis{stroke:var(--faint)}
.key{stroke-width:4;opacity:1}
.live{fill:var(--cell)}.ok{fill:var(--right)}.no{fill:var(--wrong)}
.f{opacity:0;animation:f SECONDSs step-end infinite;animation-delay:calc(var(--at) - BEGINs)}
.z{animation:z SECONDSs step-end infinite;animation-delay:calc(0s - BEGINs)}
.cover{transform:translateX(100%);animation:c SECONDSs linear infinite;animation-delay:calc(0s - BEGINs)}
@keyframes f{0%{opacity:1}FRAME%{opacity:0}}
@keyframes z{0%{opacity:0}MOVING%{opacity:1}}
@keyframes c{0%{transform:none}MOVING%{transform:translateX(100%)}100%{transform:translateX(100%)}}
@media (prefers-reduced-motion:reduce){.f,.z,.cover{animation:none}}
"""


@dataclass(slots=True)
class Lane:
    """One search: its record, the points of every trace as (step, mean score), and how each trace left the pool."""

    record: SearchRecord
    points: list[list[tuple[int, float]]]
    places: list[int]  # of each trace among the cells
    left: list[int | None]  # the step at which a trace was pruned or ended

    @property
    def last_step(self) -> int:
        return max((step for points in self.points for step, _ in points), default=1)

    @property
    def traces(self) -> list[Trace]:
        return self.record.tree.traces


def race(logs: tuple[Path, Path], equivalent: Equivalent, expected: str | None = None) -> str:
    """Returns the animation of two finished searches for the same problem.

    `expected` is the right answer. Without it, the traces that agree with the search's own answer stand out.
    """
    lanes = [_lane(log) for log in logs]
    first, second = (lane.record.started for lane in lanes)
    if first.prompt_tokens != second.prompt_tokens:
        raise UserError(f"{logs[0]} and {logs[1]} are searches for different problems: give two runs of the same one")
    last_step = max(lane.last_step for lane in lanes)
    scores = [score for lane in lanes for points in lane.points for _, score in points]
    low, high = min(scores, default=0.0), max(scores, default=1.0)
    drawings = [
        _Drawing(lane, equivalent, expected, last_step, (low, high if high > low else low + 1.0)).svg(x)
        for lane, x in zip(lanes, LANES_X, strict=True)
    ]
    frame, moving = 100 * SHARE_MOVING / NUM_FRAMES, 100 * SHARE_MOVING
    style = STYLE.replace("SECONDS", f"{SECONDS:g}").replace("FRAME", f"{frame:.3f}").replace("MOVING", f"{moving:g}")
    style = style.replace("BEGIN", f"{SECONDS - HELD:g}")
    ground = tag("rect", class_="ground", width=WIDTH, height=HEIGHT, rx=12)
    label = " ".join(_Summary(lane, equivalent, expected).sentence for lane in lanes)
    picture = tag(
        "svg", tag("title", label), tag("style", Markup(style)), ground, *drawings, *_legend(expected is not None),
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
    )  # fmt: skip
    return f"{picture}\n"


def _legend(has_truth: bool) -> Iterator[Markup]:
    ends = ("ended right", "ended wrong") if has_truth else ("ended with the answer", "ended with another")
    x = 16
    for kind, words in zip(("right", "wrong", "pruned"), (*ends, "× pruned"), strict=True):
        yield tag("path", class_=f"{kind} key", d=f"M{x} {LEGEND_Y - 7}h28")
        yield tag("text", words, x=x + 36, y=LEGEND_Y)
        x += 70 + 12 * len(words)
    yield tag("text", "height: mean score · thick: best trace of the answer", x=16, y=LEGEND_Y + 28)
    yield tag("text", "squares: places, grey while their traces run", x=16, y=LEGEND_Y + 56)


def _lane(log: Path) -> Lane:
    """Reads a log; raises UserError where the search has no end."""
    lane: Lane | None = None
    for event in ev.read_log(log):
        if isinstance(event, ev.RunStarted):
            lane = Lane(SearchRecord(event), [], [], [])
        elif lane is not None:
            lane.record.apply(event)
            _follow(lane, event)
    if lane is None or lane.record.voted is None:
        raise UserError(f"{log} ends before its search did: only whole searches can be animated")
    return lane


def _follow(lane: Lane, event: ev.Event) -> None:
    tree = lane.record.tree
    if isinstance(event, ev.Created | ev.Branched | ev.Forced):
        trace = tree.traces[event.trace]
        score = tree.score_of(trace)
        lane.points.append([] if score is None else [(event.step, score)])
        lane.places.append(_free_place(lane, trace))
        lane.left.append(None)
    elif isinstance(event, ev.Scored | ev.Verified):
        for trace_id in event.traces:
            score = tree.score_of(tree.traces[trace_id])
            if score is not None:
                lane.points[trace_id].append((event.step, score))
    elif isinstance(event, ev.Pruned | ev.Finished | ev.Cancelled):
        lane.left[event.trace] = event.step
        if lane.points[event.trace]:
            lane.points[event.trace].append((event.step, lane.points[event.trace][-1][1]))


def _free_place(lane: Lane, trace: Trace) -> int:
    """Returns the place of a new trace: that of a pruned one of its island where there is one, else a new place.

    Finished traces keep their places, since their votes count.
    """
    last = dict(zip(lane.places, lane.traces, strict=False))  # place -> the last trace that had it
    free = (place for place, other in last.items() if other.state is TraceState.PRUNED and other.island == trace.island)
    return min(free, default=len(last))


class _Summary:
    """Counts of a search at its end, and which traces are right."""

    def __init__(self, lane: Lane, equivalent: Equivalent, expected: str | None) -> None:
        record = lane.record
        assert record.voted is not None
        self.answer = record.voted.answer
        self.target = expected or self.answer
        self.has_truth = expected is not None
        finished = [trace for trace in lane.traces if trace.state is TraceState.FINISHED]
        same = {
            answer: self.target is not None and (answer == self.target or equivalent(answer, self.target) is True)
            for answer in {trace.answer for trace in finished if trace.answer is not None} | {self.answer}
            if answer is not None
        }
        self.right = {trace.id for trace in finished if trace.answer is not None and same[trace.answer]}
        self.is_right = self.answer is not None and same[self.answer]
        self.num_finished = len(finished)
        self.method = NAMES.get(record.started.policy, record.started.policy)

    @property
    def verdict(self) -> str:
        """Returns the answer, with a mark where the right one is known."""
        mark = {True: " ✓", False: " ✗"}[self.is_right] if self.has_truth else ""
        answer = "no answer" if self.answer is None else self.answer
        return f"{answer if len(answer) <= MOST_LETTERS else answer[:MOST_LETTERS] + '…'}{mark}"

    @property
    def count(self) -> str:
        return f"{len(self.right)} of {self.num_finished} {'right' if self.has_truth else 'agree'}"

    @property
    def sentence(self) -> str:
        return f"{self.method}: {self.verdict}, {self.count}."


class _Drawing:
    """One half of the picture."""

    def __init__(
        self, lane: Lane, equivalent: Equivalent, expected: str | None, last_step: int, scores: tuple[float, float]
    ) -> None:
        self._lane = lane
        self._summary = _Summary(lane, equivalent, expected)
        self._last_step = last_step
        self._low, self._high = scores
        self._hero = self._winning_line()
        islands = dict(zip(lane.places, lane.traces, strict=True))
        self._island_of_place = [islands[place].island for place in sorted(islands)]

    def svg(self, x: int) -> Markup:
        title = tag("tspan", self._summary.method, class_="title")
        places = tag("tspan", f"{len(self._island_of_place)} places", dx=12)
        parts = [
            tag("text", title, places, y=36),
            *(tag("text", line, y=68 + 27 * number) for number, line in enumerate(self._changes())),
            self._plot(),
            tag("path", class_="axis", d=f"M4 {AXIS_Y - 6}H{LANE_WIDTH - 4}"),
            tag("text", "0", x=4, y=AXIS_Y + 18),
            tag("text", f"{self._last_step:,} steps", x=LANE_WIDTH - 4, y=AXIS_Y + 18, text_anchor="end"),
            *self._frames(),
            self._verdict(),
        ]
        return tag("g", *parts, transform=f"translate({x} 0)")

    def _changes(self) -> tuple[str, ...]:
        counts = self._lane.record.counts
        if not counts.branched and not counts.pruned:
            return ("every trace runs to its end",)
        if counts.branched == counts.pruned:
            return f"{counts.pruned:,} pruned, each replaced by", "a branch of a better one"
        return f"{counts.pruned:,} pruned,", f"{counts.branched:,} branched from better ones"

    def _plot(self) -> Markup:
        """Returns the lines; the crosses lie below those of traces that finished."""
        lines = [self._crosses(), *(line for trace in self._by_importance() for line in self._line(trace))]
        cover = tag("rect", class_="ground cover", width=LANE_WIDTH, height=PLOT_HEIGHT + 12, y=-6)
        size = {"width": LANE_WIDTH, "height": PLOT_HEIGHT + 6}
        return tag("svg", *lines, cover, y=PLOT_TOP, overflow="hidden", **size)

    def _by_importance(self) -> list[Trace]:
        """Returns the traces with those last, and on top, that a viewer should see."""
        order = {"pruned": 0, "wrong": 1, "right": 2}
        return sorted(self._lane.traces, key=lambda trace: (trace.id in self._hero, order[self._kind(trace)]))

    def _kind(self, trace: Trace) -> str:
        """Returns the style of a trace; all ancestors of the winner look like the winner."""
        if trace.id in self._summary.right:
            return "right"
        if trace.id in self._hero:
            return "right" if self._summary.is_right else "wrong"
        return "wrong" if trace.state is TraceState.FINISHED else "pruned"

    def _winning_line(self) -> set[int]:
        """Returns the lineage of the best-scored trace that gave the search's answer."""
        tree, answer = self._lane.record.tree, self._summary.answer
        votes = [trace for trace in self._lane.traces if trace.answer == answer and trace.state is TraceState.FINISHED]
        if answer is None or not votes:
            return set()
        best = max(votes, key=lambda trace: (tree.score_of(trace) or 0.0, -trace.id))
        return set(tree.lineage(best.id))

    def _at(self, step: int, score: float) -> tuple[float, float]:
        x = 4 + (LANE_WIDTH - 12) * step / self._last_step
        y = 6 + (PLOT_HEIGHT - 12) * (self._high - score) / (self._high - self._low)
        return round(x, 1), round(y, 1)

    def _line(self, trace: Trace) -> Iterator[Markup]:
        points = [self._at(*point) for point in self._lane.points[trace.id]]
        if len(points) < 2:
            return
        hero = " hero" if trace.id in self._hero else ""
        yield tag("path", class_=self._kind(trace) + hero, d="M" + " ".join(f"{x:g} {y:g}" for x, y in points))

    def _crosses(self) -> Markup:
        """Returns a cross where each pruned trace ended."""
        pruned = (trace.id for trace in self._lane.traces if trace.state is TraceState.PRUNED)
        ends = [self._at(*points[-1]) for points in map(self._lane.points.__getitem__, pruned) if points]
        return tag("path", class_="cross", d="".join(f"M{x - 3:g} {y - 3:g}l6 6m0-6l-6 6" for x, y in ends))

    # -- what changes from frame to frame ----------------------------------------------------------------------

    def _frames(self) -> Iterator[Markup]:
        every = SECONDS * SHARE_MOVING / NUM_FRAMES
        for number in range(NUM_FRAMES):
            step = round(self._last_step * (number + 1) / NUM_FRAMES)
            is_last = number == NUM_FRAMES - 1
            content = self._pool(step), tag("text", self._counters(step), y=COUNTERS_Y)
            if is_last:
                yield tag("g", *content, class_="z")
            else:
                yield tag("g", *content, class_="f", style=f"--at:{every * number:.2f}s")

    def _pool(self, step: int) -> Markup:
        """Returns the cells of the pool at a step, islands apart from each other."""
        cells: dict[str, list[str]] = {"live": [], "ok": [], "no": []}
        for (x, y), trace in self._occupied(step):
            left = self._lane.left[trace.id]
            is_over = left is not None and left <= step
            kind = ("ok" if trace.id in self._summary.right else "no") if is_over else "live"
            cells[kind].append(f"M{x:g} {y:g}h8v12h-8z")
        return joined(tag("path", class_=kind, d="".join(found)) for kind, found in cells.items() if found)

    def _occupied(self, step: int) -> Iterator[tuple[tuple[float, float], Trace]]:
        """Yields where a cell stands and the trace in it, for each place that holds one at this step."""
        holders: dict[int, Trace] = {}
        for trace, place in zip(self._lane.traces, self._lane.places, strict=True):
            left = self._lane.left[trace.id]
            is_gone = trace.state is not TraceState.FINISHED and left is not None and left <= step
            if trace.created_step <= step and not is_gone:
                holders[place] = trace
        for place, trace in holders.items():
            yield self._spot(place), trace

    def _spot(self, place: int) -> tuple[float, float]:
        """Returns the corner of a cell in one of two rows, with a gap wherever an island ends."""
        islands = self._island_of_place
        per_row = -(-len(islands) // 2)
        row, column = divmod(place, per_row)
        gaps = sum(a != b for a, b in pairwise(islands[row * per_row : place + 1]))
        room = LANE_WIDTH - 14 - 6 * sum(a != b for a, b in pairwise(islands[:per_row]))
        return round(4 + column * min(11.0, room / per_row) + 6 * gaps, 1), CELLS_TOP + 18 * row

    def _counters(self, step: int) -> str:
        tokens = done = 0
        for trace in self._lane.traces:
            left = self._lane.left[trace.id]
            end = step if left is None else min(left, step)
            tokens += min(max(end - trace.created_step, 0), trace.num_own_tokens)
            done += left is not None and left <= step and trace.state is TraceState.FINISHED
        return f"{tokens:,} tokens · {done} done"

    def _verdict(self) -> Markup:
        colour = "right" if self._summary.is_right or not self._summary.has_truth else "wrong"
        answer = tag("tspan", self._summary.verdict, class_="answer", style=f"fill:var(--{colour})")
        count = tag("tspan", self._summary.count, dx=16)
        return tag("text", answer, count, class_="z", y=ANSWER_Y)
