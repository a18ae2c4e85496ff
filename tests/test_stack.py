"""Several judges as one: features known at their moment, weights by what a part tells, each part optional."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from collected import header, make_collection
from gambit.config.trust import ScorerTrust
from gambit.errors import UserError
from gambit.models.files import locate
from gambit.scorers import stack_pool
from gambit.scorers.stack import read_stack
from gambit.scorers.stack_pool import PoolFeatures
from gambit.scorers.stack_states import StateVectors
from gambit.training.dataset import load_dataset
from gambit.training.logistic import calibrating_line, logistic
from gambit.training.ranking import QUARTERS
from gambit.training.stack.features import pool_features
from gambit.training.stack.fit import StackData, cross_fitted, fit_stack, stack_aucs
from gambit.training.stack.parts import StackParts
from gambit.training.storage import ProblemRecord, TraceRecord, state_name, writing
from gambit.types import StatePosition
from verifying import save_qwen2, scorer, told_traces

ALONE = StateVectors(-1, StatePosition.BOUNDARY, torch.zeros(2), torch.ones(2), torch.eye(2))


# -- what is known at a moment ---------------------------------------------------------------------------------


def small_collection(folder, answers, lengths, states=None):
    """One problem; a thought every 10 tokens, and two more tokens at the end."""
    counts = [length // 10 for length in lengths]
    records = [
        TraceRecord(answer=answer, is_correct=answer == "7", num_tokens=length, num_steps=count, end="stop")
        for answer, length, count in zip(answers, lengths, counts, strict=True)
    ]
    made = torch.randn(sum(counts), 2) if states is None else states
    with writing(folder, header(hidden_size=2, positions=("boundary",))) as writer:
        tensors = {
            state_name(-1, "boundary"): made.half(),
            "step_ends": torch.tensor([10 * (i + 1) for count in counts for i in range(count)], dtype=torch.int32),
            "confidences": torch.ones(sum(counts)),
            "tokens": torch.zeros(sum(lengths), dtype=torch.int32),
        }
        writer.add([ProblemRecord(id="p", question="?", gold="7", traces=tuple(records))], tensors)
    return load_dataset(folder, StatePosition.BOUNDARY)


def of_pool(name, data, shares, traces=None, vectors=ALONE):
    chosen = data.all_traces() if traces is None else traces
    return pool_features([name], data, chosen, shares, vectors)[name]


def test_an_answer_counts_once_its_trace_has_ended(tmp_path):
    data = small_collection(tmp_path / "c", ["7", "8", "7.0", None, "8"], [22, 32, 42, 52, 62])
    found = of_pool("agreement", data, QUARTERS, vectors=None)
    assert not found[0.75].any(), "a running trace has no answer"
    odds = [(0, 0), (0, 1), (1, 1), (0, 3), (1, 3)]  # same, others, among those that ended before
    assert np.allclose(found[1.0], [np.log((same + 0.5) / (other + 0.5)) for same, other in odds])


def test_closeness_is_to_thoughts_that_the_others_have_had_by_then(tmp_path):
    right, up = [1.0, 0.0], [0.0, 1.0]
    # Trace 0 looks right at its first thought. The others look up, and right only after trace 0's moment.
    states = torch.tensor([right, right, up, right, up, right, right])
    data = small_collection(tmp_path / "c", ["7", "8", "9"], [22, 22, 32], states)
    found = of_pool("closeness", data, (0.5, 1.0))
    assert found[0.5][0] == pytest.approx(0.0, abs=1e-6), "at token 10 both others look up"
    assert found[1.0][0] == pytest.approx(1.0, abs=1e-6), "at token 22 both look right"


def test_support_is_for_those_who_are_where_a_frequent_answer_came_from(tmp_path):
    """Three traces end first: two looked right and say 7, one looked up and says 8."""
    right, up = [1.0, 0.0], [0.0, 1.0]
    states = torch.tensor([right, right, up, right, up, right, up, right, right])
    data = small_collection(tmp_path / "c", ["7", "7", "8", "7", "8"], [12, 12, 12, 32, 32], states)
    found = of_pool("support", data, (0.5, 1.0))
    assert not of_pool("support", data, (0.5,), np.arange(3))[0.5].any(), "none has ended"
    frequency = np.array([2 / 3, 2 / 3, 1 / 3])
    assert found[0.5][3:].tolist() == pytest.approx([0.0, 0.0]), "three have ended: all of them are the nearest"
    with mock.patch.object(stack_pool, "NEAREST", 1):
        found = of_pool("support", data, (0.5,))
    gaps = [2 / 3 - frequency.mean(), 1 / 3 - frequency.mean()]
    assert found[0.5][[3, 4]].tolist() == pytest.approx([gaps[1], gaps[0]])


def test_what_others_do_later_changes_nothing(tmp_path):
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(12, 2, generator=rng)
    before = small_collection(tmp_path / "a", ["7", "8", "9"], [42, 42, 42], states)
    changed = states.clone()
    changed[11] = -changed[11]  # the last thought of one
    after = small_collection(tmp_path / "b", ["7", "8", "9"], [42, 42, 42], changed)
    features = [of_pool("closeness", data, QUARTERS) for data in (before, after)]
    for share in (0.25, 0.5, 0.75):
        assert np.allclose(features[0][share], features[1][share])
    assert not np.allclose(features[0][1.0], features[1][1.0])


def test_branches_of_one_root_are_one_witness():
    """Three copies of a trace that looks up and says 8 do not outweigh two roots that look right and say 7."""
    right, up = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    pool = PoolFeatures(lambda one, other: False)
    for trace, vector in ((0, right), (1, right), (2, up), (3, right)):
        pool.join(trace)
        pool.thought(trace, 5, vector)
    for child in (4, 5):
        pool.branch(child, 2, 5)
    assert pool.closeness(3) == pytest.approx(2 / 3), "right, right, up"
    assert pool.closeness(4) == pytest.approx(0.0), "its parent and its sibling do not count"
    for trace, answer in ((0, "7"), (1, "7"), (2, "8"), (4, "8"), (5, "8"), (3, "7")):
        pool.end(trace, answer)
    assert pool.agreement(3) == pytest.approx(np.log(2.5 / 1.5)) and pool.agreement(2) == pytest.approx(
        np.log(0.5 / 3.5)
    )
    pool.keep(lambda trace: trace != 0)
    assert pool.agreement(3) == pytest.approx(np.log(1.5 / 1.5)), "a trace that left says nothing"


# -- the fit ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return load_dataset(make_collection(tmp_path_factory.mktemp("c"), 60), StatePosition.BOUNDARY)


def stacked(data, signal, noise_scale=1.0, seed=0):
    """`telling` says the outcome through noise, with a level of its own in each problem; `noise` says nothing."""
    rng = np.random.default_rng(seed)
    right = data.traces.is_correct.astype(float)
    level = rng.normal(0, 3, len(data.problems))[data.traces.problem_of]
    telling = {share: 100 + level + signal * right + rng.normal(0, 1, len(right)) for share in QUARTERS}
    noise = {share: noise_scale * rng.normal(0, 1, len(right)) for share in QUARTERS}
    return StackData(data, data.all_traces(), {"state": telling, "closeness": noise})


def test_weights_follow_what_tells_right_from_wrong_within_a_problem(made):
    data = stacked(made, signal=2.0, noise_scale=50.0)
    lines = fit_stack(data, ["state", "closeness"])
    for line in (lines.running, lines.complete):
        assert line.weights["state"] > 20 * abs(line.weights["closeness"]) * 50 / 3.2
    aucs = [np.nanmean(each) for each in stack_aucs(data, cross_fitted(data, ["state", "closeness"]))]
    assert min(aucs) > 0.88
    useless = [np.nanmean(each) for each in stack_aucs(data, cross_fitted(data, ["closeness"]))]
    assert all(0.35 < auc < 0.65 for auc in useless), "nothing is learnt from the problems that are judged"


def test_its_chances_are_those_of_ending_right(made):
    data = stacked(made, signal=1.0)
    lines = fit_stack(data, ["state", "closeness"])
    chances = np.concatenate([data.chances(lines, share) for share in QUARTERS])
    right = np.tile(made.traces.is_correct, len(QUARTERS))
    assert abs(chances.mean() - right.mean()) < 0.02
    top = chances > np.quantile(chances, 0.8)
    assert abs(chances[top].mean() - right[top].mean()) < 0.1


def test_a_part_that_only_the_end_has_leaves_the_running_line_alone(made):
    data = stacked(made, signal=1.0)
    both = StackData(made, data.traces, {"state": data.features["state"], "agreement": data.features["closeness"]})
    lines = fit_stack(both, ["state", "agreement"])
    assert set(lines.running.weights) == {"state"} and set(lines.complete.weights) == {"state", "agreement"}
    alone = fit_stack(both, ["agreement"])
    assert alone.running.weights == {} and len(set(both.chances(alone, 0.5).tolist())) == 1


def test_logistic_regression_finds_the_line_it_was_given():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20_000, 2, generator=generator).double()
    outcomes = (
        torch.rand(20_000, generator=generator) < (inputs @ torch.tensor([1.0, -2.0]).double()).sigmoid()
    ).float()
    assert torch.allclose(logistic(inputs, outcomes), torch.tensor([1.0, -2.0]).double(), atol=0.1)
    slope, offset = calibrating_line(1000 + 3 * inputs[:, 0], outcomes)
    assert 0.1 < slope < 0.3 and offset == pytest.approx(-1000 * slope, abs=0.2)
    flat, _ = calibrating_line(-inputs[:, 0], outcomes)
    assert 0 < flat < 0.1, "the ranking is not turned round"


# -- the commands ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A model, a collection to train on, one to judge by, and the two judges that are files."""
    folder = tmp_path_factory.mktemp("stack")
    model = save_qwen2(folder / "qwen2-tiny")
    train, dev = told_traces(folder / "train", model, 60), told_traces(folder / "dev", model, 24, seed=1)
    split = ("--data", train, "--validation", "0.2", "--test", "0.3", "--device", "cpu")
    state, verifier = folder / "ridge.safetensors", folder / "lora"
    assert scorer("train", *split, "--objective", "ridge", "--layers", "-1", "--out", state)[0] == 0
    code, _, error = scorer("train", "--architecture", "verifier", "--model", model, *split, "--out", verifier,
                            "--epochs", "4", "--rank", "4", "--rate", "0.01", "--batch-tokens", "800")  # fmt: skip
    assert code == 0, error
    return model, train, dev, state, verifier


def test_a_stack_of_all_parts_shows_what_each_adds(material, tmp_path):
    model, train, dev, state, verifier = material
    out = tmp_path / "stack"
    parts = f"{state},{verifier},confidence,closeness,support,agreement"
    code, said, error = scorer("train", "--architecture", "stack", "--data", train, "--model", model, "--parts", parts,
                               "--out", out, "--device", "cpu")  # fmt: skip
    assert code == 0 and "running: state" in said and "agreement" in said, error
    info = read_stack(out)
    assert (
        info.parts == ("state", "confidence", "verifier", "closeness", "support", "agreement")
        and info.closeness_layer == 1
    )
    assert set(info.metrics) == {"cross_fitted", "alone", "added"}
    assert ScorerTrust.from_json(info.trust).auc[2] == info.metrics["cross_fitted"]["0.75"]["value"]
    code, said, error = scorer("eval", out, state, "--data", dev, "--model", model, "--device", "cpu", "--json")
    assert code == 0, error
    report = json.loads(said)
    mean = {each["name"]: each["mean_auc"]["value"] for each in report["rankings"]}
    assert {"stack", "ridge", "stack: verifier alone", "stack without agreement"} <= set(mean)
    gains = {each["part"]: each["gain"] for each in report["part_gains"]}
    assert set(gains) == set(info.parts) and gains["verifier"]["low"] > 0.05, "only the verifier knows"
    assert mean["stack"] - mean["stack without verifier"] == pytest.approx(gains["verifier"]["value"])
    assert "verifier adds to stack" in " ".join(report["conclusions"])
    code, said, error = scorer("show", f"stack:{out}")
    assert code == 0 and "lines.complete.weights.agreement" in said, error
    code, _, error = scorer("eval", out, "--data", train, "--model", model, "--device", "cpu")
    assert code == 2 and "judge it on another collection" in error


def test_a_stack_may_be_of_few_parts(material, tmp_path):
    _, train, dev, _, _ = material
    out = tmp_path / "small"
    flags = ("--data", train, "--out", out, "--device", "cpu")
    assert scorer("train", "--architecture", "stack", "--parts", "agreement", *flags)[0] == 0
    code, said, error = scorer("eval", f"stack:{out}", "--data", dev, "--device", "cpu", "--json")
    rankings = {each["name"]: each for each in json.loads(said)["rankings"]}
    assert code == 0 and rankings["small"]["auc"]["0.5"]["value"] == 0.5 < rankings["small"]["auc"]["1"]["value"], error
    assert not (out / "verifier.json").exists() and not (out / "vectors.safetensors").exists()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("confidence,wisdom", "'wisdom' is no part of a stack"),
        ("verifier", "'verifier' is no part of a stack"),
        ("agreement,agreement", "one agreement at most"),
    ],
)
def test_a_wrong_part_is_named(parts, message):
    with pytest.raises(UserError, match=message):
        StackParts.parse(parts.split(","))


def test_files_are_told_by_what_they_are(material, tmp_path, monkeypatch):
    (tmp_path / "verifier").symlink_to(material[4])
    monkeypatch.chdir(tmp_path)
    found = StackParts.parse(["agreement", "verifier", str(material[3])])
    assert found.names == ("state", "verifier", "agreement") and found.state == material[3]
    assert str(found.verifier) == "verifier", "a folder may be called as a part is"


def test_too_few_held_out_problems_are_refused(tmp_path, material):
    few = told_traces(tmp_path / "few", material[0], 4)
    code, _, error = scorer("train", "--architecture", "stack", "--data", few, "--out", tmp_path / "s")
    assert code == 2 and "4 held-out problems have right and wrong traces" in error


def test_a_state_scorer_of_another_model_is_no_part(tmp_path):
    own = Path(locate("pawn")) / "scorer.safetensors"
    code, _, error = scorer("train", "--architecture", "stack", "--data", make_collection(tmp_path / "c"),
                            "--out", tmp_path / "stack", "--parts", f"{own},confidence", "--device", "cpu")  # fmt: skip
    assert code == 2 and "scorer.safetensors expects hidden size 256, the collection has 8" in " ".join(error.split())
    assert not (tmp_path / "stack").exists()
