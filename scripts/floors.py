"""The floors of the package, lowest first: what each holds and may import. Run it to renew the table in the docs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "code.md"
BEGIN, END = "<!-- floors: begin -->", "<!-- floors: end -->"


class Floor(NamedTuple):
    """Packages that may import each other's lower neighbours only: everything below, nothing beside or above."""

    name: str
    holds: str


FLOORS = (
    Floor("errors", "the errors that Gambit raises on purpose, and repeated stop signals as one"),
    Floor("stats", "intervals over problems, paired tests, AUC, log-odds"),
    Floor("types", "the records that cross borders"),
    Floor("events", "the event log"),
    Floor("tree", "the tree of traces, computed from events"),
    Floor("pawn", "the bundled model: its puzzles, its weights"),
    Floor("chains", "word problems of long chains of steps, made by a generator"),
    Floor("answers", "answers read from text, compared and graded"),
    Floor("text", "tokenizers, thought boundaries, prompts"),
    Floor("results", "votes, ledgers, and the fold of an event log into a result"),
    Floor("storage", "files: run folders, problems, locks, hashes, the cache folder"),
    Floor("config", "options, presets, and the registry of everything that has a name"),
    Floor("models", "the files beside a model's weights: preset, scorers, generation settings"),
    Floor("scorers", "scorers of hidden states and their checkpoints"),
    Floor("engines", "engines, which run a model: the protocol, the embedded engine, vLLM"),
    Floor("verifiers", "second models that read the text of thoughts and score it: transformers, vLLM, HTTP"),
    Floor("policies", "every search method, as a pure function"),
    Floor("search", "one search: the loop, its scores, its record"),
    Floor("solver", "one run wired together: model, engine, scorer, policy, vote, log"),
    Floor("async_solver", "the solver for asyncio"),
    Floor("cluster", "engines on many GPUs and machines, under Ray"),
    Floor("view", "the tree page of a run"),
    Floor("training", "from traces to an evaluated scorer"),
    Floor("bench", "methods compared on benchmarks, and their report"),
    Floor("export", "training data from event logs"),
    Floor("api", "the public names"),
    Floor("serve", "`gambit serve`: searches behind OpenAI's API, and a live page"),
    Floor("cli", "the `gambit` command"),
)
LEVEL = {floor.name: level for level, floor in enumerate(FLOORS)}


def table() -> str:
    """The floors as a Markdown table, the top one first, as one looks at a house."""
    rows = [f"| `{floor.name}` | {floor.holds} |" for floor in reversed(FLOORS)]
    return "\n".join(["| floor | what it holds |", "|---|---|", *rows])


def renewed(page: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(table() + "\n")
