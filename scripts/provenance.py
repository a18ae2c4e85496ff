"""Makes the page that says which code made which result, from a JSON file beside each result. Run it to renew the page.

`NAME.json` has `NAME.made.json` beside it, a folder has `made.json` in it: the commit of the code, the script or recipe
(`by`), and what has changed in that code since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "results" / "provenance.md"
BEGIN, END = "<!-- provenance: begin -->", "<!-- provenance: end -->"


class Made(NamedTuple):
    """Where a result comes from."""

    commit: str
    by: str
    since: list[str]


def results() -> Iterator[Path]:
    """Yields the result files and folders, by name."""
    yield from (path for path in sorted(RESULTS.iterdir()) if not path.name.endswith(".made.json"))


def beside(result: Path) -> Path:
    """Returns where the result's provenance lies."""
    return result / "made.json" if result.is_dir() else result.with_suffix(".made.json")


def made(result: Path) -> Made:
    return Made(**json.loads(beside(result).read_text(encoding="utf-8")))


def row(result: Path) -> str:
    found = made(result)
    page = min(result.rglob("report.md")) if result.is_dir() else result
    link = f"[`{result.name}`](../../{page.relative_to(ROOT)})"
    return f"| {link} | `{found.by}` | {found.commit} | {' '.join(found.since)} |"


def renewed(page: str) -> str:
    """Returns the page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| result | made by | commit | what has changed since |", "|---|---|---|---|", *map(row, results())]
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
