"""`gambit compare`: equal tokens, an interval, and advice that calls nothing better on a handful of problems."""

import json

import pytest
from typer.testing import CliRunner

from gambit.bench.datasets import Item
from gambit.cli.app import app
from gambit.cli.compare_work import Comparison, Pair, fitting_problems, vote_within
from gambit.config.options import SearchConfig
from gambit.results.result import Counts, SearchResult, Seconds, Tokens, TraceOutline
from gambit.tree import TraceState
from gambit.types import StopReason


def pairs(num_both, num_gambit, num_sc):
    kinds = [(True, True)] * num_both + [(False, True)] * num_gambit + [(True, False)] * num_sc
    return tuple(Pair(f"p{i}", sc, gambit, 100, 100) for i, (sc, gambit) in enumerate(kinds))


def trace(tokens, answer, state=TraceState.FINISHED):
    return TraceOutline(None, state, 0, tokens, tokens, None, answer)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (pairs(0, 19, 0), "19 problems are too few to choose by: 20 are the least, 1 more take about 10 s."),
        (pairs(0, 0, 0), "0 problems are too few"),
        (pairs(10, 10, 0), "Gambit is better on these problems at equal tokens: use it."),
        (pairs(10, 0, 10), "Voting is better on these problems at equal tokens: use --policy sc."),
        (pairs(18, 1, 1), "No difference is shown"),
        (pairs(20, 4, 0), "No difference is shown"),  # p = 0.125, though 0 is outside of the interval
        (pairs(20, 6, 0), "Gambit is better"),
        (pairs(20, 0, 0), "No difference is shown"),
    ],
)
def test_advice_is_one_sentence_and_needs_twenty_problems(found, words):
    advice = Comparison(found, 10.0 * len(found)).advice
    assert advice.startswith(words) and (len(found) >= 20 or "better" not in advice)


def test_voting_counts_the_traces_that_the_tokens_pay_for_in_their_order():
    traces = (trace(100, "1"), trace(100, None, TraceState.CANCELLED), trace(100, "2"), trace(100, "2"))
    result = SearchResult("p", "2", (), 0.0, 0, "sc", 0, Counts(), Tokens(400), Seconds(), StopReason.COMPLETED,
                          traces=traces)  # fmt: skip
    assert vote_within(result, 400, str.__eq__) == ("2", 400)
    assert vote_within(result, 240, str.__eq__) == ("1", 200)
    assert vote_within(result, 260, str.__eq__)[1] == 300
    assert vote_within(result, 1, str.__eq__) == ("1", 100)


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
    assert found["problems"] == 2 and found["right"] == {"sc": 2, "gambit": 2}
    assert abs(found["tokens"]["sc"] - found["tokens"]["gambit"]) < 0.2 * found["tokens"]["sc"]
    assert found["advice"].startswith("2 problems are too few")
    kept = [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]
    assert {pair["problem"] for pair in kept} == {"1", "2"}


@pytest.mark.system
def test_a_pool_that_fills_the_cache_is_searched_alone_and_small_ones_together(pawn_solver):
    item = Item("1", "a = 17; b = 5; c = a * b; c?", "85")
    room = pawn_solver.engine.info.kv_capacity_tokens
    assert fitting_problems(pawn_solver, SearchConfig(capacity=4, swap_size=1), [item]) == 8
    filling = SearchConfig(capacity=64, warmup_tokens=room // 64)
    assert fitting_problems(pawn_solver, filling, [item]) == 1
    third = SearchConfig(capacity=64, warmup_tokens=room // 200)
    assert fitting_problems(pawn_solver, third, [item]) == 3 and fitting_problems(pawn_solver, third, []) == 1


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
    done = CliRunner().invoke(app, ["doctor", "pawn", "--json"])
    assert done.exit_code == 0, done.output
    found = {each["name"]: each["detail"] for each in json.loads(done.stdout)["findings"]}
    assert list(found) == ["model", "scorer", "trust", "pool", "fit", "memory", "time"]
    assert "pawn on local" in found["model"] and "AUC" in found["trust"] and "the pool has 64" in found["fit"]
    assert "tokens/s" in found["time"] and "64 traces of 448 tokens" in found["time"]
