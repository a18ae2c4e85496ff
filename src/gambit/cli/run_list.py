"""`gambit runs`: the folders in runs/, what was searched there and what came out."""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from statistics import mean
from textwrap import shorten

from rich.table import Table
from rich.text import Text

from gambit.bench.folder import RUN_FILE, read_plan
from gambit.bench.rows import ROWS_FILE, read_rows
from gambit.cli.terminal import OK, put
from gambit.errors import GambitError, UserError, first_line
from gambit.events import RunStarted, read_log
from gambit.storage.problems import RUNS
from gambit.storage.run_folder import find_logs

MOST_RUNS, MOST_CHARACTERS = 20, 40  # of a question


def runs() -> int:
    """List the newest runs in runs/: when, what, how far, and the result."""
    table = Table("run", "changed", "what", "how far", "result", box=None, pad_edge=False, header_style="dim")
    table.columns[0].no_wrap = True
    for folder in sorted((each for each in RUNS.glob("*") if each.is_dir()), reverse=True)[:MOST_RUNS]:
        try:
            columns = _bench(folder) if (folder / RUN_FILE).is_file() else _searches(folder)
        except (GambitError, OSError, ValueError, LookupError) as error:
            columns = "not a search", "", first_line(error)
        changed = datetime.fromtimestamp(folder.stat().st_mtime)
        table.add_row(str(folder), f"{changed:%Y-%m-%d %H:%M}", *map(Text, columns))
    if not table.row_count:
        raise UserError(f"no run is in {RUNS}/: `gambit demo` or `gambit solve` makes one")
    put(table)
    return OK


def _bench(folder: Path) -> tuple[str, str, str]:
    """Returns what a bench run compares, how many searches are done, and the accuracy of each method so far."""
    plan, right = read_plan(folder), defaultdict[str, list[bool]](list)
    for row in read_rows(folder) if (folder / ROWS_FILE).is_file() else ():
        right[row.variant].append(row.correct)
    done = f"{sum(map(len, right.values())):,} of {plan.num_tasks:,}"
    shares = ", ".join(f"{method} {mean(found):.1%}" for method, found in right.items())
    return f"bench {', '.join(each.name for each in plan.benchmarks)}", done, shares


def _searches(folder: Path) -> tuple[str, str, str]:
    """Returns the methods and the question of searches, how many have a result, and the answers."""
    if (pairs := folder / "pairs.jsonl").is_file():
        return "compare", f"{len(pairs.read_bytes().splitlines())} problems", ""
    logs = find_logs(folder)
    begun = [event for log in logs if isinstance(event := next(read_log(log), None), RunStarted)]
    found = [json.loads(path.read_text(encoding="utf-8"))["answer"] for path in sorted(folder.rglob("result.json"))]
    questions = {event.question for event in begun}
    if len(questions) > 1:
        about, result = f"{len(questions)} problems", f"{sum(answer is not None for answer in found)} answers"
    else:
        about, result = "".join(questions), ", ".join(answer or "none" for answer in found)
    methods = ", ".join(dict.fromkeys(event.policy for event in begun))
    return f"{methods}: {shorten(about, MOST_CHARACTERS, placeholder=' …')}", f"{len(found):,} of {len(logs):,}", result
