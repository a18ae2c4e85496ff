"""Output that pages show after a command or a script. Run it to renew what README and docs show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# A ```bash or ```python block that is followed by a ```text block: what it prints.
SHOWN = re.compile(r"^```(bash|python)\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Shown(NamedTuple):
    """A block of a page and the output that the page shows for it."""

    language: str
    code: str
    output: str


def shown(page: str) -> Iterator[Shown]:
    return (Shown(*parts) for parts in SHOWN.findall(page))


def printed(block: Shown, folder: Path) -> str:
    """Returns the block's real output, from an empty folder."""
    start = ["bash", "-ec"] if block.language == "bash" else [sys.executable, "-W", "ignore", "-c"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([*start, block.code], capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    if run.returncode:
        raise RuntimeError(f"{block.code}\n{run.stderr}")
    return "\n".join(line.rstrip() for line in run.stdout.strip("\n").splitlines()) + "\n"


def renewed(page: str) -> str:
    for block in shown(page):
        with tempfile.TemporaryDirectory() as folder:
            page = page.replace(f"```text\n{block.output}```", f"```text\n{printed(block, Path(folder))}```")
    return page


if __name__ == "__main__":
    for page in (ROOT / "README.md", ROOT / "docs" / "getting-started.md"):
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
