"""Readies the repository for a release, and refuses a tag for which it is not.

    python scripts/release.py prepare        # pages name the package index, the changelog gets the version's heading
    python scripts/release.py check v1.0.0   # what the workflow of a release runs first

Until a release is prepared no page claims that there is one: extras are installed from a clone.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "gambit-search"
NO_RELEASE = re.compile(r" No\s+release\s+is\s+on\s+a\s+package\s+index\s+yet(?:\.|,\s+so\s+)")
# What pages say before a release, and after it.
WORDS = (
    (re.compile(r"pip install \."), f"pip install {PACKAGE}"),
    (re.compile(r"pip install (?:-e )?'\.\["), f"pip install '{PACKAGE}["),
    (re.compile(r"Elsewhere, from a clone: "), "Elsewhere: "),
    (re.compile(r", from a clone: (?=`pip)"), ": "),
    (re.compile(r"(?<=install extras) from the clone: "), " by name: "),
)
UNRELEASED = "## Unreleased\n"


def version(root: Path) -> str:
    """Returns the version of pyproject.toml."""
    found: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return found


def pages(root: Path) -> Iterator[Path]:
    yield root / "README.md"
    yield from sorted((root / "docs").glob("**/*.md"))
    yield root / "examples" / "02_vllm.py"


def after_release(text: str) -> str:
    """Returns a page's text with installations from the package index."""
    text = NO_RELEASE.sub(lambda found: "" if found[0].endswith(".") else " To use more, ", text)
    for before, after in WORDS:
        text = before.sub(after, text)
    return text


def prepare(root: Path) -> None:
    """Rewrites pages, changelog and citation for the version of pyproject.toml."""
    for page in pages(root):
        page.write_text(after_release(page.read_text(encoding="utf-8")), encoding="utf-8")
    log, number = root / "CHANGELOG.md", version(root)
    heading = f"{UNRELEASED}\n## {number}, {datetime.now(UTC):%Y-%m-%d}\n"
    log.write_text(log.read_text(encoding="utf-8").replace(UNRELEASED, heading, 1), encoding="utf-8")
    citation = root / "CITATION.cff"
    text = citation.read_text(encoding="utf-8")
    citation.write_text(re.sub(r"(?m)^version: .*$", f"version: {number}", text), encoding="utf-8")


def findings(root: Path, tag: str) -> list[str]:
    """Returns what speaks against the release of a tag, each as a sentence."""
    number = version(root)
    found = [] if tag == f"v{number}" else [f"the tag {tag} is not v{number}, the version of pyproject.toml"]
    if f"\n## {number}," not in (root / "CHANGELOG.md").read_text(encoding="utf-8"):
        found.append(f"CHANGELOG.md has no heading for {number}: run `python scripts/release.py prepare`")
    from_clone = [page for page in pages(root) if after_release(text := page.read_text(encoding="utf-8")) != text]
    wish = "installs from a clone: run `python scripts/release.py prepare`"
    found += [f"{page.relative_to(root)} {wish}" for page in from_clone]
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["prepare"]:
        prepare(ROOT)
    elif sys.argv[1:2] == ["check"] and len(sys.argv) == 3:
        sys.exit("\n".join(findings(ROOT, sys.argv[2])) or None)
    else:
        sys.exit(__doc__)
