"""Command lines whose output is kept: of help the panels and options, of the rest everything but times and places.

After a change that is meant: python -m pytest tests/cli/test_transcripts.py --renew
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support import GOLDEN

FOLDER = GOLDEN / "cli"
PUZZLE = "a = 17; b = 61; c = a + b; d = c - a; d?"
SEARCH = ("--engine", "local", "--seed", "1", "--capacity", "8")
HELP = ("", "solve", "demo", "serve", "policies", "runs", "view", "replay", "export", "bench", "report", "merge",
        "prefix-value", "doctor", "scorer", "scorer collect", "scorer merge", "scorer train", "scorer eval",
        "scorer import", "scorer export", "scorer show")  # fmt: skip
# In this order, in one folder: the later ones read what the earlier ones wrote.
RUNS: dict[str, tuple[str, ...]] = {
    "solve": ("solve", PUZZLE, *SEARCH, "--out", "one"),
    "solve_json": ("solve", PUZZLE, *SEARCH, "--policy", "sc", "--out", "plain", "--json"),
    "solve_quiet": ("solve", PUZZLE, *SEARCH, "--out", "quiet", "--quiet"),
    "solve_file": ("solve", "--file", "problems.jsonl", *SEARCH, "--islands", "2", "--out", "file", "--json"),
    "solve_no_puzzle": ("solve", "what is love?"),
    "solve_islands": ("solve", "--file", "problems.jsonl", *SEARCH, "--islands", "4", "--kv-budget-tokens", "400",
                      "--ghost-parents", "--budget-traces", "6", "--out", "islands"),
    "solve_rounds": ("solve", PUZZLE, *SEARCH, "--first-traces", "3", "--consensus-stop", "0.9", "--out", "rounds"),
    "solve_budget": ("solve", PUZZLE, *SEARCH, "--budget-tokens", "20", "--out", "short"),
    "solve_twice": ("solve", PUZZLE, *SEARCH, "--out", "one"),
    "solve_unknown_policy": ("solve", PUZZLE, "--policy", "gambti"),
    "solve_unknown_option": ("solve", PUZZLE, "--capcity", "8"),
    "solve_bad_number": ("solve", PUZZLE, "--capacity", "0"),
    "replay": ("replay", "one"),
    "replay_json": ("replay", "plain", "--json"),
    "replay_verify": ("replay", "file", "--verify"),
    "replay_nothing": ("replay", "nowhere"),
    "view": ("view", "one", "--out", "tree.html"),
    "policies_json": ("policies", "--json"),
    "bench_dry_run": ("bench", "--benchmark", "pawn", "--limit", "3", "--policies", "gambit,sc", "--dry-run",
                      "--engine", "local", "--out", "bench"),
    "bench_benchmarks": ("bench", "--list-benchmarks"),
    "scorer_show": ("scorer", "show", "confidence"),
    "scorer_show_model": ("scorer", "show", "pawn"),
}  # fmt: skip
TIMES = re.compile(
    r'(?<="seconds": ){.*?}|(?<=seconds": )[\d.e-]+|(?<=seconds ) *[\d.]+, of .*\b|(?<=tokens, )[\d.]+(?= s, )'
)
REWORDED = re.compile(r'("about": |"description": )"(?:[^"\\]|\\.)*"')
LONG_FLOAT = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")


def names() -> list[str]:
    return [*(f"help_{'_'.join(command.split())}".rstrip("_") for command in HELP), *RUNS]


def transcripts() -> Iterator[tuple[str, str]]:
    """Runs every command line, in an empty folder."""
    for name, command in zip(names(), HELP, strict=False):
        yield name, _help_of(command.split())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("problems.jsonl").write_text(
            '{"question": "a = 2; b = 3; c = a * b; c?", "answer": "6"}\n{"question": "x = 4; y = 9; z = x + y; z?"}\n'
        )
        for name, args in RUNS.items():
            code, out, err = _invoke(args)
            yield name, f"$ gambit {' '.join(args)}\nexit code {code}\n-- stdout\n{out}-- stderr\n{err}"


def _invoke(args: tuple[str, ...]) -> tuple[int, str, str]:
    from gambit.cli.app import app

    done = CliRunner(env={"COLUMNS": "110"}).invoke(app, list(args), prog_name="gambit")
    return done.exit_code, _normalised(done.stdout), _normalised(done.stderr)


def _normalised(text: str) -> str:
    text = REWORDED.sub(r'\1"…"', TIMES.sub("…", text))
    text = LONG_FLOAT.sub(lambda found: f"{float(found[0]):.2f}", text)
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def _help_of(command: list[str]) -> str:
    """Returns panels with names and values of options, and commands; descriptions may be reworded freely."""
    from gambit.cli.app import app

    runner = CliRunner(env={"COLUMNS": "500"})
    done = runner.invoke(app, [*command, "--help-all"], prog_name="gambit")
    done = done if done.exit_code == 0 else runner.invoke(app, [*command, "--help"], prog_name="gambit")
    assert done.exit_code == 0, done.output
    return "".join(f"{line}\n" for line in map(_without_description, done.stdout.splitlines()) if line)


def _without_description(line: str) -> str:
    if line.startswith("╭"):
        return line.strip("╭╮─ ")
    if not line.startswith("│"):
        return line.strip() if line.strip().startswith("Usage:") else ""
    return "  " + " ".join(re.split(r"  +", line.strip("│ *"))[:-1])


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for name, text in transcripts():
        (FOLDER / f"{name}.txt").write_text(text)


def test_command_lines_print_what_they_printed(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("renew"):
        write()
    kept = {path.stem: path.read_text() for path in FOLDER.glob("*.txt")}
    assert sorted(kept) == sorted(names())
    for name, text in transcripts():
        changes = unified_diff(kept[name].splitlines(), text.splitlines(), "kept", name, lineterm="")
        kept[name] = "\n".join(changes)
    changed = "\n".join(filter(None, kept.values()))
    assert not changed, changed
