"""`gambit scorer collect` on a tiny model: what is stored is what was sampled, and a kill costs nothing done."""

import multiprocessing
import os
import random
import signal
import time
import warnings

import numpy as np
import pytest
import torch

from gambit import SearchConfig, Solver
from gambit import events as ev
from gambit.answers import extract_boxed
from gambit.chains import generate
from gambit.config.options import EngineConfig
from gambit.errors import UserError
from gambit.pawn import Split, parse_puzzle
from gambit.scorers.base import ScorerInfo
from gambit.text.boundary import boundaries, boundary_rule
from gambit.text.tokenizers import load_tokenizer
from gambit.training.collect import CollectPlan, StateReader, collect
from gambit.training.dataset import load_dataset
from gambit.training.sampling import SampledTrace, Task, generated_tasks, pawn_tasks
from gambit.training.storage import read_header, read_index, state_name
from gambit.training.train import TrainPlan, datasets_of
from gambit.types import Problem, StatePosition

pytestmark = pytest.mark.system
SEARCH = SearchConfig(max_new_tokens=40, temperature=1.0, top_p=1.0, top_k=0, seed=3)
TASKS = [Task(Problem(f"a={i}", id=f"p{i}"), "78"[i % 2]) for i in range(6)]


@pytest.fixture(scope="module", autouse=True)
def _quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def plan_for(tiny_folder, out, **changes):
    engine = EngineConfig(model=str(tiny_folder), engine="local", device="cpu")
    values = {"traces_per_problem": 3, "traces_at_once": 6, "batch_tokens": 64, "layers": (-1, 1)}
    return CollectPlan(out, "made.jsonl", engine, SEARCH, **{**values, **changes})


@pytest.fixture(scope="module", params=["blank-line", "line"])
def collected(request, tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected")
    told = []
    plan = plan_for(tiny_folder, folder, boundary=request.param)
    summary = collect(TASKS, plan, on_progress=lambda *numbers: told.append(numbers))
    return folder, summary, told


def test_every_trace_is_there_once_with_its_answer_and_grade(collected, tiny_folder):
    folder, summary, told = collected
    tokenizer = load_tokenizer(str(tiny_folder))
    data = load_dataset(folder, StatePosition.BOUNDARY, with_tokens=True)
    assert sorted(problem.id for problem in data.problems) == [task.id for task in TASKS]
    assert (summary.num_problems, summary.num_traces) == (6, 18) and told[0] == (0, 6) and told[-1] == (6, 6)
    assert summary.num_tokens == data.traces.num_tokens.sum() and summary.num_thoughts == data.traces.num_thoughts.sum()
    rule = boundary_rule(tokenizer, name=read_header(folder).boundary_rule)
    traces = [trace for problem in data.problems for trace in problem.traces]
    for index, (record, tokens) in enumerate(zip(traces, data.tokens, strict=True)):
        text = tokenizer.decode(tokens)
        gold = data.problems[data.traces.problem_of[index]].gold
        assert record.is_correct == (record.answer == gold)
        assert record.answer == extract_boxed(text.removesuffix("<eos>"))
        places, _ = boundaries(rule, tokens)
        start = data.traces.starts[index]
        ends = data.traces.thought_ends[start : start + record.num_thoughts]
        assert ends.tolist() == [place + 1 for place in places], "the engine and the rule cut alike"
    assert any(trace.is_correct for trace in traces) and not all(trace.is_correct for trace in traces)


class FirstFeature:
    """Scores a thought by one number of its state: what a scorer in the engine would have seen."""

    def __init__(self, position, boundary):
        self.info = ScorerInfo("first", state_position=position, is_probability=False, boundary_rule=boundary)

    def to(self, device):
        return self

    def score(self, thoughts):
        return thoughts.states[:, 5].float()


@pytest.mark.parametrize("position", list(StatePosition))
def test_the_states_are_those_an_engine_would_score(collected, tiny_folder, position):
    folder, _, _ = collected
    data = load_dataset(folder, position, with_tokens=True)
    seen, tokens = {}, {}

    def on_event(name, event):
        if isinstance(event, ev.Scored):
            for trace, score, length in zip(event.traces, event.scores, event.num_tokens, strict=True):
                seen[name, trace, length] = score
        elif isinstance(event, ev.Finished):
            tokens[name, event.trace] = event.tokens

    config = SEARCH.model_copy(update={"policy": "sc", "capacity": 3, "own_noise": True})
    scorer = FirstFeature(position, read_header(folder).boundary_rule)
    with Solver(str(tiny_folder), scorer=scorer, engine="local", device="cpu") as solver:
        list(solver.solve_many([task.problem for task in TASKS], config, on_event=on_event))
    num_compared = 0
    for index, problem in enumerate(data.traces.problem_of):
        name, trace = data.problems[problem].id, index - int(np.flatnonzero(data.traces.problem_of == problem)[0])
        assert list(tokens[name, trace]) == data.tokens[index].tolist(), "the same seed gives the same traces"
        start, count = data.traces.starts[index], data.traces.num_thoughts[index]
        for thought in range(start, start + count):
            expected = seen.get((name, trace, int(data.traces.thought_ends[thought])))
            if expected is not None:  # a boundary that was a trace's last token was never fed
                assert float(data.states[thought, 5]) == pytest.approx(expected, abs=2e-2)
                num_compared += 1
    assert num_compared > 20


def test_layers_lie_side_by_side(collected):
    folder, _, _ = collected
    both = load_dataset(folder, StatePosition.BEFORE, (-1, 1))
    inner = load_dataset(folder, StatePosition.BEFORE, (1,))
    assert both.states.shape[-1] == 64 and torch.equal(both.states[:, 32:], inner.states)
    assert read_header(folder).layers == (-1, 1)


def test_without_layers_the_same_traces_lie_there_without_states(collected, tiny_folder, tmp_path):
    """For verifiers, which read tokens: no second model is loaded."""
    boundary = read_header(collected[0]).boundary_rule
    collect(TASKS, plan_for(tiny_folder, tmp_path, layers=(), boundary=boundary))
    whole = load_dataset(collected[0], StatePosition.BOUNDARY, with_tokens=True)
    plain = load_dataset(tmp_path, StatePosition.BOUNDARY, (), with_tokens=True)
    assert {each.id: each for each in plain.problems} == {each.id: each for each in whole.problems}
    one, other = (sorted(tokens.tolist() for tokens in data.tokens) for data in (plain, whole))
    assert one == other and plain.header.hidden_size == whole.header.hidden_size
    assert plain.states.shape == (len(whole.states), 0) and len(plain.prompts) == len(TASKS)
    with pytest.raises(UserError, match=r"layers \[-1\] are wanted, .* holds none"):
        load_dataset(tmp_path, StatePosition.BOUNDARY)
    with pytest.raises(UserError, match="holds no states, by which a scorer judges: collect them without --layers"):
        datasets_of(TrainPlan(tmp_path))


def test_padding_changes_no_state(tiny_folder):
    traces = [SampledTrace((3, 12, 13), tuple(range(12, 12 + n)), boundaries=[2, n - 2]) for n in (5, 17, 9)]
    together = StateReader(str(tiny_folder), device="cpu").read(traces)
    alone = StateReader(str(tiny_folder), device="cpu", batch_tokens=1).read(traces)
    name = state_name(-1, "boundary")
    for one, other in zip(together, alone, strict=True):
        assert one[name].shape == (2, 32) and torch.allclose(one[name].float(), other[name].float(), atol=1e-2)
    nothing = StateReader(str(tiny_folder), device="cpu").read([SampledTrace((3,), (12, 13))])
    assert nothing[0][name].shape == (0, 32)
    with pytest.raises(UserError, match="layer 7: the model has 2"):
        StateReader(str(tiny_folder), device="cpu", layers=(7,))


def test_what_is_done_is_not_done_again(collected, tiny_folder):
    folder, _, _ = collected
    before = (folder / "index.jsonl").read_bytes()
    more = [*TASKS, Task(Problem("a=9", id="p9"), "8")]
    boundary = read_header(folder).boundary_rule
    summary = collect(more, plan_for(tiny_folder, folder, boundary=boundary))
    assert (summary.num_before, summary.num_problems) == (6, 1)
    assert (folder / "index.jsonl").read_bytes().startswith(before)
    with pytest.raises(UserError, match=r"begun with has_confidence = True, this run has False"):
        collect(TASKS, plan_for(tiny_folder, folder, with_confidence=False, boundary=boundary))


def test_a_stop_keeps_whole_problems_only(tiny_folder, tmp_path):
    calls = iter(range(10_000))
    plan = plan_for(tiny_folder, tmp_path / "c", traces_at_once=3, with_confidence=False)
    summary = collect(TASKS, plan, should_stop=lambda: next(calls) > 60)
    assert summary.was_stopped and 0 < summary.num_problems < 6
    assert all(len(problem.traces) == 3 for entry in read_index(tmp_path / "c") for problem in entry.problems)
    assert collect(TASKS, plan).num_problems == 6 - summary.num_problems


def test_pawn_brings_its_own_problems():
    tasks = pawn_tasks("dev", 3, seed=1)
    puzzles = [parse_puzzle(task.problem.question) for task in tasks]
    assert all(puzzle.split is Split.DEV for puzzle in puzzles)
    assert [task.answer for task in tasks] == [str(puzzle.answer) for puzzle in puzzles]
    assert len({task.id for task in tasks}) == 3
    with pytest.raises(UserError, match="unknown split 'val'"):
        pawn_tasks("val", 1, 0)


def test_long_chains_are_of_the_train_split_unless_another_is_named():
    tasks = generated_tasks("chains:4,idle=1", 3, seed=1)
    rows = generate("chains:4,idle=1", "train", 3, seed=1)
    assert [(task.id, task.answer) for task in tasks] == [(row["id"], row["answer"]) for row in rows]
    assert all(task.problem.question.startswith(row["question"]) for task, row in zip(tasks, rows, strict=True))
    assert [task.id for task in generated_tasks("moves:4,split=judge", 1, seed=0)] == ["moves-4-judge-0-00000"]


def test_kills_at_random_moments_cost_nothing_that_was_done(tiny_folder, tmp_path):
    """Sampling, grading, reading, writing: killed anywhere. The end is that of a run nobody killed."""
    tasks = [Task(Problem(f"a={i}", id=f"p{i}"), "7") for i in range(24)]
    plan = plan_for(tiny_folder, tmp_path / "killed", traces_per_problem=2, traces_at_once=4, batch_tokens=16)
    context, rng = multiprocessing.get_context("fork"), random.Random(1)
    num_kills, done = 0, set()
    while len(done) < len(tasks):
        child = context.Process(target=collect, args=(tasks, plan))
        child.start()
        _wait_for_a_line(plan.out / "index.jsonl", child, len(done))
        time.sleep(rng.uniform(0, 0.1))
        if num_kills < 4:
            num_kills += child.is_alive()
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        names = [problem.id for entry in read_index(plan.out) for problem in entry.problems]
        assert len(names) == len(set(names)) and done <= set(names)
        done = set(names)
    assert num_kills >= 2
    whole = plan_for(tiny_folder, tmp_path / "whole", traces_per_problem=2, traces_at_once=4, batch_tokens=16)
    collect(tasks, whole)
    assert _content(plan.out) == _content(whole.out)


def _wait_for_a_line(index, child, num_done):
    """Until something new is written, so that every run gets somewhere."""
    while child.is_alive() and not (index.exists() and index.read_bytes().count(b'"id"') > num_done):
        time.sleep(0.005)


def _content(folder):
    data = load_dataset(folder, StatePosition.BEFORE, with_tokens=True)
    tokens = iter(data.tokens)
    return {problem.id: (problem, [next(tokens).tolist() for _ in problem.traces]) for problem in data.problems}
