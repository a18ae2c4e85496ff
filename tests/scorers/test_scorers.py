"""Scorers: the contract of all of them, checkpoints, and what does not fit."""

import dataclasses
import json
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from gambit.config import registry
from gambit.errors import StorageError, UserError
from gambit.scorers.base import MadeFor, ScorerInfo, ThoughtBatch, check_fit, made_for
from gambit.scorers.checkpoint import add_metrics, load_checkpoint, read_metadata, save_checkpoint
from gambit.scorers.mlp import BlendScorer, MlpScorer
from gambit.scorers.sequence import SequenceNetwork, SequenceScorer, SequenceShape
from gambit.scorers.simple import ConfidenceScorer, ConstantScorer, RunScores
from gambit.types import Aggregation, StatePosition


def make_mlp(hidden=6, **changes):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    info = ScorerInfo("mlp", hidden_size=hidden, base_model="tiny", **changes)
    return MlpScorer(info, (random(512, hidden), random(512), random(1, 512) * 0.1, random(1)))


SCORERS = {
    "constant": ConstantScorer(),
    "confidence": ConfidenceScorer(),
    "mlp": make_mlp(),
    "mlp+confidence": BlendScorer(ScorerInfo("mlp+confidence", hidden_size=6), make_mlp(), 0.4),
    "sequence": SequenceScorer(ScorerInfo("sequence"), SequenceNetwork(SequenceShape(6, width=16))),
}


@pytest.mark.parametrize("name", SCORERS)
def test_a_row_is_scored_by_itself(name):
    scorer = SCORERS[name].to(torch.device("cpu"))
    thoughts = ThoughtBatch(torch.randn(9, 6), torch.rand(9))
    scores = scorer.score(thoughts)
    assert scores.shape == (9,) and scores.dtype == torch.float32
    for row in range(9):
        alone = scorer.score(ThoughtBatch(thoughts.states[row : row + 1], thoughts.confidences[row : row + 1]))
        assert torch.allclose(alone, scores[row : row + 1], atol=1e-6)
    if scorer.info.is_probability:
        assert ((scores >= 0) & (scores <= 1)).all()
    assert len(scorer.score(ThoughtBatch(torch.randn(0, 6), torch.rand(0)))) == 0


def test_the_mlp_is_steps():
    scorer = make_mlp()
    w1, b1, w2, b2 = scorer.weights
    states = torch.randn(4, 6)
    expected = torch.sigmoid(torch.relu(states @ w1.T + b1) @ w2.T + b2).squeeze(-1)
    assert torch.allclose(scorer.score(ThoughtBatch(states.half().float(), torch.zeros(4))), expected, atol=2e-2)
    assert torch.allclose(scorer.score(ThoughtBatch(states, torch.zeros(4))), expected, atol=1e-6)


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    scorer = make_mlp(state_position=StatePosition.BEFORE, aggregation=Aggregation.LAST)
    save_checkpoint(scorer, tmp_path / "s.safetensors", {"metrics": {"auc": 0.8}})
    loaded = load_checkpoint(tmp_path / "s.safetensors")
    assert loaded.info == scorer.info
    assert all(torch.equal(a, b) for a, b in zip(loaded.weights, scorer.weights, strict=True))


def test_a_blend_comes_back_as_it_was(tmp_path):
    info = ScorerInfo("mlp+confidence", hidden_size=6, needs_confidence=True)
    scorer = BlendScorer(info, dataclasses.replace(make_mlp(), info=info), 0.25)
    save_checkpoint(scorer, tmp_path / "s.safetensors")
    loaded = load_checkpoint(tmp_path / "s.safetensors")
    assert isinstance(loaded, BlendScorer) and (loaded.info, loaded.slope) == (info, 0.25)
    thoughts = ThoughtBatch(torch.randn(5, 6), torch.rand(5))
    # Not to the last bit: kernels depend on where in memory weights lie.
    torch.testing.assert_close(loaded.score(thoughts), scorer.score(thoughts))


def damaged(path, header=True, without=(), text=None, **changes):
    """A checkpoint with other metadata: changed or missing fields, another text, or none at all."""
    scorer = make_mlp()
    tensors = {name: tensor for name, tensor in scorer.tensors().items() if name not in without}
    save_checkpoint(scorer, path, changes)
    known = {name: value for name, value in read_metadata(path).items() if name not in without}
    save_file(tensors, path, metadata={"gambit": text or json.dumps(known)} if header else None)
    return path


FORGED = [
    ({"header": False}, "it has no Gambit metadata"),
    ({"without": ["state_position"]}, "its metadata must name state_position"),
    ({"without": ["format"]}, "format None, this version reads 1"),
    ({"state_position": "after"}, "state_position: Input should be 'before' or 'boundary'"),
    ({"format": 2}, "format 2, this version reads 1"),
    ({"architecture": "forest"}, "unknown architecture 'forest', known are mlp, mlp+confidence, sequence"),
    ({"architecture": "sequence"}, "shape in s.safetensors is not a sequence scorer's"),
    ({"hidden_size": 7}, "metadata has hidden size 7, the weights take 6"),
    ({"without": ["net.2.bias"]}, "missing keys: net.2.bias"),
    ({"text": "[]"}, "it must be an object, not list"),
    ({"text": "null"}, "it must be an object, not NoneType"),
    ({"text": "5"}, "it must be an object, not int"),
    ({"text": "[" * 100_000}, "recursion"),
    ({"base_model_hash": 10**40}, "base_model_hash: Input should be a valid string"),
    ({"base_model_hash": ["1"]}, "base_model_hash: Input should be a valid string"),
    ({"base_model": 3}, "base_model: Input should be a valid string"),
    ({"is_probability": [1]}, "is_probability: Input should be a valid boolean"),
    ({"is_probability": 1}, "is_probability: Input should be a valid boolean"),
    ({"layers": "-1"}, "layers: Input should be a valid"),
    ({"trust": []}, "trust: Input should be"),
]


@pytest.mark.parametrize(("changes", "message"), FORGED, ids=[str(i) for i in range(len(FORGED))])
def test_a_forged_checkpoint_is_refused_by_name_with_a_remedy(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    path = damaged(Path("s.safetensors"), **changes)
    with pytest.raises(UserError, match=r"s\.safetensors") as error:
        load_checkpoint(path)
    assert message in str(error.value) and "train the scorer again" in str(error.value)


def test_where_a_checkpoint_does_not_fit_on_the_disk_the_file_is_named_and_the_old_one_stays(tmp_path):
    path, scorer = tmp_path / "s.safetensors", make_mlp()
    save_checkpoint(scorer, path)
    path.chmod(0o640)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for write in (lambda: save_checkpoint(scorer, path), lambda: add_metrics(path, {"test": 0.8})):
            with pytest.raises(StorageError, match=f"^cannot write {path}: File too large$"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["s.safetensors"]
    add_metrics(path, {"test": 0.8})
    assert path.stat().st_mode & 0o777 == 0o640, "it stays readable for those who could read it"
    assert read_metadata(path)["metrics"] == {"test": 0.8} and torch.equal(
        load_checkpoint(path).weights[0], scorer.weights[0]
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_tensor(tmp_path, value):
    path, scorer = tmp_path / "s.safetensors", make_mlp()
    scorer.weights[2][0, 1] = value
    save_checkpoint(scorer, path)
    size = scorer.weights[2].numel()
    with pytest.raises(UserError, match=rf"s.safetensors: 1 of the {size} values of tensor net.2.weight are NaN"):
        load_checkpoint(path)
    blend = BlendScorer(dataclasses.replace(scorer.info, architecture="mlp+confidence"), make_mlp(), value)
    save_checkpoint(blend, path)
    with pytest.raises(UserError, match=r"1 of the 1 values of tensor confidence.weight are NaN or infinite"):
        load_checkpoint(path)


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    for content in (b"", b"\x80\x04pickle", b"{}" * 50):
        path.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as a safetensors scorer"):
            load_checkpoint(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_checkpoint(tmp_path / "none.safetensors")


MODEL = MadeFor("the model", 32, "blank-line", "b" * 64)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (ScorerInfo("mlp", hidden_size=2560), "the scorer expects hidden size 2560, the model has 32: give a scorer"),
        (ScorerInfo("mlp", boundary_rule="marker"), "the scorer expects thoughts cut by marker, the model has blank"),
    ],
)
def test_a_scorer_for_another_model_is_refused_with_both_values(info, message):
    with pytest.raises(UserError, match=message):
        check_fit(made_for(info), MODEL)


def test_other_weights_are_a_warning_where_they_may_do_and_an_error_where_they_may_not():
    info = ScorerInfo("mlp", base_model="tiny", base_model_hash="a" * 64)
    differ = "the scorer was made for tiny with weights aaaaaaaaaaaaaaaaaaaa…, the model has bbbbbbbbbbbbbbbbbbbb…"
    assert check_fit(made_for(info), MODEL) == f"{differ}: fine for a quantised variant, wrong for another model"
    with pytest.raises(UserError, match=f"{differ}: give the same"):
        check_fit(made_for(info), MODEL, "give the same", needs_weights=True)
    for other in (ScorerInfo("mlp"), ScorerInfo("mlp", base_model_hash="b" * 64), ConstantScorer.info):
        assert check_fit(made_for(other), MODEL) is None


def test_quantiles_are_of_the_run_so_far():
    scores = RunScores()
    assert [scores.add(x, as_quantile=True) for x in (5.0, 7.0, 1.0, 6.0)] == [0.5, 0.75, 0.5 / 3, 2.5 / 4]
    ties = RunScores()
    assert [ties.add(3.0 + i * 1e-7, as_quantile=True) for i in range(4)] == [0.5, 0.5, 0.5, 0.5]


@given(st.lists(st.integers(0, 1000), min_size=1), st.randoms(use_true_random=False))
def test_scores_that_rounding_has_parted_are_equal_again(values, rng):
    """Also those beside a boundary between two rounded numbers, in whatever order they come."""
    noisy = [value / 1000 + rng.uniform(-1e-6, 1e-6) for value in values]
    scores = RunScores()
    settled = [scores.add(value) for value in noisy]
    assert [settled.index(score) for score in settled] == [values.index(value) for value in values]
    assert [abs(score - value) <= 2.001e-6 for score, value in zip(settled, noisy, strict=True)] == [True] * len(noisy)


def test_scores_that_differ_stay_different():
    scores = RunScores()
    assert [scores.add(value) for value in (0.5, 0.50002, 0.49998, 30.0, 30.0002, 30.002)] == [
        0.5, 0.50002, 0.49998, 30.0, 30.0, 30.002
    ]  # fmt: skip


def test_scorers_are_found_by_name():
    assert registry.load("gambit.scorers", "constant") is ConstantScorer
    assert registry.names("gambit.scorers") == ["confidence", "constant"]
    with pytest.raises(UserError, match="unknown scorer 'constnt': did you mean 'constant'"):
        registry.load("gambit.scorers", "constnt")
    with pytest.raises(UserError, match="unknown policy"):
        registry.load("gambit.policies", "beam")


def test_a_thought_scores_the_same_in_every_batch():
    """To the last bit: equal traces must tie, whatever else is being scored."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(300, 256, generator=generator)
    weights = [torch.randn(shape, generator=generator) / 16 for shape in ((512, 256), (512,), (1, 512), (1,))]
    scorer = MlpScorer(ScorerInfo("mlp", hidden_size=256), tuple(weights))

    def score(rows):
        return scorer.score(ThoughtBatch(rows, torch.zeros(len(rows))))

    together = score(states)
    for size in (1, 2, 3, 5, 17, 64, 129):
        assert torch.equal(score(states[:size]), together[:size])
