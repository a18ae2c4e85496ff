"""What a notebook shows: a result's vote table and tree, and the progress of a running search."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from gambit import events as ev
from gambit.errors import UserError
from gambit.results.html import result_html, tree_svg
from gambit.results.record import replay
from gambit.results.result import SearchResult, TraceOutline
from gambit.solver import Solver
from gambit.tree import TraceState
from gambit.view.notebook import NotebookProgress
from support import GOLDEN as KEPT

GOLDEN = KEPT / "runs"


def same(first: str, second: str) -> bool:
    return first == second


@pytest.fixture(scope="module")
def result() -> SearchResult:
    """Roots, children, ghosts, pruned and finished traces."""
    return replay(GOLDEN / "gambit" / "events.jsonl", same)


class Balanced(HTMLParser):
    """Fails on an element that is not closed in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def checked(html: str) -> list[str]:
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    return parser.texts


def outline(parent: int | None = None, state: TraceState = TraceState.FINISHED, **changes: object) -> TraceOutline:
    values = {"begin_step": 0, "end_step": 10, "num_tokens": 10, "score": 0.5, "answer": "7"}
    return TraceOutline(parent, state, **{**values, **changes})


# -- results ---------------------------------------------------------------------------------------------------


def test_a_result_shows_its_vote_table_and_every_trace(result: SearchResult) -> None:
    html = result._repr_html_()
    texts = checked(html)
    for entry in result.votes:
        assert entry.answer in texts and str(entry.traces) in texts
    num_islands = len({trace.island for trace in result.traces})
    assert len(result.traces) == result.counts.roots + result.counts.branched and num_islands == 2
    assert html.count("<title>") == len(result.traces) + num_islands
    assert html.count('stroke-opacity=".5"') == result.counts.branched  # a line from each parent
    assert "<script" not in html and "http" not in html


def test_what_a_model_says_stays_text() -> None:
    nasty = "<img src=x onerror=alert(1)>"
    failed = SearchResult.failed("p", "gambit", 0, nasty)
    assert nasty not in result_html(failed) and "&lt;img" in result_html(failed)
    assert nasty not in tree_svg([outline(answer=nasty)], nasty)


def test_children_stand_below_their_parents() -> None:
    traces = [outline(), outline(), outline(parent=0, begin_step=4), outline(parent=2, begin_step=6)]
    heights = [float(y) for y in re.findall(r'd="M[\d.]+ ([\d.]+)H', tree_svg(traces, "7"))]
    assert heights[0] < heights[2] < heights[3] < heights[1]


def test_islands_stand_together_each_beside_a_bar_of_its_own() -> None:
    traces = [outline(island=0), outline(island=1), outline(parent=0, island=0), outline(island=0)]
    drawn = tree_svg(traces, "7")
    heights = [float(y) for y in re.findall(r'd="M[\d.]+ ([\d.]+)H', drawn)]
    assert heights[0] < heights[2] < heights[3] < heights[1], "a later root stands beside its island"
    bars = re.findall(r'<rect x="0" y="([\d.]+)" width="3.0" height="([\d.]+)"', drawn)
    assert [round(float(height)) for _, height in bars] == [3 * 14 - 1, 14 - 1]
    assert "island 1: 1 traces" in drawn and "<rect" not in tree_svg([outline()], "7")


def test_looks_tell_what_became_of_a_trace() -> None:
    states = [TraceState.FINISHED, TraceState.PRUNED, TraceState.GHOST, TraceState.CANCELLED]
    drawn = tree_svg([outline(state=state) for state in states] + [outline(answer="8")], "7")
    for name in ("finished with the answer", "finished otherwise", "pruned", "lost its memory", "cut off"):
        assert name in drawn
    assert "pruned" not in tree_svg([outline()], "7")


def test_a_thousand_traces_are_no_mile_long(result: SearchResult) -> None:
    drawn = tree_svg([outline() for _ in range(1000)], "7")
    height = float(re.search(r'height="(\d+)"', drawn)[1])
    assert height <= 2100 and "<text" not in drawn
    assert tree_svg([], None) == ""


def test_traces_are_not_written_to_disk(result: SearchResult) -> None:
    assert "traces" not in result.to_json() and "TraceOutline" not in repr(result)


def test_a_search_gives_its_traces(tiny_folder: Path) -> None:
    from gambit.config.options import SearchConfig

    with Solver(str(tiny_folder), scorer="constant", engine="local") as solver:
        found = solver.solve("a=1", SearchConfig(capacity=3, max_new_tokens=12))
    assert len(found.traces) == found.counts.roots + found.counts.branched >= 3
    checked(found._repr_html_())


# -- progress --------------------------------------------------------------------------------------------------


class Cell:
    """A notebook's cell: what it shows now, and how often it was drawn."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, content: object, *, display_id: bool) -> "Cell":
        assert display_id
        self.update(content)
        return self

    def update(self, content: object) -> None:
        self.shown.append(content._repr_html_())


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    made = Cell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=made.display))
    return made


def test_progress_is_shown_and_ends_with_the_answer(cell: Cell) -> None:
    ticks = iter(range(10_000))
    progress = NotebookProgress(clock=lambda: next(ticks))
    log = list(ev.read_log(GOLDEN / "gambit" / "events.jsonl"))
    for event in log:
        progress(event)
    for html in cell.shown:
        checked(html)
    assert "0 of 6 traces complete" in cell.shown[0]
    assert any("running" in html and "tokens/s" in html for html in cell.shown)
    assert f"answer <b>{log[-1].answer}</b>" in cell.shown[-1]


def test_a_cell_is_drawn_a_few_times_a_second_at_most(cell: Cell) -> None:
    progress = NotebookProgress(clock=lambda: 0.0)
    for event in ev.read_log(GOLDEN / "sc" / "events.jsonl"):
        progress(event)
    assert len(cell.shown) == 2  # its first moment and its end


def test_problems_side_by_side_have_a_line_each(cell: Cell) -> None:
    ticks = iter(range(10_000))
    progress = NotebookProgress(clock=lambda: next(ticks))
    logs = {name: list(ev.read_log(GOLDEN / name / "events.jsonl")) for name in ("sc", "gambit")}
    for name, events in logs.items():
        progress.of_problem(name, events[0])
    assert "<b>sc</b>" in cell.shown[-1] and "<b>gambit</b>" in cell.shown[-1]
    for name, events in logs.items():
        for event in events[1:]:
            progress.of_problem(name, event)
    assert "2 problems done" in cell.shown[-1]


def test_without_ipython_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(UserError, match="pip install ipython"):
        NotebookProgress()
