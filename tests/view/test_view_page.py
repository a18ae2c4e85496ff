"""The tree page in a real browser: it answers pointer and keys, fits small and dark screens, and never complains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from gambit import events as ev
from gambit.types import EndReason, StopReason
from gambit.view import write_page
from support.browser import HOSTILE, LAST_STEP, NAMES, QUESTION, Browser, Story, find_browser

BROWSER = find_browser()
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed (looked for {', '.join(NAMES)})"),
]

GUTTER, MARGIN, EDGE, ROW_MAX = 46, 58, 12, 18  # as in paint.js and tree.js
ROWS = [0, 3, 4, 1, 2]  # families together, the latest child nearest to its parent


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("story"))
    write_page(story.write(), story.log.with_name("page.html"))
    return story


NUM_ISLANDS, PER_ISLAND = 30, 8  # 240 traces: more than can be told apart on a screen of 800 pixels


@pytest.fixture(scope="module")
def crowd(story: Story) -> Path:
    """Many traces on islands; those of island 3 alone answer 9."""
    log = story.log.with_name("crowd.jsonl")
    traces = range(NUM_ISLANDS * PER_ISLAND)
    events = [
        dataclasses.replace(story.header, capacity=len(traces), num_traces=len(traces)),
        *(ev.Created(0, trace, trace // PER_ISLAND) for trace in traces),
        *(ev.Admitted(1, trace, 0, 0, 0) for trace in traces),
        ev.Scored(60, tuple(traces), tuple(trace / len(traces) for trace in traces), (20,) * len(traces)),
        *(ev.Finished(LAST_STEP, t, EndReason.STOP, "9" if t // PER_ISLAND == 3 else "7", (1,) * 40) for t in traces),
        ev.Stopped(LAST_STEP, StopReason.COMPLETED),
    ]
    with ev.LogWriter(log) as writer:
        for event in events:
            writer.write(event)
    write_page(log, log.with_suffix(".html"))
    return log.with_suffix(".html")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert BROWSER is not None
    with Browser(BROWSER, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(shared: Browser, story: Story) -> Iterator[Browser]:
    """Freshly opened at 1280 × 800, light; whatever a test does, the console stays empty and the network silent."""
    shared.resize(1280, 800)
    shared.prefer("light")
    shared.move(1270, 10)
    shared.open(story.log.with_name("page.html"))
    yield shared
    assert shared.complaints == []


def spot(page: Browser, trace: int, step: float) -> tuple[float, float]:
    """Where a trace is drawn."""
    left, top, width, height = page.run(
        "(({ left, top, width, height }) => [left, top, width, height])"
        "(document.querySelector('#tree').getBoundingClientRect())"
    )
    row_height = min((height - EDGE) / len(ROWS), ROW_MAX)
    x = left + GUTTER + step / LAST_STEP * (width - GUTTER - MARGIN)
    return x, top + EDGE / 2 + (ROWS.index(trace) + 0.5) * row_height


def pick(page: Browser, trace: int, step: float) -> None:
    page.click(*spot(page, trace, step))
    page.wait_for(f"document.querySelector('#trace strong')?.textContent === 'Trace {trace}'")


def colours(page: Browser, selector: str) -> int:
    """How many colours a canvas shows."""
    return page.run(f"""(() => {{
        const canvas = document.querySelector("{selector}");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(pixels.buffer)).size;
    }})()""")


def picture(page: Browser, selector: str = "#tree-base") -> str:
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return str(page.run(f"document.querySelector('{selector}').toDataURL()"))


def test_the_run_is_told_beside_the_tree(page: Browser) -> None:
    run = page.text("#run")
    assert QUESTION in run and "budget" in run and "hand" in run
    assert page.text(".answer") == "7" and page.text("#answer-line") == "answer 7"
    rows = [page.text(f"[data-vote='{i}']").split() for i in range(2)]
    assert rows == [["7", "0.70", "1", "1"], ["9", "0.50", "1", "1"]]
    assert " ".join(page.text("#legend").split()) == (
        "root branch completed: winner completed: other pruned ghost cut off"
    )
    assert page.run("document.querySelectorAll('b img, img, #run b').length") == 0  # the question's tags are words
    assert colours(page, "#tree-base") > 20 and colours(page, "#charts-base") > 4


def test_pointing_shows_the_score_curve(page: Browser) -> None:
    assert page.run("document.querySelector('#tip').hidden")
    page.move(*spot(page, 0, 180))
    page.wait_for("!document.querySelector('#tip').hidden")
    tip = page.text("#tip")
    assert "Trace 0" in tip and "0.70" in tip and "completed at step 300" in tip
    assert colours(page, "#tip canvas") > 4
    page.move(*spot(page, 2, 190))
    page.wait_for("document.querySelector('#tip').innerText.includes('Trace 2')")
    assert "ghost since step 160, pruned (tournament) at step 240" in page.text("#tip")
    page.move(1270, 10)
    page.wait_for("document.querySelector('#tip').hidden")


def test_a_click_shows_the_text_with_inherited_and_own_part(page: Browser, story: Story) -> None:
    pick(page, 3, 300)
    inherited, own = (
        page.run(f"[...document.querySelectorAll('.{kind} span')].map((node) => node.textContent)")
        for kind in ("part.inherited", "part.own")
    )
    assert "\n\n".join(inherited[:-1]) + "\n\n" + inherited[-1] + "".join(own) == story.texts[3]
    assert own[0].startswith("\N{PARTY POPPER}")  # the character that the branch cut is the child's
    assert HOSTILE in inherited[1] and page.run("document.querySelectorAll('#trace img').length") == 0
    scores = page.run("[...document.querySelectorAll('.thought b')].map((node) => node.textContent)")
    assert [score for score in scores if score] == ["0.90", "0.50", "0.10"]
    assert (
        page.text("#trace dl").endswith("answer\n9\nweight of its vote\n0.50")
        and page.run("location.hash") == "#trace-3"
    )
    assert page.run("document.querySelector('#tree').classList.contains('focused')")


def test_keys_walk_the_tree_and_close_it(page: Browser) -> None:
    page.run("document.querySelector('#tree').focus()")

    def after(key: str) -> str:
        page.press(key)
        return str(page.run("location.hash"))

    assert after("ArrowDown") == "#trace-0"  # none was chosen: the first
    assert after("ArrowDown") == "#trace-3"
    assert after("ArrowRight") == "#trace-4"
    assert after("ArrowLeft") == after("ArrowUp").replace("0", "3") == "#trace-3"
    assert after("Escape") == "" and page.text(".answer") == "7"


def test_the_vote_shows_its_traces_and_roots(page: Browser) -> None:
    before = picture(page, "#tree-top")
    page.run("document.querySelector('[data-vote=\"1\"]').click()")
    assert picture(page, "#tree-top") != before
    assert page.text("[data-roots='1']").split() == ["from", "roots", "0"]
    page.run("document.querySelector('[data-roots=\"1\"] button').click()")
    page.wait_for("location.hash === '#trace-0'")


def test_the_axis_zooms_pans_and_fits(page: Browser) -> None:
    whole, charts = picture(page), picture(page, "#charts-base")
    page.wheel(*spot(page, 0, 200), -400, is_ctrl=True)
    page.wait_for("true")
    zoomed = picture(page)
    assert zoomed != whole and picture(page, "#charts-base") != charts  # one axis for both
    page.run("document.querySelector('#zoom-out').click()")
    assert picture(page) != zoomed
    page.run("document.querySelector('#fit').click()")
    assert picture(page) == whole


def test_only_what_led_to_an_answer(page: Browser) -> None:
    whole = picture(page)
    page.run(
        "((list) => { list.value = 'completed'; list.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#show'))"
    )
    assert picture(page) != whole
    assert "(2)" in page.text("#show option[value=completed]")


def test_links_open_traces(page: Browser) -> None:
    page.run("location.hash = 'trace-1'")
    page.wait_for("document.querySelector('#trace strong')?.textContent === 'Trace 1'")
    page.run("location.hash = 'trace-77'")  # there is none: nothing happens
    page.reload()
    assert page.run("document.querySelector('#trace strong')") is None
    page.run("location.hash = 'trace-3'")
    page.reload()
    page.wait_for("document.querySelector('#trace strong')?.textContent === 'Trace 3'")


@pytest.mark.parametrize("width", [1280, 900, 390])
def test_nothing_is_wider_than_the_screen(page: Browser, width: int) -> None:
    page.resize(width, 800)
    pick(page, 3, 300)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.querySelector('#tree').getBoundingClientRect().height") >= 120


def test_dark_screens_get_a_dark_page(page: Browser) -> None:
    light = picture(page)
    page.prefer("dark")
    page.wait_for("getComputedStyle(document.body).backgroundColor === 'rgb(18, 22, 28)'")
    assert picture(page) != light


def test_a_browser_that_cannot_unpack_says_so(page: Browser) -> None:
    page.run("delete window.DecompressionStream")
    pick(page, 0, 180)
    assert "cannot unpack the text" in page.text("#trace .notice") and "0.70" in page.text("#trace")


def test_a_minority_that_wins_by_weight_is_said_to(shared: Browser, story: Story, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with ev.LogWriter(log) as writer:
        for event in (
            story.header,
            *(ev.Created(0, trace) for trace in range(3)),
            *(ev.Admitted(1, trace, 0, 0, 0) for trace in range(3)),
            ev.Scored(60, (0, 1, 2), (0.9, 0.1, 0.1), (20, 20, 20)),
            *(ev.Finished(LAST_STEP, t, EndReason.STOP, "20" if t else "25", (1,) * 40) for t in range(3)),
            ev.Stopped(LAST_STEP, StopReason.COMPLETED),
        ):
            writer.write(event)
    write_page(log, tmp_path / "page.html")
    shared.open(tmp_path / "page.html")
    assert shared.text("#summary") == (
        "3 traces began. 1 of 3 complete ones say 25 (82 % of the weight). 2 say 20 (18 % of the weight): "
        "votes are weighed, not counted."
    )
    notice = "In doubt: the scorer overrules the majority: '25' has 1 trace and '20' 2, by weight 0.90 to 0.20."
    assert shared.text("#run .notice") == notice
    assert "3 roots + 0 branched: 3 completed; planned: at least 4" in shared.text("#run")


# -- islands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def islands(shared: Browser, crowd: Path) -> Iterator[Browser]:
    shared.resize(1280, 800)
    shared.prefer("light")
    shared.move(1270, 10)
    shared.open(crowd)
    yield shared
    assert shared.complaints == []


def said(page: Browser) -> str:
    """What a screen reader was told last."""
    return str(page.run("document.querySelector('#live').textContent"))


def row_of_group(page: Browser, island: int, rows: int = NUM_ISLANDS) -> tuple[float, float]:
    """The middle of a folded island while all are folded."""
    left, top, width, height = page.run(
        "(({ left, top, width, height }) => [left, top, width, height])"
        "(document.querySelector('#tree').getBoundingClientRect())"
    )
    row_height = min((height - EDGE) / rows, BAND_MAX)
    return left + width / 2, top + EDGE / 2 + (island + 0.5) * row_height


BAND_MAX = 30  # as in tree.js


def test_what_is_too_thin_to_see_is_folded_by_island_and_opens_at_a_click(islands: Browser) -> None:
    assert "height = running" in islands.text("#toolbar") and islands.run("document.querySelector('#fold').disabled")
    islands.move(*row_of_group(islands, 3))
    tip = islands.text("#tip").split()
    assert tip[:2] == ["Island", "3"] and "9 × 8" in islands.text("#tip") and "click to unfold" in islands.text("#tip")
    folded = picture(islands)
    islands.click(*row_of_group(islands, 3))
    assert said(islands) == "Island 3, unfolded, 8 traces, 8 completed, mostly 9"
    assert picture(islands) != folded and not islands.run("document.querySelector('#fold').disabled")
    islands.press("ArrowLeft")
    assert said(islands) == "Island 3, folded, 8 traces, 8 completed, mostly 9" and picture(islands) == folded


def test_keys_walk_over_folded_islands_and_into_them(islands: Browser) -> None:
    islands.run("document.querySelector('#tree').focus()")
    islands.press("ArrowDown")
    assert said(islands).startswith("Island 0, folded")
    islands.press("ArrowDown")
    assert said(islands).startswith("Island 1, folded")
    islands.press("Enter")
    assert said(islands).startswith("Island 1, unfolded")
    islands.press("ArrowDown")
    islands.wait_for("location.hash === '#trace-9'")
    islands.press("ArrowUp")
    islands.wait_for("location.hash === '#trace-8'")
    islands.press("ArrowLeft")  # a root has no parent: out of its island
    islands.wait_for("location.hash === ''")
    assert said(islands).startswith("Island 1, folded")
    islands.press("End")
    assert said(islands).startswith(f"Island {NUM_ISLANDS - 1}, folded")
    islands.press("u")
    assert said(islands) == "All traces" and islands.run("document.querySelector('#unfold').disabled")
    islands.press("f")
    assert said(islands) == f"Folded into {NUM_ISLANDS} rows"


def test_a_link_to_a_folded_trace_unfolds_its_island_alone(islands: Browser) -> None:
    folded = picture(islands)
    islands.run("location.hash = '#trace-25'")
    islands.wait_for("document.querySelector('#trace .own') !== null")
    assert "island" in islands.text("#trace") and f"3 of {NUM_ISLANDS}" in islands.text("#trace")
    assert picture(islands) != folded and not islands.run("document.querySelector('#unfold').disabled")


def test_the_vote_and_a_table_tell_islands(islands: Browser) -> None:
    assert islands.text("#run table thead").split() == ["answer", "weight", "traces", "roots", "islands"]
    cells = "[...document.querySelectorAll('tr[data-vote=\"1\"] td')].map((cell) => cell.textContent)"
    assert islands.run(cells) == ["9", "0.92", "8", "8", "1"]
    islands.run("document.querySelector('#islands').open = true")
    islands.wait_for(f"document.querySelectorAll('#islands tbody tr').length === {NUM_ISLANDS}")
    assert islands.text("#islands tbody tr:nth-child(4)").split() == ["3", "8", "8", "9", "×", "8"]
    islands.run("document.querySelector('#islands tbody tr:nth-child(4) button').click()")
    assert said(islands).startswith("Island 3, unfolded")


@pytest.mark.parametrize("width", [400, 1400])
def test_every_row_of_a_crowd_is_high_enough_to_see(islands: Browser, width: int) -> None:
    """Bands of one row do not run into those of the next: between two there is always paper."""
    islands.resize(width, 800)
    picture(islands)
    bands = islands.run("""(() => {
        const canvas = document.querySelector("#tree-base"), ink = canvas.getContext("2d");
        const column = ink.getImageData(Math.round(canvas.width / 2) + 3, 0, 1, canvas.height).data;
        let found = 0, isPaper = true;
        for (let y = 0; y < canvas.height; y++) {
            const alpha = column[4 * y + 3];
            found += isPaper && alpha > 200;
            isPaper = alpha < 60 || (isPaper && alpha <= 200);
        }
        return found;
    })()""")
    assert bands == NUM_ISLANDS


def test_few_traces_are_not_folded_and_one_island_has_no_bars(page: Browser) -> None:
    assert page.run("document.querySelector('#folding').hidden")
    assert page.run(
        "document.querySelector('#tree-base').getContext('2d').getImageData(0, 0, 5, 400).data.every((v) => v === 0)"
    )


def test_a_sentence_sums_the_search_up_and_ends_are_coloured(islands: Browser) -> None:
    assert (
        islands.text("#summary")
        == f"{NUM_ISLANDS * PER_ISLAND} traces began. 232 of 240 complete ones say 7 (99 % of the weight)."
    )
    islands.press("u")
    ends = islands.run("""(() => {
        const canvas = document.querySelector("#tree-base"), style = getComputedStyle(document.documentElement);
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const count = (name) => {
            const wanted = style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/g).map((hex) => parseInt(hex, 16));
            let found = 0;
            for (let i = 0; i < data.length; i += 4) {
                found += data[i + 3] === 255 && wanted.every((value, each) => data[i + each] === value);
            }
            return found;
        };
        return [count("--win") > 500, count("--lose") > 20];
    })()""")
    assert ends == [True, True]
