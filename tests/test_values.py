"""Values of prefixes: rollouts of collected traces, kept beside them, resumed, merged and used as labels."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
import torch

from collected import make_collection
from gambit import SearchConfig
from gambit.config.options import EngineConfig
from gambit.errors import UserError
from gambit.training.collect import CollectPlan, collect
from gambit.training.dataset import Division, load_dataset
from gambit.training.objectives import Batch, pairwise
from gambit.training.sampling import Task
from gambit.training.storage import merge
from gambit.training.train import TrainPlan, datasets_of, train
from gambit.training.values import (
    VALUES_FILE,
    PrefixValue,
    TraceText,
    at_random,
    merge_values,
    nearest_step,
    read_texts,
    read_values,
    with_value_labels,
)
from gambit.types import Aggregation, Problem, StatePosition

SEARCH = SearchConfig(max_new_tokens=40, temperature=1.0, top_p=1.0, top_k=0, seed=3)
TASKS = [Task(Problem(f"a={i}", id=f"p{i}"), "78"[i % 2]) for i in range(4)]


def plan_for(tiny_folder, out, **changes):
    engine = EngineConfig(model=str(tiny_folder), engine="local", device="cpu")
    values = {"traces_per_problem": 3, "traces_at_once": 6, "num_rollouts": 4, "prefixes_per_trace": 2}
    return CollectPlan(out, "made.jsonl", engine, SEARCH, **{**values, **changes})


def collected_in(folder, tiny_folder, tasks=TASKS, **changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return collect(tasks, plan_for(tiny_folder, folder, **changes))


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """Collected first as before there were values: rollouts are added to it later."""
    made = tmp_path_factory.mktemp("values") / "data"
    assert collected_in(made, tiny_folder, num_rollouts=0).num_prefixes == 0 and not (made / VALUES_FILE).exists()
    assert collected_in(made, tiny_folder).num_prefixes == len(list(read_values(made)))
    return made


def test_where_there_is_nothing_to_rank_nothing_need_be_continued(folder, tiny_folder, tmp_path):
    collected_in(tmp_path, tiny_folder, rolls_out_mixed_only=True)
    mixed = {text.problem.id for text in read_texts(tmp_path) if text.problem.is_mixed}
    everywhere, found = ({value.problem for value in read_values(each)} for each in (folder, tmp_path))
    assert found == everywhere & mixed and 0 < len(found) < len(everywhere)


def test_every_trace_is_cut_at_thoughts_and_continued(folder):
    values, texts = list(read_values(folder)), read_texts(folder)
    cut = at_random(2, SEARCH.seed)
    assert [value.key for value in sorted(values, key=lambda value: value.key)] == sorted(
        text.key(step) for text in texts for step in cut(text)
    )
    assert max(len(cut(text)) for text in texts) == 2 and all(len(value.answers) == 4 for value in values)
    assert {answer for value in values for answer in value.answers} >= {"7", "8"}
    for value in values:
        gold = {task.id: task.answer for task in TASKS}[value.problem]
        assert value.is_right == tuple(answer == gold for answer in value.answers)
        assert value.value == sum(value.is_right) / 4


def test_a_run_goes_on_where_it_was(folder, tiny_folder, tmp_path):
    lines = (folder / VALUES_FILE).read_text().splitlines()
    again = tmp_path / "again"
    again.mkdir()
    for file in folder.iterdir():
        (again / file.name).write_bytes(file.read_bytes())
    (again / VALUES_FILE).write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])
    assert collected_in(again, tiny_folder).num_prefixes == len(lines) - 5
    assert sorted((again / VALUES_FILE).read_text().splitlines()) == sorted(lines), "the same rollouts, once each"
    assert collected_in(again, tiny_folder).num_prefixes == 0


def test_parts_are_merged_with_their_values(folder, tiny_folder, tmp_path):
    parts = [tmp_path / "1", tmp_path / "2"]
    for number, part in enumerate(parts):
        collected_in(part, tiny_folder, TASKS[number::2])
    merge(parts, tmp_path / "whole")
    for _ in range(2):
        merge_values(parts, tmp_path / "whole")
    assert sorted(map(repr, read_values(tmp_path / "whole"))) == sorted(map(repr, read_values(folder)))


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / VALUES_FILE).write_text('{"problem": "p"}\n')
    with pytest.raises(UserError, match=r"values\.jsonl, line 1: not the value of a prefix"):
        list(read_values(tmp_path))


def text_of(ends, num_tokens, made):
    problem = load_dataset(made, StatePosition.BEFORE).problems[0]
    return TraceText(problem, 0, np.arange(num_tokens, dtype=np.int32), np.array(ends, dtype=np.int32))


def test_the_nearest_thought_is_never_the_end(tmp_path):
    made = make_collection(tmp_path / "data", num_problems=2)
    text = text_of([10, 40, 50, 100], 100, made)
    assert [nearest_step(text, share) for share in (0.01, 0.25, 0.44, 0.5, 0.99)] == [1, 1, 2, 3, 3]
    assert nearest_step(text_of([100], 100, made), 0.5) is None and at_random(3, 0)(text) == [1, 2, 3]


# -- labels ------------------------------------------------------------------------------------------------------


def put_values(made, chance):
    """A value for every second trace of every problem, after its third step."""
    with (made / VALUES_FILE).open("w") as file:
        for problem in load_dataset(made, StatePosition.BEFORE).problems:
            for trace in range(0, len(problem.traces), 2):
                right = chance(trace)
                value = PrefixValue(problem=problem.id, trace=trace, step=3, answers=("7",) * 4, num_tokens=1,
                                    is_right=tuple(i < right for i in range(4)))  # fmt: skip
                file.write(value.model_dump_json() + "\n")


def test_labels_lead_from_the_problems_mean_through_the_values_to_the_outcome(tmp_path):
    made = make_collection(tmp_path / "data", num_problems=2)
    data = load_dataset(made, StatePosition.BEFORE)
    with pytest.raises(UserError, match="holds no values: add some with `gambit scorer collect --rollouts 8`"):
        with_value_labels(data, made)
    put_values(made, lambda trace: 1)
    labels, steps = with_value_labels(data, made).step_labels, data.traces.num_steps
    first = labels[: steps[0]]
    assert first[:3] == pytest.approx([0.5 - 0.25 / 3, 0.5 - 0.5 / 3, 0.25]) and first[-1] == 1.0
    assert np.diff(first[2:]) == pytest.approx(0.75 / (steps[0] - 3))
    assert set(labels[steps[0] : steps[0] + steps[1]]) == {0.0}, "no value: the outcome everywhere"


def test_pairs_count_by_how_much_better_one_is():
    logits, ones = torch.tensor([[2.0], [1.0], [0.0]]), torch.ones(3, dtype=torch.long)
    values = torch.tensor([[0.75], [0.25], [0.25]])
    is_correct = torch.tensor([False, True, True])  # not looked at
    made = Batch(logits, ones, is_correct, torch.zeros(3, dtype=torch.long), Aggregation.LAST, None, values)
    expected = torch.nn.functional.softplus(torch.tensor([-1.0, -2.0])).mean()
    assert pairwise(made).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["ridge", "bce", "prefix+pairwise"])
def test_a_fit_follows_the_values(tmp_path, objective):
    """Values that contradict the outcomes turn the scorer round; they are of even traces, which are right."""
    made = make_collection(tmp_path / "data", signal=3.0)
    plan = TrainPlan(made, objective=objective, state_position="before", division=Division(0.3, 0.0), device="cpu",
                     changes={"max_epochs": 1, "rate": 0.01, "normalises": True})  # fmt: skip
    by_outcome = train(plan, datasets_of(plan)).best.held_out_auc
    put_values(made, lambda trace: 0)
    lines = [json.loads(line) for line in (made / VALUES_FILE).read_text().splitlines()]
    for line in list(lines):
        lines += [{**line, "step": step} for step in (1, 2, 4)]
        lines += [{**line, "trace": line["trace"] + 1, "step": step, "is_right": [True] * 4} for step in (1, 2, 3, 4)]
    (made / VALUES_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    valued = dataclasses.replace(plan, labels="values")
    trained = train(valued, datasets_of(valued))
    assert by_outcome > 0.8 and trained.best.held_out_auc < 0.5
    assert trained.metadata["training"]["labels"] == "values"
    with pytest.raises(UserError, match="unknown labels 'value': use outcomes or values"):
        datasets_of(dataclasses.replace(plan, labels="value"))


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"is_right": [True]}, "2 answers, 1 of them graded"),
        ({"answers": [], "is_right": []}, "at least 1 item"),
        ({"step": 0}, "greater than or equal to 1"),
        ({"trace": -1}, "greater than or equal to 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_line(tmp_path, changes, culprit):
    value = {"problem": "p", "trace": 0, "step": 1, "answers": ["1", None], "is_right": [True, False], "num_tokens": 9}
    lines = [json.dumps(value), json.dumps({**value, **changes})]
    (tmp_path / VALUES_FILE).write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=f"line 2: not the value of a prefix .*{culprit}"):
        list(read_values(tmp_path))
