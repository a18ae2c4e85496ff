"""The solver: one call from a question to a typed result, reusable, several problems at once, a log on disk."""

import dataclasses
import json
import math
import os
import warnings
from pathlib import Path

import pytest
import torch

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.errors import EngineError, GambitWarning, UserError
from gambit.results.record import fold, replay
from gambit.scorers.base import ScorerInfo
from gambit.scorers.checkpoint import save_checkpoint
from gambit.scorers.mlp import MlpScorer
from gambit.solver import Solver
from gambit.types import Problem, StopReason
from support.tiny import save_tiny

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
QUICK = {"capacity": 6, "swap_size": 2, "check_interval": 6, "warmup_tokens": 8, "max_new_tokens": 60, **SAMPLING}


def quick(**changes):
    return SearchConfig(**{**QUICK, **changes})


@pytest.fixture(scope="module")
def solver(tiny_folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solver = Solver(str(tiny_folder), device="cpu")
    yield solver
    solver.close()


def comparable(result):
    return (result.answer, result.votes, result.counts, result.tokens, result.stop_reason)


def test_a_problem_gives_a_typed_result_and_a_log_that_replays(solver, tmp_path):
    seen = []
    result = solver.solve("a=1+2", quick(), out_dir=tmp_path / "run", on_event=seen.append)
    assert result.stop_reason in (StopReason.COMPLETED, StopReason.EXHAUSTED)
    assert result.answer in ("7", "8") and result.out_dir == str(tmp_path / "run")
    assert comparable(replay(tmp_path / "run" / "events.jsonl", solver._parts.grader.equivalent)) == comparable(result)
    assert comparable(fold(seen).result(fold(seen).vote(solver._parts.grader.equivalent))) == comparable(result)
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["answer"] == result.answer and stored["counts"]["roots"] == 6
    assert {"answer", "votes", "policy", "seed", "counts", "tokens", "seconds", "stop_reason", "out_dir"} <= set(stored)
    header = seen[0]
    assert isinstance(header, ev.RunStarted) and header.settings["swap_size"] == 2
    assert header.environment["engine"]["name"] == "local" and header.environment["torch"] == torch.__version__


def test_the_result_has_the_text_of_the_trace_of_most_weight_behind_the_answer(solver, tmp_path):
    seen = []
    result = solver.solve("a=1+2", quick(), out_dir=tmp_path / "run", on_event=seen.append)
    record = fold(seen)
    best = max(
        (ballot for ballot in record.ballots() if ballot.answer in result.votes[0].forms),
        key=lambda ballot: (ballot.weight, -ballot.trace),
    )
    assert result.text == solver.text_of(record.tree.tokens_of(best.trace))
    assert f"{result.answer}" in result.text
    assert json.loads((tmp_path / "run" / "result.json").read_text())["text"] == result.text


def test_a_search_without_an_answer_has_no_text(solver):
    result = solver.solve("a=1+2", quick(budget_tokens=6))
    assert (result.answer, result.text) == (None, None)


def test_a_small_cache_makes_the_pool_smaller_and_says_so(tiny_folder):
    with pytest.warns(GambitWarning) as found, Solver(str(tiny_folder), device="cpu", kv_budget_tokens=256) as small:
        seen = []
        config = SearchConfig(warmup_tokens=30, max_new_tokens=60, **SAMPLING)
        result = small.solve("a=1+2", config, on_event=seen.append)
    fitting = (256 - len(seen[0].prompt_tokens)) // 30
    notes = [str(each.message) for each in found if "places" in str(each.message)]
    assert 1 < result.counts.roots == seen[0].capacity == fitting < 8
    assert notes[0].startswith(f"the pool has {fitting} places instead of 64: so many traces fit into the KV cache")


def test_the_same_seed_gives_the_same_tree_and_another_seed_another(solver):
    def tree(seed):
        seen = []
        solver.solve("a=1+2", quick(seed=seed), on_event=seen.append)
        return [trace.own_tokens for trace in fold(seen).tree.traces]

    assert tree(1) == tree(1) != tree(2)


def test_many_problems_at_once_give_what_each_gives_alone(solver, tmp_path):
    problems = [Problem(f"a={i}+2", id=f"p{i}") for i in range(5)]
    alone = {p.id: comparable(solver.solve(p, quick())) for p in problems}
    together = list(solver.solve_many(iter(problems), quick(), concurrency=3, out_dir=tmp_path))
    assert {r.problem_id: comparable(r) for r in together} == alone
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"p{i}" for i in range(5)]


def test_a_problem_that_cannot_be_searched_does_not_stop_the_others(solver):
    problems = ["a=1", "", "b=2 " * 300, "c=3"]
    results = {r.problem_id: r for r in solver.solve_many(problems, quick(), concurrency=2)}
    assert {i for i, r in results.items() if r.error is None} == {"0", "3"}
    assert "empty" in results["1"].error and "context is 512" in results["2"].error
    assert results["1"].stop_reason is StopReason.FAILED
    with pytest.raises(UserError, match="empty"):
        solver.solve("  ")


def test_chat_messages_and_an_extractor_of_ones_own(solver):
    messages = [{"role": "user", "content": "a=1+2"}]
    result = solver.solve(messages, quick(), extractor=lambda text: "same" if text else None)
    assert result.answer == "same" and len(result.votes) == 1


@pytest.mark.parametrize("policy", ["gambit", "sc"])
def test_every_policy_runs_on_the_real_engine(solver, policy):
    result = solver.solve("a=1+2", quick(policy=policy, islands=1 if policy == "gambit" else None))
    assert result.policy == policy and result.counts.completed > 0
    assert (result.counts.branched > 0) == (policy == "gambit")


def test_budgets_and_interruptions_reach_the_engine(solver):
    result = solver.solve("a=1+2", quick(budget_tokens=40))
    assert result.stop_reason is StopReason.BUDGET_TOKENS and 30 < result.tokens.generated <= 40
    result = solver.solve("a=1+2", quick(), should_stop=lambda: True)
    assert result.stop_reason is StopReason.INTERRUPTED
    assert solver.solve("a=1+2", quick()).counts.completed > 0  # and the solver is as good as new


def test_who_asks_for_more_traces_than_an_engine_runs_at_once_is_told_so(solver, monkeypatch):
    info = dataclasses.replace(solver.engine.info, most_traces=11, most_traces_option="max_num_seqs")
    monkeypatch.setattr(solver.engine, "info", info)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GambitWarning)
        solver.solve("a=1+2", quick())
    with pytest.warns(GambitWarning, match=r"of 12 traces 11 run at a time.*max_num_seqs=12"):
        first, second = solver.solve_many(["a=1+2", "a=1+3"], quick(), concurrency=2)
    assert len(first.warnings) + len(second.warnings) == 1
    few = quick(policy="sc", first_traces=2, consensus_stop=0.9)  # a search in rounds counts with those it begins with
    with warnings.catch_warnings():
        warnings.simplefilter("error", GambitWarning)
        list(solver.solve_many(["a=1+2", "a=1+3"], few, concurrency=5))


def test_auto_learns_from_the_runs_so_far(tiny_folder):
    with pytest.warns(GambitWarning, match="no scorer is known"):
        solver = Solver(str(tiny_folder), device="cpu")

    def warmup():
        seen = []
        solver.solve(
            "a=1+2", SearchConfig(preset="auto", capacity=4, max_new_tokens=80, **SAMPLING), on_event=seen.append
        )
        return seen[0].settings["warmup_tokens"]

    assert warmup() == 40  # half of what a trace may have
    assert warmup() < 40  # half of what traces had
    solver.close()


@pytest.mark.contract
def test_who_waits_longer_than_traces_live_is_told_once():
    """Nothing would branch, and nobody would know why."""
    puzzle = "a = 5; b = 9; c = a + b; d = c * a; d?"
    with Solver("pawn", device="cpu", engine="local") as solver:
        assert not solver.solve(puzzle, SearchConfig(capacity=4)).warnings
        late = SearchConfig(capacity=4, warmup_tokens=400)
        with pytest.warns(GambitWarning, match="100% of the traces ended within the warm-up of 400 tokens"):
            [told] = solver.solve(puzzle, late).warnings
        assert "before a tournament could judge them: give --warmup-tokens" in told
        assert not solver.solve(puzzle, late).warnings


def test_a_log_is_never_overwritten(solver, tmp_path):
    solver.solve("a=1+2", quick(), out_dir=tmp_path)
    with pytest.raises(UserError, match="never overwritten"):
        solver.solve("a=1+2", quick(), out_dir=tmp_path)


def test_a_folder_that_cannot_be_written_is_the_users_mistake(solver, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        solver.solve("a=1+2", quick(), out_dir=tmp_path / "file" / "run")


def test_a_full_disk_silences_the_log_and_not_the_search(solver, tmp_path):
    written = []

    def fill_up(event):
        written.append(event)
        if len(written) == 5:  # from here on the log's file behaves like one on a full disk
            descriptor = os.open("/dev/full", os.O_WRONLY)
            for number in _open_files(tmp_path / "events.jsonl"):
                os.dup2(descriptor, number)
            os.close(descriptor)

    with pytest.warns(GambitWarning, match="incomplete: No space left"):
        result = solver.solve("a=1+2", quick(), out_dir=tmp_path, on_event=fill_up)
    assert result.answer in ("7", "8") and "No space left" in result.warnings[-1]
    assert result.log_error == result.warnings[-1]


def _open_files(path):
    return [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.resolve() == path.resolve()]


@pytest.mark.contract
def test_a_scorer_beside_the_model_is_used_and_a_wrong_one_refused(tmp_path):
    folder = save_tiny(tmp_path / "model")

    def scorer(hidden):
        return MlpScorer(
            ScorerInfo("mlp", hidden_size=hidden),
            (torch.randn(512, hidden), torch.zeros(512), torch.randn(1, 512), torch.zeros(1)),
        )

    save_checkpoint(scorer(32), folder / "scorer.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error", GambitWarning)
        solver = Solver(str(folder), device="cpu")
    seen = []
    result = solver.solve("a=1+2", quick(islands=1), on_event=seen.append)
    assert result.counts.branched > 0 and seen[0].environment["scorer"] == "mlp"
    assert all(0 <= s <= 1 for e in seen if isinstance(e, ev.Scored) for s in e.scores)
    solver.close()
    save_checkpoint(scorer(31), tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="expects hidden size 31, the model has 32"):
        Solver(str(folder), device="cpu", scorer=str(tmp_path / "other.safetensors"))


def test_wrong_options_are_named(tiny_folder):
    with pytest.raises(UserError, match="did you mean 'device'"):
        Solver("pawn", devise="cpu")
    with pytest.raises(UserError, match="unknown scorer"):
        Solver(str(tiny_folder), scorer="oracle")
    with pytest.raises(UserError, match="cannot load model 'no/such-model'"):
        Solver("no/such-model", scorer="constant")


def test_a_failing_engine_says_so_and_leaves_the_log(solver, tmp_path, monkeypatch):
    def fail():
        raise EngineError("out of luck")

    monkeypatch.setattr(solver.engine, "step", fail)
    with pytest.raises(EngineError, match="out of luck"):
        solver.solve("a=1+2", quick(), out_dir=tmp_path)
    monkeypatch.undo()
    assert replay(tmp_path / "events.jsonl", lambda a, b: a == b).stop_reason is StopReason.FAILED
    assert solver.solve("a=1+2", quick()).counts.completed > 0


class OwnScorer:
    """A scorer of a user's, with what it returns for a batch of thoughts."""

    info = ScorerInfo("own")

    def __init__(self, scores):
        self.score = lambda thoughts: scores(len(thoughts.states))

    def to(self, device):
        return self


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (lambda n: torch.full((n,), 17.1), "scorer 'own' gave 17.1: give 0 to 1, or have is_probability=False"),
        (lambda n: torch.full((n,), -0.5), "scorer 'own' gave -0.5: give 0 to 1, or have is_probability=False"),
        (lambda n: torch.full((n,), math.nan), "scorer 'own' gave nan: give a number"),
        (lambda n: 0.5, "scorer 'own' gave a float for . thoughts: give a tensor"),
        (lambda n: torch.tensor(0.5), r"scorer 'own' gave scores of shape \[\] for . thoughts: give a tensor"),
        (lambda n: torch.zeros(n, 1), r"scorer 'own' gave scores of shape \[., 1\] for . thoughts: give a tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_scorer_that_gives_no_scores_is_named_with_what_it_gave(tiny_folder, scores, words):
    with Solver(str(tiny_folder), device="cpu", scorer=OwnScorer(scores)) as own, pytest.raises(UserError, match=words):
        own.solve("a=1+2", quick())


@pytest.mark.filterwarnings("ignore")
def test_scores_that_are_no_chances_are_taken_where_the_scorer_says_so(tiny_folder):
    scorer = OwnScorer(lambda n: torch.full((n,), 17.1))
    scorer.info = ScorerInfo("own", is_probability=False)
    with Solver(str(tiny_folder), device="cpu", scorer=scorer) as own:
        assert own.solve("a=1+2", quick()).counts.completed


def test_a_log_is_read_from_a_path_or_a_text_and_replayed_without_more(solver, tmp_path):
    result = solver.solve("a=1+2", quick(), out_dir=tmp_path / "run")
    log = tmp_path / "run" / "events.jsonl"
    assert list(ev.read_log(str(log))) == list(ev.read_log(log))
    assert comparable(replay(str(log))) == comparable(replay(log, str.__eq__)) == comparable(result)


@pytest.mark.filterwarnings("ignore")
def test_a_method_that_had_nothing_to_do_is_a_warning_once(tiny_folder):
    with Solver(str(tiny_folder), device="cpu", scorer="constant") as solver:
        first, second = (solver.solve("a=1+2", quick(policy="step")) for _ in range(2))
    [warning] = [each for each in first.warnings if "cannot have worked" in each]
    assert warning.startswith("step cannot have worked: it prunes when memory is short and never did: at most ")
    assert not any("cannot have worked" in each for each in second.warnings)
