"""`gambit compare`: equal tokens, an interval, and advice that calls nothing better on a handful of problems."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from gambit import events as ev
from gambit.bench.datasets import Item, digest
from gambit.cli.app import app
from gambit.cli.compare_work import (
    Pair,
    PairFile,
    advice,
    differences_of,
    fitting_problems,
    power,
    searched,
    vote_within,
)
from gambit.cli.demo import unseen_problem
from gambit.cli.forecast import CompareForecast
from gambit.config.effort import Effort
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.results.result import Counts, SearchResult, Seconds, Tokens, TraceOutline
from gambit.results.vote import VoteKind
from gambit.solver import Solver
from gambit.solver.builder import LengthHistory, request_of
from gambit.tree import TraceState
from gambit.types import StopReason
from support.scripted import FunctionVerifier, is_sound


def pair(number, sc, scored, gambit):
    return Pair(f"p{number}", "hash", sc, scored, gambit, 100, 100, 10.0)


def pairs(num_both, num_gambit, num_sc, num_scored=0, num_searched=0):
    """Counts of problems: all right, Gambit alone, counted votes alone, votes by score alone, not counted votes."""
    kinds = [(True, True, True)] * num_both + [(False, False, True)] * num_gambit + [(True, False, False)] * num_sc
    kinds += [(False, True, False)] * num_scored + [(False, True, True)] * num_searched
    return [pair(number, *kind) for number, kind in enumerate(kinds)]


def trace(tokens, answer, state=TraceState.FINISHED, score=None):
    return TraceOutline(None, state, 0, tokens, tokens, score, answer)


def result(*traces):
    return SearchResult("p", "2", (), 0.0, 0, "sc", 0, Counts(), Tokens(400), Seconds(), StopReason.COMPLETED,
                        traces=traces)  # fmt: skip


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (pairs(0, 19, 0), "19 problems are too few to choose by: 20 are the least, 1 more take about 10 s."),
        (pairs(1, 0, 0), "1 problem is too few to choose by"),
        (pairs(0, 0, 0), "No problem was finished"),
        (pairs(10, 10, 0), "Gambit is better than both votes on these problems at equal tokens: use it."),
        (pairs(10, 0, 0, 0, 10), "Voting by score is better than counting votes and at least as good as the search "
         "here: use --policy sc --vote score."),
        (pairs(10, 0, 0, 10), "Voting by score is better than counting votes and at least as good"),
        (pairs(12, 0, 4, 8), "Voting by score is better than the search on these problems"),
        (pairs(20, 6, 0, 0, 6), "Gambit is better than counting votes at equal tokens: use it, though"),
        (pairs(10, 0, 10), "Voting is better on these problems at equal tokens: use --policy sc."),
        (pairs(18, 1, 1), "No difference is shown"),
        (pairs(20, 4, 0), "No difference is shown"),  # p = 0.125, though 0 is outside of the interval
        (pairs(20, 6, 0), "No difference is shown"),  # p = 0.03, corrected for three tests 0.09
        (pairs(20, 7, 0), "Gambit is better"),
        (pairs(20, 0, 0), "No difference is shown"),
    ],
)  # fmt: skip
def test_advice_is_one_sentence_and_needs_twenty_problems(found, words):
    said = advice(found)
    assert said.startswith(words) and (len(found) >= 20 or "better" not in said)


def test_advice_for_rounds_names_voting_in_rounds():
    assert "--policy sc --effort medium will do" in advice(pairs(20, 0, 0), effort=Effort.MEDIUM)


def test_differences_are_paired_and_name_both_methods():
    found = {(each.first, each.second): each.gain.value for each in differences_of(pairs(10, 4, 1, 5))}
    assert found == {("gambit", "sc"): 0.15, ("scored", "sc"): 0.2, ("gambit", "scored"): -0.05}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (pairs(20, 0, 0), "differ on 0 of 20 problems: so many show differences of about 35 points or more"),
        (pairs(300, 100, 80), "differ on 180 of 480 problems: so many show differences of about 7 points or more, and "
         "5 points take about 1,600 problems"),
    ],
)  # fmt: skip
def test_a_sentence_says_what_so_many_problems_can_show(found, words):
    assert words in power(found)


@pytest.mark.parametrize("num_differing", [0, 7, 30, 120])
def test_the_least_difference_that_is_said_is_about_the_least_that_is_shown(num_differing):
    def is_shown(net):
        num_gambit = max(net, (num_differing + net) // 2)
        found = pairs(400 - num_differing, num_gambit, max(0, num_differing - num_gambit))
        return any({each.first, each.second} == {"gambit", "sc"} and each.is_shown for each in differences_of(found))

    least = max(7, 2.4 * num_differing**0.5)
    assert is_shown(round(1.25 * least)) and not is_shown(round(0.75 * least))


def test_voting_counts_the_traces_that_the_tokens_pay_for_in_their_order():
    found = result(trace(100, "1"), trace(100, None, TraceState.CANCELLED), trace(100, "2"), trace(100, "2"))
    assert vote_within(found, 400, str.__eq__) == ("2", 400)
    assert vote_within(found, 240, str.__eq__) == ("1", 200)
    assert vote_within(found, 260, str.__eq__)[1] == 300
    assert vote_within(found, 1, str.__eq__) == ("1", 100)


def test_a_vote_by_score_counts_the_same_traces():
    found = result(trace(100, "1", score=0.9), trace(100, "2", score=0.3), trace(100, "2", score=0.4), trace(100, "2"))
    assert vote_within(found, 400, str.__eq__, VoteKind.SCORE) == ("1", 400)
    assert vote_within(found, 400, str.__eq__) == ("2", 400)


def sample(step, generated, seconds):
    return ev.Sample(step, 60, 0, 0, 4, generated, 0, 410_000, seconds, 0.0, 0.0, 0.0, 0.0)


def test_twenty_problems_are_forecast_from_the_first_steps_and_again_from_the_first_problem():
    lines = []
    forecast = CompareForecast(64, 24_000, at_once=1, minutes=30, say=lines.append)
    assert str(forecast) == "20 problems with twice 64 traces of about 24,000 tokens: 61.4 M tokens"
    for step in (100, 200, 300):
        forecast.on_event(sample(step, 64 * step, step / 100))
    assert len(lines) == 1  # 6,400 tokens a second; four times slower where traces are long
    assert lines[0] == ("20 problems take 2.7 h to 10.7 h at the pace of the first steps; --minutes 30 may be too few: "
                        "give 640, or --capacity 16")  # fmt: skip
    forecast.on_pair(600.0)
    forecast.on_pair(900.0)
    assert lines[1:] == ["20 problems take 3.3 h by the time of the first one; --minutes 30 may be too few: give 200, "
                         "or --capacity 16"]  # fmt: skip


def test_a_forecast_of_short_traces_is_one_time_and_proposes_nothing():
    lines = []
    forecast = CompareForecast(16, 200, at_once=8, minutes=30, say=lines.append)
    forecast.on_event(sample(200, 3_200, 1.0))
    forecast.on_pair(4.0)
    assert lines == ["20 problems take 5 s at the pace of the first steps",
                     "20 problems take 12 s by the time of the first one"]  # fmt: skip


def test_a_folder_refuses_other_options_and_other_problems(tmp_path):
    items = [Item(str(number), f"question {number}", "1") for number in range(3)]
    kept = PairFile(tmp_path, lambda: {"search": {"seed": 0}}, items)
    assert kept.left == items
    done = Pair("1", digest([items[1]])[1], True, True, True, 1, 1, 1.0)
    kept.append(done)
    again = PairFile(tmp_path, lambda: {"search": {"seed": 0}}, [*items, Item("3", "one more", "1")])
    assert again.pairs == [done] and [item.id for item in again.left] == ["0", "2", "3"]
    with pytest.raises(UserError, match=r"search.seed: 0 there, 1 now\): go on with the same options"):
        PairFile(tmp_path, lambda: {"search": {"seed": 1}}, items)
    with pytest.raises(UserError, match="problem 1 was another one"):
        PairFile(tmp_path, lambda: {"search": {"seed": 0}}, [Item("1", "another", "1")])
    (tmp_path / "compare.json").unlink()
    with pytest.raises(UserError, match="choose another --out"):
        PairFile(tmp_path, lambda: {"search": {"seed": 0}}, items)


def test_a_torn_line_is_searched_again(tmp_path):
    items = [Item("0", "a", "1"), Item("1", "b", "1")]
    kept = PairFile(tmp_path, dict, items)
    for item in items:
        kept.append(Pair(item.id, digest([item])[1], True, True, True, 1, 1, 1.0))
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    again = PairFile(tmp_path, dict, items)
    assert [item.id for item in again.left] == ["1"]
    again.append(Pair("1", digest([items[1]])[1], True, True, True, 1, 1, 1.0))
    assert len(PairFile(tmp_path, dict, items).pairs) == 2


@pytest.mark.system
def test_a_users_own_problems_are_compared_at_equal_tokens(tmp_path):
    lines = [{"question": "a = 17; b = 5; c = a * b; d = c - a; d?", "answer": "68"},
             {"question": "a = 2; b = 3; c = a * b; c?", "answer": "6"}]  # fmt: skip
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--capacity", "16", "--engine", "local", "--concurrency", "2", "--json", "--quiet",
             "--out", str(tmp_path / "out"))  # fmt: skip
    done = CliRunner().invoke(app, ["compare", "pawn", str(file), *flags])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["problems"] == 2 and found["right"] == {"sc": 2, "scored": 2, "gambit": 2}
    assert found["differences"].keys() == {"scored - sc", "gambit - sc", "gambit - scored"}
    assert abs(found["tokens"]["sc"] - found["tokens"]["gambit"]) < 0.2 * found["tokens"]["sc"]
    assert found["advice"].startswith("2 problems are too few")
    kept = [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]
    assert {pair["problem"] for pair in kept} == {"1", "2"}
    again = CliRunner().invoke(app, ["compare", "pawn", str(file), *flags])
    assert {**json.loads(again.stdout), "advice": ""} == {**found, "advice": ""}  # nothing is left to search
    other = CliRunner().invoke(app, ["compare", "pawn", str(file), *flags, "--seed", "1"])
    assert other.exit_code == 2 and "holds another comparison (search.seed: null there, 1 now)" in other.stderr
    assert len((tmp_path / "out" / "pairs.jsonl").read_text().splitlines()) == 2


def kept_problems(folder):
    path = folder / "pairs.jsonl"
    return [json.loads(line)["problem"] for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_a_comparison_that_was_ended_goes_on_with_what_is_left(tmp_path, number):
    """Whatever the moment: every pair that was written is kept, and none is searched twice."""
    lines = ({"question": f"a = {i}; b = 5; c = a * b; d = c - a; d?", "answer": str(4 * i % 97)} for i in range(2, 42))
    file, out = tmp_path / "mine.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["compare", "pawn", str(file), "--engine", "local", "--concurrency", "2", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "gambit", *words], stderr=subprocess.PIPE, text=True)
    while len(kept_problems(out)) < 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    os.kill(process.pid, number)
    said = process.communicate()[1]
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    before = kept_problems(out)
    if number == signal.SIGINT:
        assert "stopping: finished problems are kept" in said
        assert f"{len(before)} of 40 problems are done: the same command with --out {out} goes on" in said
    assert 2 <= len(before) < 40
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert kept_problems(out)[: len(before)] == before and len(set(kept_problems(out))) == 40
    assert json.loads(done.stdout)["problems"] == 40 == len(kept_problems(out))
    assert "20 problems with twice 64 traces" in done.stderr


@pytest.mark.system
def test_rounds_are_compared_where_they_are_asked_for(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "a = 2; b = 3; c = a * b; c?", "answer": "6"}\n')
    words = ["compare", "pawn", str(file), "--engine", "local", "--out", str(tmp_path / "out"), "--effort"]
    low = CliRunner().invoke(app, [*words, "low"])
    assert low.exit_code == 2 and "a single trace" in low.stderr
    done = CliRunner().invoke(app, [*words, "medium", "--json"])
    assert done.exit_code == 0, done.output
    assert "comparing medium effort: rounds of 4 to 16 traces (--effort high: the full pool)" in done.stderr
    assert "20 problems with twice 16 traces" in done.stderr
    found = json.loads(done.stdout)  # of 16 plain traces only those count that a round's tokens pay for
    assert abs(found["tokens"]["sc"] - found["tokens"]["gambit"]) < 0.3 * found["tokens"]["gambit"]


@pytest.mark.system
def test_a_pool_that_fills_the_cache_is_searched_alone_and_small_ones_together(pawn_solver):
    room = pawn_solver.engine.info.kv_capacity_tokens

    def fitting(**options):
        request = request_of("a = 17; b = 5; c = a * b; c?", SearchConfig(**options), None, None, None)
        return fitting_problems(pawn_solver, pawn_solver.plan(request, LengthHistory(), 1).settings)

    assert fitting(capacity=4, swap_size=1) == 8
    assert fitting(capacity=64, warmup_tokens=room // 64) == 1
    assert fitting(capacity=64, warmup_tokens=room // 200) == 3


@pytest.mark.system
def test_a_verifier_reads_the_plain_traces_too():
    """One that knows the truth, on a puzzle that counted votes get wrong."""
    problem, gold = unseen_problem(None)
    reader = FunctionVerifier(is_sound)
    search = SearchConfig(seed=0, capacity=64, swap_size=4)
    with Solver("pawn", scorer=reader, engine="local", device="cpu") as solver:
        found = searched(solver, search, Item("1", problem.question, gold), lambda: False, CompareForecast(64, 200))
    assert (found.sc_right, found.scored_right) == (False, True) and reader.seen


@pytest.mark.system
def test_an_error_in_one_pair_ends_the_others(tmp_path):
    """A question that pawn was not made for, among long ones that would take minutes."""
    chain = "a = 17; b = 61; c = a + b; d = c * a; e = d - b; f = e * c; g = f + a; h = g * d; i = h - c; i?"
    lines = [{"question": "why?", "answer": "1"}, *({"question": chain, "answer": "1"} for _ in range(3))]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--num-traces", "20000", "--engine", "local", "--concurrency", "4", "--out", str(tmp_path / "out"))
    done = CliRunner().invoke(app, ["compare", "pawn", str(file), *flags])
    assert done.exit_code == 2 and "puzzle" in done.stderr and not (tmp_path / "out" / "pairs.jsonl").exists()


@pytest.mark.system
def test_doctor_tries_a_model():
    done = CliRunner().invoke(app, ["doctor", "pawn", "--json", "--engine", "local", "--scorer", "confidence"])
    assert done.exit_code == 0, done.output
    found = {each["name"]: each["detail"] for each in json.loads(done.stdout)["findings"]}
    assert list(found) == ["model", "scorer", "trust", "pool", "solve", "fit", "memory", "time", "compare"]
    assert "pawn on local" in found["model"] and "the pool has 64" in found["fit"]
    assert found["scorer"] == "confidence" and found["solve"].startswith("by default high effort: the full pool")
    assert "tokens/s" in found["time"] and "64 traces of 448 tokens" in found["time"]
    assert found["compare"].startswith("20 problems with twice 64 traces")


def test_doctor_refuses_options_without_a_model():
    done = CliRunner().invoke(app, ["doctor", "--engine", "local", "--json"])
    assert done.exit_code == 2 and "gambit doctor MODEL" in done.stderr


@pytest.mark.system
def test_doctor_and_solve_say_the_effort_of_a_model_that_thinks(monkeypatch, tmp_path):
    """pawn stands for one whose tokenizer has a think tag."""
    for module in ("doctor_model", "running"):
        monkeypatch.setattr(f"gambit.cli.{module}.usual_effort", lambda model: Effort.MEDIUM)
    done = CliRunner().invoke(app, ["doctor", "pawn", "--engine", "local", "--json"])
    found = {each["name"]: each["detail"] for each in json.loads(done.stdout)["findings"]}
    assert found["solve"] == "by default medium effort: rounds of 4 to 16 traces (--effort high: the full pool)"
    assert "the pool has 64" in found["fit"] and "20 problems with twice 16 traces" in found["compare"]
    words = ["solve", "a = 2; b = 3; c = a * b; c?", "--engine", "local", "--out"]
    assert "medium effort: rounds of 4 to 16" in CliRunner().invoke(app, [*words, str(tmp_path / "one")]).stdout
    full = CliRunner().invoke(app, [*words, str(tmp_path / "two"), "--effort", "high"])
    assert full.exit_code == 0 and "effort" not in full.stdout
