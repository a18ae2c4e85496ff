"""The race of two searches: docs/race.svg is what its two logs make, and the command refuses what it cannot draw."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scripts.race import ANSWER, LLM_ANSWER, LLM_LOGS, LOGS, QUESTION
from typer.testing import CliRunner

from gambit import events as ev
from gambit.cli.app import app
from gambit.pawn.puzzles import parse_puzzle
from gambit.view.race import HELD
from support import ROOT
from support.browser import Browser, Story, find_browser

SVG, LLM_SVG = ROOT / "docs" / "race.svg", ROOT / "docs" / "race-llm.svg"


def view(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["view", *map(str, args)])
    return done.exit_code, " ".join(done.output.split())


def title_of(svg: Path) -> str:
    return ElementTree.parse(svg).find("{http://www.w3.org/2000/svg}title").text


def test_the_pictures_are_made_from_their_logs(tmp_path):
    """If they are not: python scripts/race.py."""
    for shown, logs, answer in ((SVG, LOGS, ANSWER), (LLM_SVG, LLM_LOGS, LLM_ANSWER)):
        made = tmp_path / shown.name
        assert view(*logs, "--animate", made, "--expected", answer) == (0, str(made))
        assert made.read_bytes() == shown.read_bytes()
        assert shown.stat().st_size < 300_000
    assert (ROOT / "docs" / "race.gif").stat().st_size < 1_500_000


def test_the_race_is_that_of_its_puzzle():
    for log in LOGS:
        started = next(ev.read_log(log))
        assert started.question == QUESTION and started.seed == 0
        assert str(ROOT) not in gzip.decompress(log.read_bytes()).decode()
    assert str(parse_puzzle(QUESTION).answer) == ANSWER
    assert re.findall(r"(\d+) ([✗✓]), (\d+) of 64", title_of(SVG)) == [("29", "✗", "4"), ("23", "✓", "34")]


def test_the_race_of_the_llm_is_a_problem_of_the_planned_comparison():
    lines = (ROOT / "benchmarks" / "results" / "long_chains" / "rows.jsonl").read_text().splitlines()
    for log in LLM_LOGS:
        started = next(ev.read_log(log))
        row = next(
            row
            for row in map(json.loads, lines)
            if (row["problem"], row["variant"]) == (started.problem_id, started.policy)
        )
        assert (row["gold"], row["correct"]) == (LLM_ANSWER, started.policy == "gambit")
        assert "/tmp" not in gzip.decompress(log.read_bytes()).decode()
    assert re.findall(r"(\d+) ([✗✓]), (\d+) of 64", title_of(LLM_SVG)) == [("448", "✗", "12"), ("408", "✓", "26")]


def test_the_counters_end_where_the_logs_do():
    totals = [[event for event in ev.read_log(log) if isinstance(event, ev.Sample)][-1].generated for log in LOGS]
    assert [f"{total:,} tokens · 64 done" in SVG.read_text() for total in totals] == [True, True]


@pytest.mark.system
def test_it_begins_with_the_end_and_then_plays(tmp_path):
    if (browser := find_browser()) is None:
        pytest.skip("needs Chromium or Chrome")
    shown = "[...document.querySelectorAll('.answer')].map((each) => +getComputedStyle(each.parentNode).opacity)"
    with Browser(browser, tmp_path / "profile", (400, 301)) as tab:
        tab.open(SVG)
        for seconds, wanted in ((0, [1, 1]), (HELD - 0.1, [1, 1]), (HELD + 5, [0, 0]), (HELD + 10.5, [1, 1])):
            tab.run(
                f"document.getAnimations().forEach((each) => {{each.pause(); each.currentTime = {1000 * seconds}}})"
            )
            assert tab.run(shown) == wanted, seconds


def test_the_picture_says_what_its_colours_and_counts_mean():
    counts = [sum(isinstance(event, ev.Pruned) for event in ev.read_log(log)) for log in LLM_LOGS]
    text = LLM_SVG.read_text()
    assert counts[0] == 0 and "every trace runs to its end" in text
    assert f"{counts[1]} pruned, each replaced by" in text and text.count("64 places") == 2
    assert all(words in text for words in ("ended right", "ended wrong", "× pruned", "2,048 steps", "squares: places"))


def test_without_the_right_answer_the_search_is_not_marked(tmp_path):
    made = tmp_path / "race.svg"
    assert view(*LOGS, "--animate", made)[0] == 0
    assert "✗" not in title_of(made) and "agree" in title_of(made)


def test_what_cannot_be_animated_is_refused(tmp_path):
    story = Story(tmp_path).write()
    out = tmp_path / "race.svg"
    for args, words in (
        ((LOGS[0], "--animate", out), "give RUN and OTHER"),
        ((LOGS[0], LOGS[1]), "add --animate"),
        ((LOGS[0], story, "--animate", out), "different problems"),
        ((LOGS[0], LOGS[1], "--animate", story), "is no .svg file"),
    ):
        code, said = view(*args)
        assert (code, words in said) == (2, True), said
    assert not out.exists()


def test_an_unfinished_search_is_refused(tmp_path):
    story = Story(tmp_path)
    story.write(len(story.events) - 2)
    code, said = view(LOGS[0], story.log, "--animate", tmp_path / "race.svg")
    assert code == 2 and "ends before its search did" in said


def test_hostile_words_stay_words_and_long_answers_are_cut(tmp_path):
    story = Story(tmp_path)
    story.events = [
        ev.Voted("</text><script>" * 3, 0.2, ()) if isinstance(event, ev.Voted) else event for event in story.events
    ]
    story.write()
    made = tmp_path / "race.svg"
    code, said = view(story.log, story.log, "--animate", made)
    assert code == 0, said
    assert "<script" not in made.read_text() and len(list(ElementTree.parse(made).iter())) > 10


@pytest.mark.parametrize("command", ["view", "replay", "report"])
def test_without_a_run_there_must_be_one(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command])
    assert done.exit_code == 2 and "no folder in runs/" in (said := " ".join(done.output.split()))
    assert ("`gambit bench` makes one" if command == "report" else "`gambit solve` makes one") in said


def test_the_newest_run_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, log in (("20260101T000000Z-aaaa", LOGS[0]), ("20260102T000000Z-aaaa", LOGS[1])):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "events.jsonl.gz").write_bytes(log.read_bytes())
    (tmp_path / "runs" / "20260103T000000Z-aaaa").mkdir()  # of a bench that has not begun
    assert view() == (0, "runs/20260102T000000Z-aaaa/tree.html")
    done = CliRunner().invoke(app, ["replay", "--json"])
    assert '"answer": "23"' in done.stdout
