"""`gambit demo`, and the greeting of `gambit serve`."""

from __future__ import annotations

import json
import shlex

import pytest
from typer.testing import CliRunner

from gambit.cli.app import app
from gambit.cli.demo import unseen_problem
from gambit.cli.results import share_bar
from gambit.cli.serve_work import greeting_of
from gambit.pawn.puzzles import Split, parse_puzzle
from gambit.serve.settings import EXAMPLE_PUZZLE, ApiKey, ServeSettings


@pytest.mark.system
def test_the_demo_shows_a_puzzle_that_voting_gets_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["demo", "--out", "demo"])
    assert done.exit_code == 0, done.output
    lines = [line.split("  ") for line in done.stdout.splitlines()]
    rows = {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert rows["answer"] == ["29, wrong", "23, right"] and rows["right traces"] == ["4 of 64", "34 of 64"]
    for command in [line.partition("gambit view ")[2] for line in done.stdout.splitlines() if "gambit view " in line]:
        args = [each for each in shlex.split(command) if each != "--open"]
        assert CliRunner().invoke(app, ["view", *args]).exit_code == 0
    assert (tmp_path / "race.svg").is_file() and (tmp_path / "demo" / "gambit" / "tree.html").is_file()


def test_the_demos_own_puzzle_is_unseen_too():
    problem, answer = unseen_problem(None)
    puzzle = parse_puzzle(problem.question)
    assert puzzle.split is Split.TEST and str(puzzle.answer) == answer == "23"


def test_a_random_puzzle_has_no_number():
    done = CliRunner().invoke(app, ["demo", "--random", "--seed", "3"])
    assert done.exit_code == 2 and "leave one out" in done.output


def test_a_server_greets_with_its_page_and_a_line_to_try(monkeypatch):
    monkeypatch.delenv("GAMBIT_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    plain = greeting_of(ServeSettings(served_names=("pawn",)), "http://127.0.0.1:8000")
    assert plain.splitlines()[:2] == [
        "pawn at http://127.0.0.1:8000/v1",
        "page: http://127.0.0.1:8000/ shows searches live",
    ]
    [_, curl] = plain.splitlines()[1:]
    *_, address, option, body = shlex.split(curl)
    assert (address, option) == ("http://127.0.0.1:8000/v1/chat/completions", "-d")
    assert json.loads(body) == {"model": "pawn", "messages": [{"role": "user", "content": EXAMPLE_PUZZLE}]}
    locked = greeting_of(ServeSettings(served_names=("other",), keys=(ApiKey(name="one", key="sk"),)), "https://h:1")
    assert 'Bearer KEY"' in locked and "sk" not in locked.replace("asks", "") and EXAMPLE_PUZZLE not in locked
    monkeypatch.setenv("GAMBIT_API_KEY", "sk")
    locked = greeting_of(ServeSettings(served_names=("other",), keys=(ApiKey(name="one", key="sk"),)), "https://h:1")
    assert "Bearer $GAMBIT_API_KEY" in locked


def test_a_share_is_a_number_and_a_bar():
    assert [share_bar(share) for share in (0.0, 0.5, 1.0)] == ["  0% ", " 50% " + "█" * 8, "100% " + "█" * 16]
