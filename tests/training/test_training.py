"""From a collection to a judged scorer: ranking, objectives, fits and reports, on hand-computed cases and made data."""

import dataclasses
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gambit.cli.scorer_work import show_report
from gambit.errors import UserError
from gambit.scorers.base import ThoughtBatch
from gambit.scorers.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from gambit.scorers.simple import ConstantScorer
from gambit.stats import Interval
from gambit.training.dataset import Division, Part, load_dataset, read_labels, with_labels
from gambit.training.evaluate import (
    ScorerComparison,
    check_writable_trust,
    conclusions,
    evaluate,
    judge_scorers,
    report_json,
    trust_of,
    write_figures,
)
from gambit.training.networks import (
    Batch,
    MlpNetwork,
    Scaling,
    Unit,
    as_scorer,
    bce,
    build_network,
    last_thought_bce,
    pairwise,
    prefix,
    recipe_for,
    straight_network,
    terms_of,
)
from gambit.training.plot import draw
from gambit.training.scoring import (
    QUARTERS,
    Pairs,
    Thoughts,
    last_thoughts,
    mean_auc,
    mean_over_problems,
    pairs,
    share_of_pairs,
    thought_scores,
    trace_scores,
)
from gambit.training.train import (
    STRENGTHS,
    Fitted,
    Moments,
    TrainPlan,
    _folds,
    best_of,
    calibrated,
    datasets_of,
    fit,
    info_for,
    parts_of,
    recipes_for,
    scaling_of,
    train,
)
from gambit.types import Aggregation, StatePosition
from support.collected import HIDDEN, make_collection

CPU = torch.device("cpu")


def silent(_):
    """Prints nothing of a fit's progress."""


def quick(objective, architecture="mlp", **changes):
    return dataclasses.replace(recipe_for(objective, architecture), max_epochs=6, patience=6, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_collection(tmp_path_factory.mktemp("collection"), num_problems=60)


@pytest.fixture(scope="module")
def data(folder):
    return load_dataset(folder, StatePosition.BOUNDARY)


# -- ranking ---------------------------------------------------------------------------------------------------


def test_the_last_thought_seen_is_never_before_the_first_and_the_last_at_the_end():
    assert last_thoughts(np.array([0, 1, 3, 10]), 0.1).tolist() == [-1, 0, 0, 0]
    assert last_thoughts(np.array([0, 1, 3, 10]), 0.5).tolist() == [-1, 0, 1, 4]
    assert last_thoughts(np.array([0, 1, 3, 10]), 1.0).tolist() == [-1, 0, 2, 9]
    assert last_thoughts(np.array([10]), 0.3).tolist() == [2], "0.3 × 10 is 3, whatever floats say"


def test_trace_scores_by_hand():
    scores = np.array([0.2, 0.4, 0.9, 0.1])  # a trace of three thoughts, one of none, one of one
    starts, counts = np.array([0, 3, 3]), np.array([3, 0, 1])
    mean, last = Aggregation.MEAN, Aggregation.LAST
    assert trace_scores(scores, starts, counts, 1.0, mean) == pytest.approx([0.5, 0.0, 0.1])
    assert trace_scores(scores, starts, counts, 1.0, last) == pytest.approx([0.9, 0.0, 0.1])
    assert trace_scores(scores, starts, counts, 0.5, mean) == pytest.approx([0.3, 0.0, 0.1])
    assert trace_scores(scores, starts, counts, 0.5, last) == pytest.approx([0.4, 0.0, 0.1])


def test_pairs_by_hand():
    scores = np.array([0.9, 0.5, 0.5, 0.1, 0.7, 0.3])
    is_correct = np.array([True, True, False, False, True, True])
    found = pairs(scores, is_correct, np.array([0, 0, 0, 0, 1, 1]), 2)
    assert found.num_pairs.tolist() == [4, 0] and found.wins.tolist() == [3.5, 0]
    assert found.auc[0] == 0.875 and math.isnan(found.auc[1])


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 4)), min_size=1, max_size=30))
def test_turning_scores_round_turns_the_pairs_round(rows):
    problem_of, is_correct, scores = (np.array(column) for column in zip(*rows, strict=True))
    one = pairs(scores.astype(float), is_correct.astype(bool), problem_of, 4)
    other = pairs(-scores.astype(float), is_correct.astype(bool), problem_of, 4)
    assert np.allclose(one.wins + other.wins, one.num_pairs)
    assert one.num_pairs.sum() == sum(a[1] and not b[1] and a[0] == b[0] for a in rows for b in rows)


def test_intervals_are_over_problems():
    same = mean_over_problems(np.array([0.7] * 30 + [math.nan] * 5))
    assert same.value == pytest.approx(0.7) and same.low == pytest.approx(0.7) and same.high == pytest.approx(0.7)
    coin = mean_over_problems(np.array([0.0, 1.0] * 50))
    assert coin.value == 0.5 and 0.38 < coin.low < 0.43 and 0.57 < coin.high < 0.62
    assert share_of_pairs(Pairs(np.array([1.0, 9.0]), np.array([10.0, 10.0]))).value == 0.5
    assert math.isnan(mean_over_problems(np.array([math.nan])).value)


# -- objectives ------------------------------------------------------------------------------------------------


def batch(logits, num_thoughts, is_correct, problem=(), aggregation=Aggregation.LAST, pos_weight=None):
    weight = None if pos_weight is None else torch.tensor(pos_weight)
    problem, logits = torch.tensor(problem or [0] * len(num_thoughts)), torch.tensor(logits)
    labels = torch.tensor(is_correct).float()[:, None].expand_as(logits)
    return Batch(logits, torch.tensor(num_thoughts), labels, problem, aggregation, weight)


def cross_entropy(logit, label):
    return math.log1p(math.exp(-logit if label else logit))


def test_bce_counts_real_steps_alike():
    made = batch([[1.0, -2.0], [0.5, 99.0]], [2, 1], [True, False])
    expected = (cross_entropy(1, 1) + cross_entropy(-2, 1) + cross_entropy(0.5, 0)) / 3
    assert bce(made).item() == pytest.approx(expected, rel=1e-5)
    balanced = batch([[1.0, -2.0], [0.5, 99.0]], [2, 1], [True, False], pos_weight=3.0)
    expected = (3 * cross_entropy(1, 1) + 3 * cross_entropy(-2, 1) + cross_entropy(0.5, 0)) / 3
    assert bce(balanced).item() == pytest.approx(expected, rel=1e-5)


def test_last_thought_bce_sees_the_last_real_step():
    made = batch([[1.0, -2.0], [0.5, 99.0]], [2, 1], [True, False])
    assert last_thought_bce(made).item() == pytest.approx((cross_entropy(-2, 1) + cross_entropy(0.5, 0)) / 2, rel=1e-5)


def test_prefix_weighs_traces_alike_and_later_steps_more():
    made = batch([[1.0, -2.0], [0.5, 99.0]], [2, 1], [True, False])
    first = (cross_entropy(1, 1) + 2 * cross_entropy(-2, 1)) / 3
    assert prefix(made).item() == pytest.approx((first + cross_entropy(0.5, 0)) / 2, rel=1e-5)


def test_pairwise_compares_within_problems_and_weighs_problems_alike():
    """One thought each, so that every share of them is that thought. Problem 1 has no pair, problem 2 has two."""
    logits = [[2.0], [1.0], [5.0], [0.0], [3.0], [-1.0]]
    made = batch(logits, [1] * 6, [True, False, True, True, False, False], [0, 0, 1, 2, 2, 2])
    zero, two = cross_entropy(2 - 1, 1), (cross_entropy(0 - 3, 1) + cross_entropy(0 + 1, 1)) / 2
    assert pairwise(made).item() == pytest.approx((zero + two) / 2, rel=1e-5)
    assert pairwise(batch([[1.0]], [1], [True])).item() == 0.0


def test_pairwise_compares_running_means_where_a_search_would():
    made = batch([[0.0, 4.0], [0.0, 0.0]], [2, 2], [True, False], aggregation=Aggregation.MEAN)
    torch.manual_seed(0)
    drawn = {round(pairwise(made).item(), 4) for _ in range(30)}
    sigmoid = 1 / (1 + math.exp(-4))
    assert drawn == {round(math.log(2), 4), round(cross_entropy(20 * ((0.5 + sigmoid) / 2 - 0.5), 1), 4)}


def test_objectives_by_name():
    assert terms_of("prefix+pairwise") == ["prefix", "pairwise"]
    with pytest.raises(UserError, match="unknown objective 'margin': use auto, ridge, bce"):
        recipes_for("mlp", "bce+margin", {})
    with pytest.raises(UserError, match=r"unknown architecture 'lstm': use mlp, mlp\+confidence, seq"):
        recipes_for("lstm", "auto", {})


def test_the_published_recipe_is_as_published():
    recipe = recipe_for("bce", "mlp")
    published = (recipe.unit, recipe.batch_size, recipe.rate, recipe.weight_decay, recipe.max_epochs, recipe.patience)
    assert published == (Unit.THOUGHT, 128, 1e-4, 1e-5, 20, 5)
    assert recipe.is_balanced and not recipe.normalises and not recipe.is_decaying and recipe.input_dropout == 0
    paper = recipe_for("last-thought-bce", "sequence")
    theirs = (paper.unit, paper.batch_size, paper.weight_decay, paper.max_epochs, paper.patience, paper.clip)
    assert theirs == (Unit.TRACE, 8, 1e-5, 30, 8, 1.0) and paper.is_balanced and not paper.normalises
    rates = [paper.rate_at(update, 10) for update in (0, 9, 10, 20, 160, 290)]  # ten updates an epoch, alike within one
    assert rates == pytest.approx([5e-5, 5e-5, 1e-4, 1e-4, (1e-4 + 1e-6) / 2, 1e-6 + 3.11e-7], rel=1e-3)
    assert recipe_for("pairwise", "mlp").rate_at(300, 10) == pytest.approx(5e-4)  # others fall in a line
    network = build_network("sequence", 16, None, paper)
    assert (network.shape.layers, network.shape.inner_width, network.blocks[0].dropout.p) == (1, 1024, 0.1)
    states = torch.randn(2, 5, 16)
    network.eval()
    assert torch.equal(network(states), network(states))
    network.train()
    assert not torch.equal(network(states), network(states))


# -- the data --------------------------------------------------------------------------------------------------


def test_the_split_is_by_problem_and_stays_when_problems_join(data):
    division = Division(0.2, 0.2, seed=3)
    parts = {part: set(data.traces.problem_of[data.of_part(division, part)]) for part in Part}
    assert not parts[Part.TRAIN] & parts[Part.TEST] and not parts[Part.TRAIN] & parts[Part.VALIDATION]
    assert len(set().union(*parts.values())) == len(data.problems) == 60
    assert all(parts.values()) and len(parts[Part.TRAIN]) > 24
    assert [division.part_of(f"x{i}") for i in range(9)] == [
        Division(0.2, 0.2, seed=3).part_of(f"x{i}") for i in range(9)
    ]
    with pytest.raises(UserError, match="leave no problem"):
        Division(0.5, 0.5)


def test_steps_are_taken_trace_by_trace(data):
    thoughts = Thoughts.of(data, CPU)
    taken = thoughts.take(torch.tensor([3, 0]))
    for row, trace in zip(taken, (3, 0), strict=True):
        start, count = data.traces.starts[trace], data.traces.num_thoughts[trace]
        assert torch.equal(row[:count], data.states[start : start + count].float()) and not row[count:].any()


# -- networks and fits -----------------------------------------------------------------------------------------


def test_the_normalisation_is_folded_into_the_checkpoint(data):
    spread = Scaling.of(data.states)
    assert torch.allclose(spread.mean, data.states.float().mean(0), atol=1e-3)
    assert torch.allclose(spread.deviation, data.states.float().std(0, correction=0), atol=1e-3)
    torch.manual_seed(1)
    network = MlpNetwork(spread)
    w1, b1, w2, b2 = network.folded()
    states = data.states[:20].float()
    folded = torch.relu(states @ w1.T + b1) @ w2.T + b2
    assert torch.allclose(folded.squeeze(-1), network(states), atol=1e-5)
    assert (w1.shape, w2.shape) == ((512, HIDDEN), (1, 512)), "STEP's own shape"


@pytest.mark.parametrize(
    ("architecture", "objective"),
    [("mlp", "bce"), ("mlp", "prefix+pairwise"), ("sequence", "last-thought-bce"), ("sequence", "pairwise")],
)
def test_a_fit_finds_the_direction_that_tells_right_from_wrong(data, architecture, objective):
    # a batch of 128 thoughts is most of this data: the published rate would need more epochs than a test has
    changes = {"rate": 2e-3, "batch_size": 16, "width": 64}
    fitted = fit(data, Division(), quick(objective, architecture, **changes), info_for(data, architecture), CPU, silent)
    assert fitted.held_out_auc > 0.8
    assert fitted.scorer.info.architecture == architecture
    assert fitted.scorer.info.aggregation is (Aggregation.MEAN if architecture == "mlp" else Aggregation.LAST)


def test_a_fit_is_seeded_and_stops_early(data):
    recipe = dataclasses.replace(recipe_for("bce", "mlp"), max_epochs=40, patience=2, rate=0.05)
    first, second = (fit(data, Division(), recipe, info_for(data, "mlp"), CPU, silent) for _ in range(2))
    assert first.epochs < 40 and first.epochs == first.best_epoch + 2
    assert all(torch.equal(a, b) for a, b in zip(first.scorer.weights, second.scorer.weights, strict=True))
    other = fit(data, Division(), dataclasses.replace(recipe, seed=1), info_for(data, "mlp"), CPU, silent)
    assert not torch.equal(first.scorer.weights[0], other.scorer.weights[0])


def test_too_little_data_is_said_so(tmp_path):
    few = load_dataset(make_collection(tmp_path, num_problems=2), StatePosition.BEFORE)
    with pytest.raises(UserError, match="collect more problems"):
        fit(few, Division(), quick("bce"), info_for(few, "mlp"), CPU, silent)


def test_an_unknown_network_is_refused():
    with pytest.raises(UserError, match="'lstm'"):
        build_network("lstm", 8, None, recipe_for("bce", "mlp"))


@pytest.fixture(scope="module")
def checkpoints(folder, tmp_path_factory):
    """One of each architecture, trained on the same collection."""
    place, found = tmp_path_factory.mktemp("scorers"), {}
    recipes = {"mlp": "prefix+pairwise", "mlp+confidence": "prefix+pairwise", "sequence": "prefix"}
    for architecture, objective in recipes.items():
        plan = TrainPlan(folder, architecture, objective, "boundary", changes={"max_epochs": 3, "width": 32})
        trained = train(plan, datasets_of(plan))
        found[architecture] = place / f"{architecture}.safetensors"
        save_checkpoint(trained.best.scorer, found[architecture], trained.metadata)
    return found


def test_the_best_is_chosen_by_held_out_ranking(folder):
    told = []
    plan = TrainPlan(folder, "mlp", "auto", changes={"max_epochs": 1})
    trained = train(plan, datasets_of(plan), lambda done, total: told.append((done, total)))
    candidates = trained.metadata["candidates"]
    others = ["pairwise", "bce", "bce+pairwise", "prefix+pairwise"]
    assert [each["objective"] for each in candidates] == ["ridge", "ridge", *others]
    assert len(candidates) == told[-1][1]
    scouted = max(candidates[:2], key=lambda each: each["held_out_auc"])
    assert {each["state_position"] for each in candidates[:2]} == {"before", "boundary"}
    assert {each["state_position"] for each in candidates[2:]} == {scouted["state_position"]}
    (chosen,) = (each for each in candidates if each["is_chosen"])
    assert trained.best.held_out_auc == chosen["held_out_auc"] >= scouted["held_out_auc"]
    later = trained.tried[trained.tried.index(trained.best) + 1 :]
    assert not any(each.clearly_outranks(trained.best) for each in later)


def test_a_little_luck_with_a_few_problems_is_no_reason_to_change():
    simple, lucky, better = (ranked(held_out) for held_out in ([0.5, 0.6, math.nan, 0.7], [0.4, 0.8, 0.9, 0.65],
                                                               [0.6, 0.7, math.nan, 0.85]))  # fmt: skip
    assert lucky.held_out_auc > simple.held_out_auc and not lucky.clearly_outranks(simple)
    assert better.clearly_outranks(simple)
    assert best_of([simple, lucky]) is simple and best_of([simple, lucky, better]) is better


def ranked(held_out):
    return Fitted(None, recipe_for("bce", "mlp"), ConstantScorer(), np.array(held_out), 1, 1, 0.0)


def test_the_layer_that_tells_is_found(tmp_path):
    folder = make_collection(tmp_path / "c", layers=(-1, 3, 5), told_by=3)
    plan = TrainPlan(folder, "mlp", "pairwise", "boundary", changes={"max_epochs": 8})
    trained = train(plan, datasets_of(plan))
    tried = {tuple(each["layers"]): each["held_out_auc"] for each in trained.metadata["candidates"]}
    assert set(tried) == {(-1,), (3,), (5,), (-1, 3, 5)}
    assert min(tried[3,], tried[-1, 3, 5]) > 0.75 > 0.7 > max(tried[-1,], tried[5,])
    info = trained.best.scorer.info
    assert info.layers == (3,) and info.hidden_size == HIDDEN
    asked = TrainPlan(folder, "mlp", "pairwise", "boundary", (5, -1))
    assert [data.layers for data in datasets_of(asked)] == [(5, -1)]


@pytest.mark.parametrize("architecture", ["mlp", "mlp+confidence"])
def test_a_line_finds_what_a_network_learns_by_heart(tmp_path, architecture):
    """A weak signal in one of many features, and few problems: the line still ranks problems it has not seen."""
    made = make_collection(tmp_path / "c", num_problems=160, signal=0.5, hidden_size=128)
    plan = TrainPlan(made, architecture, "ridge", "boundary", division=Division(0.15, 0.4))
    trained = train(plan, datasets_of(plan))
    assert trained.best.recipe.weight_decay in STRENGTHS
    report = judge({"line": trained.best.scorer, **fitted_by_descent(plan)}, made, plan.division)
    assert report["line"] > 0.65 and report["line"] > report["pairwise"] + 0.03, report


def fitted_by_descent(plan):
    trained = train(dataclasses.replace(plan, objective="pairwise"), datasets_of(plan))
    return {"pairwise": trained.best.scorer}


def judge(scorers, folder, division):
    """Mean AUC on the problems that no fit has seen."""
    data = load_dataset(folder, StatePosition.BOUNDARY)
    unseen = data.of_part(division, Part.TEST)
    known = data.traces
    found = {}
    for name, scorer in scorers.items():
        thoughts = thought_scores(scorer, data, unseen, CPU)
        ranked = [
            pairs(trace_scores(thoughts, known.starts[unseen], known.num_thoughts[unseen], share, Aggregation.MEAN),
                  known.is_correct[unseen], known.problem_of[unseen], len(data.problems))
            for share in QUARTERS
        ]  # fmt: skip
        found[name] = float(np.nanmean(mean_auc(ranked)))
    return found


def test_a_line_is_the_best_one_there_is(data):
    """Solved, it beats any other of the same penalty; calibrated, its probabilities are right on average."""
    thoughts = Thoughts.of(data, CPU)
    train_traces, _ = parts_of(data, Division())
    spread = scaling_of(data, train_traces)
    moments = Moments.of(thoughts, train_traces, spread)
    covariance, slant = moments.covariance / moments.count, moments.slant / moments.count
    scale = covariance.diagonal().sqrt()

    def error(weights):
        fit_error = weights @ covariance @ weights / 2 - weights @ slant
        return float(fit_error + ((weights * scale) ** 2).sum() / 2)

    best = moments.solved(1.0)
    for direction in torch.randn(20, len(best), generator=torch.Generator().manual_seed(0)):
        assert error(best) < error(best + 0.01 * direction)
    weights, bias = calibrated(best, thoughts, train_traces, spread)
    rows = thoughts.thought_rows(torch.from_numpy(train_traces))
    chances = (((thoughts.states[rows[:, 1]].float() - spread.mean) / spread.deviation) @ weights + bias).sigmoid()
    assert float(chances.mean()) == pytest.approx(float(thoughts.is_correct[rows[:, 0]].float().mean()), abs=1e-3)


def test_what_some_problems_add_can_be_taken_away(data):
    """So cross-validation solves for the others without reading them again."""
    thoughts = Thoughts.of(data, CPU)
    train_traces, _ = parts_of(data, Division())
    spread = scaling_of(data, train_traces)
    is_first = data.traces.problem_of[train_traces] % 2 == 0
    some, others = (Moments.of(thoughts, train_traces[mask], spread) for mask in (is_first, ~is_first))
    left = Moments.sum([some, others]) - some
    assert left.count == others.count
    torch.testing.assert_close(left.solved(0.3), others.solved(0.3), atol=1e-4, rtol=1e-3)


def test_a_judged_line_is_solved_again_with_the_problems_it_was_judged_by(folder):
    plan = TrainPlan(folder, "mlp", "ridge", "boundary")
    (data,) = datasets_of(plan)
    best = train(plan, [data]).best
    train_traces, held_out = parts_of(data, plan.division)
    thoughts, spread = Thoughts.of(data, CPU), scaling_of(data, train_traces)
    everything = np.concatenate([train_traces, held_out])
    line = Moments.of(thoughts, everything, spread).solved(best.recipe.weight_decay)
    expected = straight_network("mlp", spread, *calibrated(line, thoughts, everything, spread)).folded()
    for weights, same in zip(best.scorer.weights, expected, strict=True):
        torch.testing.assert_close(weights, same, atol=1e-4, rtol=1e-3)


def test_problems_are_cross_validated_whole_and_one_alone_not_at_all():
    problem_of = np.array([3, 3, 8, 8, 8, 13])
    folds = _folds(np.arange(6), problem_of)
    assert [fold.tolist() for fold in folds] == [[0, 1], [2, 3, 4], [5]]
    with pytest.raises(UserError, match="collect more"):
        _folds(np.arange(2), problem_of[:2])


def test_no_line_remembers_thoughts(folder):
    plan = TrainPlan(folder, "sequence", "ridge", "boundary")
    with pytest.raises(UserError, match="cannot be a straight line"):
        train(plan, datasets_of(plan))


# -- labels ----------------------------------------------------------------------------------------------------


def labels_file(path, data, label_of):
    """A label of every thought of the traces for which there is one."""
    lines = []
    for problem in data.problems:
        for number, trace in enumerate(problem.traces):
            if (label := label_of(number)) is not None:
                lines.append({"problem": problem.id, "trace": number, "labels": [label] * trace.num_thoughts})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_file_labels_each_thought_and_traces_without_labels_keep_their_outcome(data, tmp_path):
    source = labels_file(tmp_path / "l.jsonl", data, lambda trace: 0.25 if trace == 2 else None)
    found = with_labels(data, read_labels(source), source)
    outcomes, second = data.thought_labels, np.isin(np.arange(len(data.traces.starts)) % 6, 2)
    is_second = np.repeat(second, data.traces.num_thoughts)
    assert set(found.thought_labels[is_second]) == {0.25} and found.labelled_by == "l.jsonl"
    assert (found.thought_labels[~is_second] == outcomes[~is_second]).all()
    assert with_labels(data, read_labels("outcomes"), "outcomes") is data


@pytest.mark.parametrize("objective", ["ridge", "bce", "prefix+pairwise"])
def test_a_fit_follows_the_labels(tmp_path, objective):
    """Labels that contradict the outcomes turn the scorer round; even traces are right."""
    made = make_collection(tmp_path / "data", signal=3.0)
    plan = TrainPlan(made, objective=objective, state_position="before", division=Division(0.3, 0.0), device="cpu",
                     changes={"max_epochs": 1, "rate": 0.01, "normalises": True})  # fmt: skip
    by_outcome = train(plan, datasets_of(plan)).best.held_out_auc
    labels = labels_file(tmp_path / "l.jsonl", load_dataset(made, StatePosition.BEFORE), lambda trace: trace % 2)
    turned = dataclasses.replace(plan, labels=labels)
    trained = train(turned, datasets_of(turned))
    assert by_outcome > 0.8 and trained.best.held_out_auc < 0.5
    assert trained.metadata["training"]["labels"] == "l.jsonl"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"problem": "p0", "trace": 0, "labels": [0.5]},
            r"1 labels for trace 0 of p0, which has \d thoughts",
        ),
        ({"problem": "none", "trace": 0, "labels": [0.5]}, "labels no trace of this collection: name its problems"),
        (
            {"problem": "p0", "trace": 0, "labels": [1.5]},
            r"line 1 is not labels: labels.0: .*less than or equal to 1",
        ),
        ({"problem": "p0", "trace": -1, "labels": []}, r"line 1 is not labels: trace: .*greater than or equal to 0"),
    ],
)
def test_labels_that_fit_no_trace_are_refused(data, tmp_path, line, message):
    (tmp_path / "l.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=message):
        with_labels(data, read_labels(str(tmp_path / "l.jsonl")), str(tmp_path / "l.jsonl"))
    with pytest.raises(UserError, match=r"unknown labels 'values': use outcomes, or a \.jsonl file"):
        read_labels("values")


def test_confidence_beside_states_tells_what_states_cannot(tmp_path):
    folder = make_collection(tmp_path / "c", signal=0.2, confidence_signal=1.0)
    found = {}
    for architecture in ("mlp", "mlp+confidence"):
        plan = TrainPlan(folder, architecture, "pairwise", "boundary", changes={"max_epochs": 20})
        found[architecture] = train(plan, datasets_of(plan)).best
    assert found["mlp"].held_out_auc < 0.9 < found["mlp+confidence"].held_out_auc
    scorer = found["mlp+confidence"].scorer
    assert scorer.slope > 0 and scorer.info.needs_confidence and scorer.info.hidden_size == HIDDEN


def test_a_folded_blend_scores_as_the_network_it_was(folder, data):
    plan = TrainPlan(folder, "mlp+confidence", "bce+pairwise", "boundary", changes={"max_epochs": 2})
    blended = datasets_of(plan)[0].with_confidences()
    spread = Scaling.of(blended.states)
    network = build_network("mlp+confidence", blended.states.shape[-1], spread, recipe_for("bce", "mlp"))
    torch.nn.init.constant_(network.rise, 0.02)
    scorer = as_scorer(network, info_for(data, "mlp+confidence"))
    thoughts = ThoughtBatch(data.states.float(), torch.from_numpy(data.traces.confidences))
    with torch.no_grad():
        expected = network(blended.states.float()).sigmoid()
    torch.testing.assert_close(scorer.score(thoughts), expected, atol=2e-4, rtol=0)  # features are halves
    torch.testing.assert_close(scorer.whole(scorer.part(thoughts.states), thoughts.confidences), scorer.score(thoughts))


def test_a_collection_without_confidences_is_refused(tmp_path):
    plan = TrainPlan(make_collection(tmp_path / "c", has_confidence=False), "mlp+confidence", "pairwise", "boundary")
    with pytest.raises(UserError, match="holds no confidences"):
        train(plan, datasets_of(plan))


def test_a_checkpoint_says_where_it_comes_from(checkpoints, data):
    for architecture, path in checkpoints.items():
        info, metadata = load_checkpoint(path).info, read_metadata(path)
        assert info == dataclasses.replace(info_for(data, architecture), trust=info.trust)
        assert (info.base_model, info.base_model_hash, info.hidden_size) == ("tiny", "0" * 64, HIDDEN)
        assert metadata["training"]["collection"] == "abc" and metadata["training"]["source"] == "made.jsonl"
        assert metadata["metrics"]["held_out_auc"] > 0.5


def test_a_new_checkpoint_says_how_far_it_can_be_trusted_on_problems_it_never_saw(checkpoints, folder):
    for path in checkpoints.values():
        trust = load_checkpoint(path).info.trust
        found = judge_scorers([str(path)], folder, "test", device="cpu")
        assert trust == trust_of(found, path.stem) and trust.base_model == "tiny" and trust.num_problems == 11


def test_figures_are_written_into_a_checkpoint_beside_its_weights(checkpoints, folder, tmp_path):
    other = make_collection(tmp_path / "other", num_problems=30, seed=9)
    path = shutil.copy(checkpoints["mlp"], tmp_path / "mlp.safetensors")
    before = load_checkpoint(path)
    report = judge_scorers([str(path)], other, "all", device="cpu")
    write_figures([str(path)], report)
    after = load_checkpoint(path)
    assert after.info.trust == trust_of(report, "mlp") != before.info.trust and after.info.trust.num_problems == 30
    assert all(torch.equal(one, two) for one, two in zip(before.weights, after.weights, strict=True))
    assert read_metadata(path)["metrics"].keys() == {"held_out_auc", "test"}


@pytest.mark.parametrize(("name", "part", "message"), [
    ("confidence", "auto", "'confidence' is no checkpoint"),
    ("mlp", "train", "fitted to this collection.*--part train"),
    ("mlp", "all", "fitted to this collection.*--part all"),
])  # fmt: skip
def test_figures_that_flatter_are_not_written(checkpoints, folder, name, part, message):
    with pytest.raises(UserError, match=message):
        check_writable_trust([str(checkpoints.get(name, name))], folder, part)


def test_scores_of_an_evaluation_are_those_of_the_scorer(checkpoints, data):
    traces = np.array([0, 5])
    scorer = load_checkpoint(checkpoints["mlp"])
    scores = thought_scores(scorer, data, traces, CPU)
    start, count = data.traces.starts[5], data.traces.num_thoughts[5]
    states = data.states[start : start + count].float()
    expected = scorer.score(ThoughtBatch(states, torch.zeros(count)))
    assert scores[start : start + count] == pytest.approx(expected.tolist(), abs=1e-6)
    assert not scores[data.traces.starts[1] : data.traces.starts[2]].any()
    history = load_checkpoint(checkpoints["sequence"])
    expected = history.network(states[None]).sigmoid()[0]
    assert thought_scores(history, data, traces, CPU)[start : start + count] == pytest.approx(
        expected.tolist(), abs=1e-5
    )


def test_a_history_scorer_of_somebody_else_is_asked_step_by_step(checkpoints, data):
    """Only what the protocol offers: the sequence scorer behind it must come out the same either way."""
    inner = load_checkpoint(checkpoints["sequence"])

    class Theirs:
        info, max_past = inner.info, inner.max_past

        def to(self, device):
            return self

        memory, score_next, score = inner.memory, inner.score_next, inner.score

    traces = data.all_traces()[:40]
    assert thought_scores(Theirs(), data, traces, CPU) == pytest.approx(
        thought_scores(inner, data, traces, CPU), abs=1e-4
    )


# -- judging ---------------------------------------------------------------------------------------------------


def test_a_report_says_that_a_scorer_beats_the_baselines(checkpoints, folder, tmp_path):
    other = make_collection(tmp_path / "other", num_problems=50, seed=9, id="other", source="other.jsonl")
    report = judge_scorers([str(checkpoints["mlp"]), str(checkpoints["sequence"])], other, "auto", device="cpu")
    assert (report.num_problems, report.num_mixed, report.num_traces) == (50, 50, 300)
    by_name = {ranking.name: ranking for ranking in report.rankings}
    assert list(by_name) == ["mlp", "sequence", "fewer tokens", "fewer thoughts", "token confidence"]
    assert by_name["mlp"].auc[1.0].value > 0.9 > by_name["mlp"].auc[0.1].value
    assert by_name["token confidence"].mean_auc.low < 0.5 < by_name["token confidence"].mean_auc.high
    assert by_name["fewer thoughts"].mean_auc.low > 0.5, "wrong traces of this data are longer"
    assert "mlp beats every baseline" in conclusions(report)
    assert all(0 <= each.error <= 1 and sum(b.count for b in each.bins) == 300 for each in by_name["mlp"].calibration)
    plain = json.loads(json.dumps(report_json(report)))
    assert plain["rankings"][0]["auc"]["0.5"]["value"] == by_name["mlp"].auc[0.5].value


def test_the_plot_has_a_row_for_each_scorer_and_each_bin_of_its_calibration(checkpoints, data):
    report = evaluate(
        {name: (load_checkpoint(checkpoints[name]), data) for name in ("mlp", "sequence")}, data.all_traces(), CPU
    )
    drawn = draw(report)
    titles = re.findall(r'class="title"[^>]*>([^<]*)', drawn)
    assert titles == [
        "AUC within problems, mean of the four",
        *(f"AUC at {percent}% of the thoughts" for percent in (25, 50, 75, 100)),
        *(f"pairs ranked right at {percent}%" for percent in (50, 100)),
        *(f"{name}: share of right traces" for name in ("mlp", "sequence")),
    ]
    said = "; ".join(f"{each.name} {each.auc[0.5].value:.3f}" for each in report.rankings)
    assert f"<title>AUC at 50% of the thoughts: {said}</title>" in drawn
    bins = [each for ranking in report.rankings if ranking.calibration for each in ranking.calibration[-1].bins]
    assert drawn.count("<circle") == 7 * len(report.rankings) + len(bins)


def of_problems(data, *problems):
    return np.flatnonzero(np.isin(data.traces.problem_of, problems))


def test_one_problem_has_no_interval_and_shows_nothing(checkpoints, data, capsys):
    scorer = load_checkpoint(checkpoints["mlp"])
    report = evaluate({"mlp": (scorer, data)}, of_problems(data, 0), CPU)
    assert report.num_mixed == 1
    value = report.rankings[0].mean_auc.value
    assert str(report.rankings[0].mean_auc) == f"{value:.3f}" and report_json(report)["rankings"][0]["mean_auc"] == {
        "value": value, "low": None, "high": None,
    }  # fmt: skip
    first, *others = conclusions(report)
    assert first == "only 1 problem has right and wrong traces: no difference is claimed from fewer than 20"
    assert others and all(re.fullmatch(r"mlp is not shown to beat .*: mean AUC [+-]\d\.\d{3}", line) for line in others)
    show_report(report)
    assert not re.search(r"(\d\.\d{3}) \(\1.\1\)", capsys.readouterr().out)


@pytest.mark.parametrize(("num_problems", "is_claimed"), [(19, False), (20, True)])
def test_nothing_is_claimed_from_fewer_than_twenty_problems(checkpoints, data, num_problems, is_claimed):
    scorer = load_checkpoint(checkpoints["mlp"])
    report = evaluate({"mlp": (scorer, data)}, of_problems(data, *range(num_problems)), CPU)
    assert report.num_mixed == num_problems and report.comparisons[-1].gain.low > 0
    assert ("mlp beats every baseline" in conclusions(report)) == is_claimed
    assert any("beats" in line for line in conclusions(report)) == is_claimed


def test_an_interval_without_a_width_shows_nothing():
    assert ScorerComparison("a", "b", Interval(0.5, 0.5, 0.5), 50).verdict == "is not shown to beat"
    assert ScorerComparison("a", "b", Interval(0.5, 0.4, 0.6), 50).verdict == "beats"
    assert ScorerComparison("a", "b", Interval(-0.5, -0.6, -0.4), 50).verdict == "is worse than"


def test_a_report_says_that_a_scorer_does_not(data):
    report = evaluate({"constant": (ConstantScorer(), data)}, data.all_traces(), CPU)
    words = conclusions(report)
    assert any(line.startswith("constant is worse than fewer thoughts: mean AUC -0.") for line in words), words
    assert any(line.startswith("constant is not shown to beat token confidence") for line in words), words
    assert report.rankings[0].mean_auc.value == 0.5


def test_a_scorer_is_judged_by_problems_it_never_saw(checkpoints, folder, data, tmp_path):
    names = [str(checkpoints["mlp"])]
    report = judge_scorers(names, folder, "auto", device="cpu")
    unseen = data.of_part(Division(), Part.TEST)
    assert report.num_traces == len(unseen) < len(data.all_traces())
    assert judge_scorers(names, folder, "all", device="cpu").num_traces == len(data.all_traces())
    again = make_collection(tmp_path / "again", num_problems=len(data.problems), seed=3, id="again")
    assert judge_scorers(names, again, "auto", device="cpu").num_traces == len(unseen), "other traces, same problems"
    with pytest.raises(UserError, match="unknown part 'dev'"):
        judge_scorers(names, folder, "dev", device="cpu")


def test_a_scorer_for_other_states_is_refused(checkpoints, tmp_path):
    wide = make_collection(tmp_path / "wide", num_problems=5, hidden_size=12)
    with pytest.raises(UserError, match="mlp expects hidden size 8, the collection has 12"):
        judge_scorers([str(checkpoints["mlp"])], wide, "auto", device="cpu")
    before = make_collection(tmp_path / "before", num_problems=5, positions=("before",))
    with pytest.raises(UserError, match=r"'boundary' are wanted, .* holds before"):
        judge_scorers([str(checkpoints["mlp"])], before, "auto", device="cpu")
    other = make_collection(tmp_path / "other", num_problems=5, model_hash="1" * 64)
    said = []
    judge_scorers([str(checkpoints["mlp"])], other, "all", device="cpu", warn=said.append)
    assert len(said) == 1 and "0000" in said[0] and "1111" in said[0]
