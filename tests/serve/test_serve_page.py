"""The live page in a real browser: logging in, asking, watching a search grow and end, on small and dark screens."""

import time

import pytest

from gambit.config.options import SearchConfig
from gambit.serve.settings import EXAMPLE_PUZZLE
from support.browser import NAMES, Browser, find_browser
from support.serving import CHAIN, EASY, KEY, OTHER_KEY, serving

BROWSER = find_browser()
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed (looked for {', '.join(NAMES)})"),
]


@pytest.fixture(scope="module")
def served(pawn_solver):
    with serving(pawn_solver, SearchConfig(capacity=8, seed=0)) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert BROWSER is not None
    with Browser(BROWSER, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(served, browser):
    """For somebody who was never there, whatever the test before has left."""
    browser.open("about:blank")
    browser.send("Network.clearBrowserCookies")
    browser.resize(1280, 800)
    browser.prefer("light")
    browser.complaints.clear()
    browser.open(f"{served.url}/")
    yield browser
    assert [said for said in browser.complaints if served.url not in said] == []


def fill(page, selector, text):
    page.run(f"document.querySelector({selector!r}).value = {text!r}")


def log_in(page, key=KEY):
    fill(page, "#key", key)
    page.run("setTimeout(() => document.querySelector('form button').click())")  # the page goes: not while it is asked
    page.wait_for("document.querySelector('#ask') !== null")


def rows(page):
    return page.run("[...document.querySelectorAll('#searches .asked')].map((each) => each.innerText)")


NUM_TRACES = "Number(/\\d+/.exec(document.querySelector('#show')?.options[0]?.text ?? '0')[0])"  # that the tree shows


def test_a_search_that_is_asked_for_grows_and_ends(page, served, gate):
    log_in(page)
    gate.allow(20)  # before the first tournament
    fill(page, "#question", CHAIN)
    page.run("document.querySelector('#ask-button').click()")
    page.wait_for("document.querySelector('#state-line').innerText === 'running'")
    page.wait_for("document.querySelector('#run .answer')?.innerText === 'none yet'")
    page.wait_for(f"{NUM_TRACES} === 8")  # earlier snapshots have fewer
    page.wait_for("document.querySelector('#searches .asked')?.innerText.startsWith('a = 17; b = 61')")
    assert "The search is running" in page.text("#run") and page.run("!document.querySelector('#cancel').hidden")
    steps = "Number(/(\\d+) in all/.exec(document.querySelector('#run').innerText)?.[1] ?? 0)"
    gate.open()
    page.wait_for(f"{steps} > 8 || document.querySelector('#cancel').hidden")  # it has branched
    page.wait_for("document.querySelector('#cancel').hidden && document.querySelector('#run tr.first') !== null")
    [search] = served.desk.visible(served.server.config.app._settings.keys[0])
    answer = search.answer.result.answer
    assert page.text("#run .answer") == page.text("#answer-line b") == answer
    listed = "document.querySelector('#searches .state b')?.innerText"  # the list has its own stream
    page.wait_for(f"{listed} === {answer!r}")
    assert page.run(NUM_TRACES) == sum((search.answer.result.counts.roots, search.answer.result.counts.branched))
    page.run("document.querySelector('#tree').focus()")
    page.press("Enter")
    page.wait_for("document.querySelector('#trace .text')?.innerText.includes('17 + 61 = 78')")
    ink = "[...document.querySelector('#tree-base').getContext('2d').getImageData(0, 0, 600, 300).data].some(Boolean)"
    assert page.run(ink), "the tree is drawn"


def test_it_begins_with_an_example_and_follows_the_newest_search_until_one_is_chosen(page, served):
    log_in(page)
    assert page.run("document.querySelector('#question').value") == EXAMPLE_PUZZLE
    page.run("document.querySelector('#ask-button').click()")
    page.wait_for("document.querySelector('#run .answer')?.innerText === '47'")
    served.ask(EASY)
    page.wait_for("document.querySelector('#run .answer')?.innerText === '78'")
    page.run("document.querySelectorAll('#searches button')[1].click()")
    page.wait_for("document.querySelector('#run .answer')?.innerText === '47'")
    assert not page.run("document.querySelector('#follow').checked")
    served.ask(EASY)
    page.wait_for("document.querySelectorAll('#searches button').length >= 3")
    assert page.text("#run .answer") == "47"
    page.run("document.querySelector('#follow').click()")
    page.wait_for("document.querySelector('#run .answer')?.innerText === '78'")


def test_a_phone_shows_the_tree_above_the_list(page, served):
    page.resize(400, 800)
    log_in(page)
    served.ask(EASY)
    page.wait_for("document.querySelector('#run .answer') !== null")
    tops = [
        page.run(f"document.querySelector('{each}').getBoundingClientRect().top") for each in ("#ask", "#tree", "#list")
    ]
    assert tops == sorted(tops) and tops[1] < 400


def test_another_search_and_a_refused_question(page, served):
    log_in(page)
    served.ask(EASY)
    page.wait_for("document.querySelector('#searches .asked')?.innerText.endsWith('c?')")
    page.run("document.querySelector('#searches button').click()")
    page.wait_for("document.querySelector('#run .answer')?.innerText === '78'")
    fill(page, "#question", "What is love?")
    page.run("document.querySelector('#ask-button').click()")
    page.wait_for("!document.querySelector('#ask-problem').hidden")
    assert "not a register puzzle" in page.text("#ask-problem")
    page.complaints.clear()  # the browser itself reports the 400


def test_a_running_search_can_be_ended_from_the_page(page, served, gate):
    log_in(page, OTHER_KEY)
    assert rows(page) == []
    gate.allow(30)
    stream = served.ask(key=OTHER_KEY, stream=True, extra_body={"gambit": {"policy": "sc", "num_traces": 10_000}})
    page.wait_for("document.querySelector('#state-line').innerText === 'running'")
    gate.open()
    page.run("document.querySelector('#cancel').click()")
    assert list(stream)[-1].gambit["stop_reason"] == "interrupted"
    page.wait_for("document.querySelector('#run').innerText.includes('interrupted')")


@pytest.mark.parametrize(("width", "height"), [(360, 740), (768, 1024), (1920, 1080)])
def test_it_fits_every_screen(page, served, width, height):
    served.ask(CHAIN)
    page.resize(width, height)
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "the form to log in"
    log_in(page)
    page.wait_for("document.querySelector('#run .answer') !== null")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    boxes = page.run(
        "['#tree', '#charts', '#run', '#ask'].map((s) => document.querySelector(s).getBoundingClientRect().width)"
    )
    assert min(boxes) > 200
    page.prefer("dark")
    dark = "getComputedStyle(document.body).backgroundColor"
    assert page.run(dark) != "rgb(255, 255, 255)"


def comes_to_stream(served, wanted):
    """Whether the server soon streams to a page, or to none; pages that were left held on for about a minute."""
    deadline = time.monotonic() + 30
    while (streams := served.on_loop(lambda: len(served.server.server_state.tasks)) > 0) is not wanted:
        if time.monotonic() > deadline:
            return False
    return streams is wanted


def test_a_page_that_was_left_holds_no_connection(page, served):
    """A browser has six for one server, and keeps pages for its back button."""
    log_in(page)
    assert comes_to_stream(served, True)
    page.open("about:blank")
    assert comes_to_stream(served, False)
    page.run("setTimeout(() => history.back())")
    assert comes_to_stream(served, True), "who comes back sees what goes on"
