"""Pages as axe-core judges them: no serious fault, in both colour schemes, on a desk and on a phone."""

import functools
import http.server
import json
import os
import threading
from pathlib import Path

import pytest

from gambit.config.options import SearchConfig
from gambit.view import write_page
from support import GOLDEN, ROOT
from support.browser import Browser, find_browser
from support.serving import EASY, serving

AXE = Path(os.environ.get("AXE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
SITE = Path(os.environ.get("SITE", ROOT / "site"))
BROWSER = find_browser()
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(BROWSER is None, reason="no browser is installed"),
    pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not here: npm install axe-core, or AXE=…/axe.min.js"),
]
RUN = """axe.run(document, {resultTypes: ["violations"]}).then((found) => JSON.stringify(found.violations
  .filter((each) => ["serious", "critical"].includes(each.impact))
  .map((each) => [each.id, each.nodes.map((node) => node.target.join(" "))])))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(BROWSER, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def faults(browser, address, ready="true"):
    """The serious faults of a page, each once."""
    found = {}
    for size in ((1400, 900), (400, 800)):
        for scheme in ("light", "dark"):
            browser.resize(*size)
            browser.prefer(scheme)
            browser.open(address)
            browser.wait_for(ready)
            browser.send("Page.setBypassCSP", enabled=True)
            browser.run(f"{AXE.read_text()}; 0")
            found |= {name: (size, scheme, nodes) for name, nodes in json.loads(str(browser.run(RUN)))}
    return found


def test_a_fault_is_found(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<html lang="en"><title>x</title><p style="color:#bbb;background:#fff">pale</p><button></button>')
    assert set(faults(browser, page)) == {"color-contrast", "button-name"}


def test_the_tree_page(browser, tmp_path):
    write_page(GOLDEN / "runs" / "gambit" / "events.jsonl", tmp_path / "tree.html")
    assert faults(browser, tmp_path / "tree.html") == {}


@pytest.mark.parametrize("page", ["07_report.html"])
def test_a_report(browser, page):
    assert faults(browser, ROOT / "examples" / page) == {}


def test_the_live_page(browser, pawn_solver):
    with serving(pawn_solver, SearchConfig(capacity=8, seed=0), keys=()) as served:
        assert faults(browser, f"{served.url}/") == {}
        served.ask(EASY)
        assert faults(browser, f"{served.url}/", "document.querySelector('#run .answer') !== null") == {}


@pytest.fixture(scope="module")
def site():
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="the site is not built: make docs, or SITE=FOLDER")
@pytest.mark.parametrize("page", ["", "getting-started/", "results/", "serve/", "policies/", "api/"])
def test_the_docs_site(browser, site, page):
    assert faults(browser, f"{site}/{page}") == {}
