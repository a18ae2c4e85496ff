"""Every code block of the README and the docs runs; the few that cannot say why, and are counted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A fence may carry "no-run: reason" after its language: installs, hub names, CUDA.
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MOST_NOT_RUN = 7


def blocks(page, *languages):
    return [(lang, note.strip(), code) for lang, note, code in FENCE.findall(page.read_text()) if lang in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_from_top_to_bottom(page, tmp_path, monkeypatch):
    """The blocks of one page build on each other, as a reader takes them."""
    monkeypatch.chdir(tmp_path)
    runnable = [code for _, note, code in blocks(page, "python") if not note]
    if runnable:
        script = tmp_path / "page.py"
        script.write_text("\n".join(runnable))
        subprocess.run([sys.executable, "-W", "ignore", str(script)], check=True, cwd=tmp_path, timeout=300)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_blocks_run(page, tmp_path):
    runnable = [code for _, note, code in blocks(page, "bash", "sh") if not note]
    if runnable:
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
        }
        script = "set -e\n" + "\n".join(runnable)
        subprocess.run(["bash", "-c", script], check=True, cwd=tmp_path, timeout=600, env=environment)


def test_blocks_that_do_not_run_say_why_and_are_few():
    notes = [note for page in PAGES for _, note, _ in blocks(page, "python", "bash", "sh") if note]
    assert all(re.fullmatch(r"no-run: \w.*", note) for note in notes), notes
    assert len(notes) <= MOST_NOT_RUN


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
