"""The sequence scorer by itself: what the paper says it computes, checkpoints, and one thought at a time."""

import dataclasses

import pytest
import torch

from gambit.errors import UserError
from gambit.scorers.base import HistoryScorer, PastThoughts, ScorerInfo, ThoughtBatch
from gambit.scorers.checkpoint import load_checkpoint, save_checkpoint
from gambit.scorers.sequence import SequenceNetwork, SequenceScorer, SequenceShape, sequence_info
from gambit.types import Aggregation, StatePosition
from support.engine_setups import make_sequence


def test_a_step_knows_what_came_before_and_nothing_after():
    network, states = make_sequence().network, torch.randn(2, 9, 6)
    logits = network(states)
    assert logits.shape == (2, 9) and logits.dtype == torch.float32
    changed = states.clone()
    changed[:, 5, 0] += 1.0  # not all of them: LN would not notice
    moved = (network(changed) - logits).abs()
    assert moved[:, :5].max() == 0 and moved[:, 5:].min() > 1e-6
    padded = torch.cat((states, torch.zeros(2, 4, 6)), dim=1)
    assert torch.allclose(network(padded)[:, :9], logits, atol=1e-6)
    assert network(states.half()).dtype == torch.float32


def test_order_matters_and_a_common_shift_of_the_inputs_does_not():
    network, states = make_sequence(layers=1).network, torch.randn(1, 3, 6)
    swapped = states[:, [1, 0, 2]]
    assert (network(swapped)[0, 2] - network(states)[0, 2]).abs() > 1e-6  # positions are known
    assert torch.allclose(network(3 * states + 2), network(states), atol=1e-4)  # LN comes first


def test_the_window_bounds_what_a_step_sees():
    narrow, states = make_sequence(layers=1, max_thoughts=3).network, torch.randn(1, 8, 6)
    changed = states.clone()
    changed[:, 2, 0] += 1.0
    moved = (narrow(changed) - narrow(states)).abs()[0]
    assert moved[2:5].min() > 1e-6 and moved[5:].max() == 0
    # Only distances count: the same last three thoughts, the same logit.
    assert torch.allclose(narrow(states[:, 5:])[0, -1], narrow(states)[0, -1], atol=1e-5)


@pytest.mark.parametrize("max_thoughts", [1, 4, 1024])
def test_thought_by_thought_equals_the_whole(max_thoughts):
    """Traces of different lengths in one batch, slots in no order."""
    scorer = make_sequence(layers=3, max_thoughts=max_thoughts)
    states, skip = torch.randn(4, 12, 6), [0, 3, 7, 11]
    whole = torch.stack([scorer.network(states[i : i + 1, skip[i] :])[0, -1] for i in range(4)])
    memory, held = scorer.memory(60), [[] for _ in range(4)]
    free = torch.randperm(60, generator=torch.Generator().manual_seed(3)).tolist()
    for thought in range(12):
        rows = [i for i in range(4) if skip[i] <= thought]
        own = [free.pop() for _ in rows]
        scores = scorer.score_next(
            ThoughtBatch(states[rows, thought], torch.zeros(len(rows))),
            memory,
            padded(
                [held[i][-scorer.max_past :] if scorer.max_past else [] for i in rows],
                [len(held[i]) for i in rows],
                own,
            ),
        )
        for i, slot in zip(rows, own, strict=True):
            held[i].append(slot)
    assert torch.allclose(scores, whole.sigmoid(), atol=1e-5)


def padded(lists, positions, own):
    most = max(map(len, lists))
    slots = torch.tensor([[*past, *[0] * (most - len(past))] for past in lists], dtype=torch.long).reshape(
        len(lists), most
    )
    mask = torch.tensor([[True] * len(p) + [False] * (most - len(p)) for p in lists], dtype=torch.bool)
    return PastThoughts(slots, mask.reshape(len(lists), most), torch.tensor(positions), torch.tensor(own))


def test_a_first_thought_is_scored_by_itself():
    scorer, states = make_sequence(), torch.randn(5, 6)
    alone = scorer.score(ThoughtBatch(states, torch.zeros(5)))
    assert torch.allclose(alone, scorer.network(states[:, None])[:, 0].sigmoid()) and ((alone > 0) & (alone < 1)).all()
    first = scorer.score_next(
        ThoughtBatch(states, torch.zeros(5)), scorer.memory(5), padded([[]] * 5, [0] * 5, range(5))
    )
    assert torch.allclose(first, alone, atol=1e-6)
    assert isinstance(scorer, HistoryScorer)


def test_no_trace_and_no_thought_are_fine():
    scorer, none = make_sequence(), ThoughtBatch(torch.zeros(0, 6), torch.zeros(0))
    nobody = PastThoughts(
        torch.zeros(0, 3).long(), torch.ones(0, 3).bool(), torch.zeros(0).long(), torch.zeros(0).long()
    )
    assert scorer.score_next(none, scorer.memory(4), nobody).shape == (0,)
    assert scorer.network(torch.zeros(2, 0, 6)).shape == (2, 0)


def test_a_scorer_on_a_device_is_a_copy():
    shape = SequenceShape(6, width=16)
    network = SequenceNetwork(shape)
    moved = SequenceScorer(sequence_info(shape), network).to(torch.device("cpu"))
    assert network.training and all(p.requires_grad for p in network.parameters())
    assert not moved.network.training and not any(p.requires_grad for p in moved.network.parameters())


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    scorer = make_sequence(max_thoughts=77)
    info = dataclasses.replace(scorer.info, state_position=StatePosition.BEFORE, base_model="tiny")
    path = tmp_path / "s.safetensors"
    save_checkpoint(SequenceScorer(info, scorer.network), path, {"metrics": {"auc": 0.8}})
    loaded = load_checkpoint(path)
    assert loaded.info == info and info.aggregation is Aggregation.LAST and info.architecture == "sequence"
    assert loaded.network.shape == scorer.network.shape
    states = torch.randn(2, 5, 6)
    assert torch.equal(loaded.network(states), scorer.network(states))


def test_weights_that_are_no_numbers_are_refused_by_tensor(tmp_path):
    scorer, path = make_sequence(), tmp_path / "s.safetensors"
    name, weights = next(iter(scorer.network.named_parameters()))
    with torch.no_grad():
        weights.view(-1)[0] = float("nan")
    save_checkpoint(scorer, path)
    with pytest.raises(UserError, match=rf"values of tensor {name} are NaN or infinite: use another checkpoint"):
        load_checkpoint(path)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="width=10"):
        SequenceShape(6, width=10, heads=4)
    scorer, path = make_sequence(), tmp_path / "s.safetensors"
    save_checkpoint(scorer, path, {"shape": {**dataclasses.asdict(scorer.network.shape), "width": 32}})
    with pytest.raises(UserError, match="the weights are not those of SequenceShape"):
        load_checkpoint(path)
    save_checkpoint(scorer, path, {"shape": None})
    with pytest.raises(UserError, match="is not a sequence scorer's: Input should be an object"):
        load_checkpoint(path)
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(UserError, match="cannot be read"):
        load_checkpoint(path)


def test_the_metadata_keep_what_they_said():
    info = ScorerInfo("?", hidden_size=6, boundary_rule="marker", base_model="tiny")
    made = sequence_info(SequenceShape(6), info)
    assert (made.boundary_rule, made.base_model, made.aggregation) == ("marker", "tiny", Aggregation.LAST)
