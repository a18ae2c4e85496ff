"""Checkpoints of STEP and of the authors of Gambit score as their own code does, or are refused by a sentence."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gambit.cli.app import app
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.events import Scored
from gambit.scorers.authors import load_torch_scorer
from gambit.scorers.base import PastThoughts, ScorerInfo, ThoughtBatch
from gambit.scorers.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from gambit.scorers.sequence import SequenceScorer
from gambit.solver import Solver
from gambit.types import Aggregation, StatePosition
from support.authors import CHECKPOINTS, FOLDER, SAMPLE, WHOLE
from support.tiny import tiny_model, tiny_tokenizer

NEAR = 1e-5  # by which scores may differ from theirs
KNOWN = np.load(FOLDER / "authors_scores.npz")
STATES = torch.from_numpy(KNOWN["states"])


def read(name):
    return torch.load(FOLDER / f"{name}.pt", weights_only=False)


def thought_by_thought(scorer):
    """Scores as an engine does: a thought of each trace at a time, with what is remembered of those before it."""
    num_traces, num_thoughts, _ = STATES.shape
    memory, scores = scorer.memory(num_traces * num_thoughts), []
    slots = torch.arange(num_traces * num_thoughts).view(num_traces, num_thoughts)
    for now in range(num_thoughts):
        past = PastThoughts(
            slots[:, :now], torch.ones(num_traces, now, dtype=torch.bool), torch.full((num_traces,), now), slots[:, now]
        )
        scores.append(scorer.score_next(ThoughtBatch(STATES[:, now], torch.zeros(num_traces)), memory, past))
    return torch.stack(scores, dim=1)


def scores_of(scorer):
    if isinstance(scorer, SequenceScorer):
        return thought_by_thought(scorer)
    flat = STATES.flatten(0, 1)
    return scorer.score(ThoughtBatch(flat, torch.zeros(len(flat)))).view(STATES.shape[:2])


def test_the_sample_in_the_repository_is_of_the_whole_set():
    """Without the whole set beside the repository the sample is all there is, and it must not be empty."""
    assert len(list(SAMPLE.glob("*.pt"))) == 3 and sum(path.stat().st_size for path in SAMPLE.iterdir()) < 1_200_000
    for path in SAMPLE.glob("*.pt") if WHOLE is not None else ():
        assert path.read_bytes() == (WHOLE / path.name).read_bytes()
    sample = np.load(SAMPLE / "authors_scores.npz")
    assert all(np.array_equal(sample[name], KNOWN[name]) for name in sample.files)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.parametrize("is_imported", [False, True])
def test_every_thought_scores_as_in_the_authors_code(path, is_imported, tmp_path):
    scorer = load_checkpoint(path)
    if is_imported:
        save_checkpoint(scorer, tmp_path / "s.safetensors")
        scorer = load_checkpoint(tmp_path / "s.safetensors")
    assert np.abs(scores_of(scorer).numpy() - KNOWN[path.stem]).max() < NEAR
    assert scorer.info.hidden_size == 64 and scorer.info.state_position is StatePosition.BOUNDARY
    assert scorer.info.aggregation is Aggregation.MEAN, "also of a sequence scorer: the mean over thoughts"


def test_the_imported_checkpoint_says_how_a_trace_is_scored(tmp_path):
    scorer = load_torch_scorer(FOLDER / "authors_seq.pt", ScorerInfo("", hidden_size=64, base_model="org/name"))
    save_checkpoint(scorer, tmp_path / "s.safetensors")
    metadata = read_metadata(tmp_path / "s.safetensors")
    assert metadata["aggregation"] == "mean" and metadata["base_model"] == "org/name"
    assert metadata["shape"] == {"features": 64, "width": 64, "layers": 1, "heads": 4, "max_thoughts": 4096,
                                 "mlp_width": 256, "rope_base": 10_000.0}  # fmt: skip


@pytest.mark.parametrize("base", [300, 500])
def test_the_base_of_the_rotation_is_the_files_own(base, tmp_path):
    """Read with another one, scores differ by more than rounding does."""
    content = read("authors_seq")
    content["model_config"]["rope_base"] = base
    for name in [name for name in content["model_state_dict"] if name.endswith("inv_freq")]:
        content["model_state_dict"][name] = base ** (-torch.arange(8) / 8)
    torch.save(content, tmp_path / "other.pt")
    scorer = load_checkpoint(tmp_path / "other.pt")
    assert scorer.network.shape.rope_base == base
    assert np.abs(scores_of(scorer).numpy() - KNOWN["authors_seq"]).max() > NEAR


def changed(name, **changes):
    """A checkpoint of theirs with other tensors (None: without one) or another configuration."""
    content = read(name)
    content["model_config"] = {**content.get("model_config", {}), **changes.pop("config", {})}
    state = {**content["model_state_dict"], **{key.replace("__", "."): value for key, value in changes.items()}}
    return {**content, "model_state_dict": {key: value for key, value in state.items() if value is not None}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            changed("authors_mlp3", net__2__bias=None),
            "not an MLP scorer; missing keys: net.2.bias; unknown keys: none",
        ),
        (changed("authors_mlp3", net__2__weight=torch.ones(64, 4)), "shapes do not fit an MLP scorer"),
        (changed("authors_mlp3", net__4__bias=torch.tensor([math.nan])), "1 of the 1 values of tensor net.4.bias"),
        (changed("authors_mlp3", extra=torch.ones(1)), "unknown keys: extra"),
        (changed("authors_seq", head__bias=None), "missing keys: head.bias"),
        (changed("authors_seq", layers__0__ffn__gate__weight=None), "no matrix layers.0.ffn.gate.weight"),
        (changed("authors_seq", config={"rope_base": 300}), "is not that of 4 heads and rope_base 300"),
        (changed("authors_seq", config={"nhead": 5}), "width a multiple of twice the heads"),
        (changed("authors_seq", config={"nhead": "many"}), "its model_config fits no sequence scorer"),
        (changed("authors_seq", head__weight=torch.ones(1, 3)), "the weights are not those of"),
        (changed("authors_seq", head__bias=torch.tensor([math.inf])), "1 of the 1 values of tensor head.bias"),
    ],
)
def test_what_is_no_checkpoint_of_theirs_is_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "wrong.pt")
    with pytest.raises(UserError) as error:
        load_checkpoint(tmp_path / "wrong.pt")
    assert message in str(error.value) and "wrong.pt" in str(error.value)


def test_a_torch_file_for_another_hidden_size_is_refused():
    with pytest.raises(UserError, match=r"authors_mlp2\.pt expects hidden size 64"):
        load_torch_scorer(FOLDER / "authors_mlp2.pt", ScorerInfo("", hidden_size=32, base_model="tiny"))


def test_a_torch_file_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"cannot read nowhere\.pt: No such file"):
        load_checkpoint(FOLDER.__class__("nowhere.pt"))


def test_a_deep_scorer_is_the_same_on_its_device_and_in_any_batch():
    scorer = load_checkpoint(FOLDER / "authors_mlp3.pt")
    moved, flat = scorer.to(torch.device("cpu")), STATES.flatten(0, 1)
    assert dataclasses.replace(moved, weights=()) == dataclasses.replace(scorer, weights=())
    whole = scorer.score(ThoughtBatch(flat, torch.zeros(len(flat))))
    alone = torch.cat([moved.score(ThoughtBatch(row[None], torch.zeros(1))) for row in flat[:7]])
    assert torch.equal(whole[:7], alone)


@pytest.mark.contract
@pytest.mark.parametrize("name", ["authors_mlp3", "authors_seq"])
def test_a_search_takes_the_file_as_it_is_and_a_traces_score_is_the_mean_over_its_thoughts(name, tmp_path):
    tiny_model(hidden_size=64, head_dim=16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    scores = {}

    def follow(event):
        if isinstance(event, Scored):
            for trace, score in zip(event.traces, event.scores, strict=True):
                scores.setdefault(trace, []).append(score)

    with Solver(str(tmp_path), scorer=str(FOLDER / f"{name}.pt"), engine="local", device="cpu") as solver:
        config = SearchConfig(policy="sc", capacity=4, max_new_tokens=60, temperature=1.5, top_p=1.0, top_k=0)
        result = solver.solve("a=1", config, on_event=follow)
    assert max(map(len, scores.values())) > 1
    for trace, found in scores.items():
        assert result.traces[trace].score == pytest.approx(sum(found) / len(found), abs=1e-6)


def test_what_a_torch_file_is_for_can_be_shown():
    done = CliRunner().invoke(app, ["scorer", "show", str(FOLDER / "authors_seq.pt"), "--json"])
    shown = json.loads(done.stdout)
    assert (shown["architecture"], shown["aggregation"], shown["hidden_size"]) == ("sequence", "mean", 64)
