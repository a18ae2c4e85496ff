"""Packs the event logs of test problems on which plain sampling voted wrong and Gambit right, for an animation.

    python -m benchmarks.long_chains.races SCRATCH OUT.tar.xz [NAME]

SCRATCH holds the folders `NAME-1`, `NAME-2` … of `gambit bench`; NAME is `search` unless given.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

MOST = 8


def won(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    """Returns by problem the rows of both methods, where Gambit alone is right."""
    rows: dict[str, dict[str, dict[str, object]]] = {}
    for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows.setdefault(row["problem"], {})[row["variant"]] = row
    both = {name: own for name, own in rows.items() if {"sc", "gambit"} <= own.keys()}
    return {name: own for name, own in both.items() if own["gambit"]["correct"] and not own["sc"]["correct"]}


def main() -> None:
    scratch, out, name = Path(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3:] or ["search"])[0]
    taken = [(folder, own) for folder in sorted(scratch.glob(f"{name}-[0-9]")) for own in won(folder).values()]
    taken.sort(key=lambda pair: int(str(pair[1]["gambit"]["generated"])))
    with tarfile.open(out, "w:xz") as archive:
        for folder, own in taken[:MOST]:
            for row in own.values():
                log = folder / str(row["log"])
                archive.add(log.parent, f"{folder.name}/{log.parent.relative_to(folder)}")
    print(f"{len(taken)} problems won, {min(MOST, len(taken))} packed")


if __name__ == "__main__":
    main()
