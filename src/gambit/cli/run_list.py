"""`gambit runs`: the folders in runs/, what was searched there and what came out."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

from rich.table import Table
from rich.text import Text

from gambit.bench.folder import RUN_FILE, read_plan
from gambit.bench.rows import ROWS_FILE, read_rows
from gambit.cli.terminal import OK, put
from gambit.errors import GambitError, UserError, first_line
from gambit.events import RunStarted, read_log
from gambit.storage.problems import RUNS
from gambit.storage.run_folder import find_logs
from gambit.types import count_of

MOST_RUNS = 20


def runs() -> int:
    """List the newest runs in runs/, with their answers: when they began, how far they are and what was searched."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    folders = sorted((each for each in RUNS.glob("*") if each.is_dir()), reverse=True)[:MOST_RUNS]
    longest = max((len(str(each)) for each in folders), default=0)  # a name that is cut cannot be given to `view`
    table.add_column("run (UTC of its start)", no_wrap=True, min_width=longest)
    for name in ("how far", "result", "what"):
        table.add_column(name, no_wrap=True, ratio=1 if name == "what" else None)
    for folder in folders:
        try:
            columns = _bench(folder) if (folder / RUN_FILE).is_file() else _searches(folder)
        except (GambitError, OSError, ValueError, LookupError) as error:
            columns = "", "", first_line(error)
        table.add_row(str(folder), *map(Text, columns))
    if not table.row_count:
        raise UserError(f"no run is in {RUNS}/: `gambit demo` or `gambit solve` makes one")
    put(table)
    return OK


def _bench(folder: Path) -> tuple[str, str, str]:
    """Returns how many searches of a bench run are done, the accuracy of each method so far, and what they search."""
    plan, right = read_plan(folder), defaultdict[str, list[bool]](list)
    for row in read_rows(folder) if (folder / ROWS_FILE).is_file() else ():
        right[row.variant].append(row.correct)
    done = f"{sum(map(len, right.values())):,} of {plan.num_tasks:,}"
    shares = ", ".join(f"{method} {mean(found):.1%}" for method, found in right.items())
    return done, shares, f"bench {', '.join(each.name for each in plan.benchmarks)}"


def _searches(folder: Path) -> tuple[str, str, str]:
    """Returns how many searches have a result, the answers, and the methods with their question."""
    if (pairs := folder / "pairs.jsonl").is_file():
        return count_of(len(pairs.read_bytes().splitlines()), "problem"), "", "compare"
    logs = find_logs(folder)
    begun = [event for log in logs if isinstance(event := next(read_log(log), None), RunStarted)]
    found = [json.loads(path.read_text(encoding="utf-8"))["answer"] for path in sorted(folder.rglob("result.json"))]
    questions = {event.question for event in begun}
    if len(questions) > 1:
        num_answers = sum(answer is not None for answer in found)
        about, result = f"{len(questions)} problems", count_of(num_answers, "answer")
    else:
        about, result = "".join(questions), ", ".join(answer or "none" for answer in found)
    methods = ", ".join(dict.fromkeys(event.policy for event in begun))
    return f"{len(found):,} of {len(logs):,}", result, f"{methods}: {about}"
