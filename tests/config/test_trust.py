"""Trust in a scorer: what a checkpoint says of it, and the islands, swaps and warm-up that follow."""

import dataclasses
import itertools
import math

import pytest
import torch
from benchmarks.noisy_scorer import auc_at, noise_for, trusted_as, with_noise

from gambit.config.options import SearchConfig
from gambit.config.presets import ModelDefaults, Preset, resolve
from gambit.config.trust import RULES, ScorerTrust, reason_for, rule_for
from gambit.errors import UserError
from gambit.scorers.base import ScorerInfo
from gambit.scorers.checkpoint import load_checkpoint, save_checkpoint
from gambit.scorers.mlp import MlpScorer
from gambit.scorers.simple import ConfidenceScorer
from gambit.stats import FEWEST_PROBLEMS
from gambit.training.dataset import load_dataset
from gambit.types import StatePosition
from support.collected import make_collection


def trusted(halfway: float, num_problems: int = 100) -> ScorerTrust:
    return ScorerTrust(auc=(0.5, halfway, 0.9, 0.9), num_problems=num_problems, base_model="tiny", source="made.jsonl")


def pool_of(trust, of_model=Preset(), **options):  # noqa: B008
    settings, _ = resolve(SearchConfig(**options), ModelDefaults(of_model), 1000, is_probability=False, trust=trust)
    return settings.pool.islands, settings.pool.swap_size, settings.pool.warmup_tokens


# -- the rule --------------------------------------------------------------------------------------------------


def test_the_less_a_scorer_is_trusted_the_smaller_are_its_islands():
    """The better the scorer, the more traces compete with each other and the more of them are replaced at once."""
    assert [rule.from_auc for rule in RULES] == sorted((rule.from_auc for rule in RULES), reverse=True)
    assert RULES[-1].from_auc == 0, "every scorer has a rule"
    for better, worse in itertools.pairwise(RULES):
        assert better.island_size >= worse.island_size and better.least_warmup <= worse.least_warmup
        assert better.margin <= worse.margin and better.has_floor >= worse.has_floor
    for rule in RULES:
        assert 1 <= rule.swaps_per_island <= rule.island_size / 2, "a parent and a victim for every swap"


def test_islands_swaps_and_warmup_follow_from_the_auc_at_half_way():
    for rule in RULES:
        islands, swaps, warmup = pool_of(trusted(rule.from_auc), capacity=64)
        assert (islands, swaps) == (64 // rule.island_size, 64 // rule.island_size * rule.swaps_per_island)
        assert warmup == 500, "half of what a trace may have: no length is known"


def test_the_warmup_is_half_a_trace_of_the_problems_that_the_scorer_was_judged_on():
    """Not half of what a trace may have: a limit is often far above what traces take, and then nothing would branch."""
    known = trusted(0.7).model_copy(update={"median_tokens": 300.0})
    assert pool_of(known)[2] == 150
    assert pool_of(known, Preset(median_length=80))[2] == 40, "the model's own lengths come first"
    assert pool_of(known, warmup_tokens=12)[2] == 12
    settings, _ = resolve(
        SearchConfig(), ModelDefaults(Preset(median_length=500.0)), 1000, is_probability=False, trust=known
    )
    assert settings.pool.warmup_tokens == 250, "and what this solver has seen before both"


@pytest.mark.parametrize("length", [0, -5, 1e12, "long", True, [300]])
def test_a_length_that_no_trace_has_is_refused(length):
    with pytest.raises(ValueError):
        ScorerTrust.model_validate({**trusted(0.7).to_json(), "median_tokens": length})


def test_a_bad_scorer_waits_longer_than_the_preset_says_and_a_good_one_does_not():
    preset = Preset(warmup_tokens=12, median_length=200)
    assert pool_of(trusted(0.9), preset)[2] == 12
    assert pool_of(trusted(0.5), preset)[2] == round(200 * RULES[-1].least_warmup) > 12


def test_unjudged_scorers_get_the_safest_pool():
    for trust in (None, trusted(0.95, FEWEST_PROBLEMS - 1), ConfidenceScorer.info.trust):
        assert rule_for(trust) is RULES[-1]
    assert rule_for(trusted(0.95, FEWEST_PROBLEMS)) is RULES[0]


def test_what_somebody_chose_is_kept():
    trust, preset = trusted(0.9), Preset(capacity=64, islands=8, swap_size=6, warmup_tokens=10)
    assert pool_of(trust, preset) == (8, 6, 10)
    assert pool_of(trust, preset, islands=2) == (2, 6, 10)
    assert pool_of(trust, preset, islands="auto", swap_size=3, warmup_tokens=7)[1:] == (3, 7)
    assert pool_of(None, preset, preset="paper")[:2] == (1, 16)
    assert pool_of(trust, preset, policy="sc") == (1, 6, 10)


def test_small_pools_have_an_island_at_least():
    assert pool_of(trusted(0.9), capacity=1)[:2] == (1, 1)
    assert pool_of(trusted(0.9), capacity=5, num_traces=3)[0] == 1


@pytest.mark.parametrize(("trust", "words"), [
    (None, "nobody has judged the scorer"),
    (trusted(0.91), "0.91 on 100 problems (0.8 and more)"),
    (trusted(0.7), "0.70 on 100 problems (0.7 to 0.8)"),
    (trusted(0.52), "(0 to 0.7)"),
    (trusted(0.9, 3), "3 problems, fewer than the 20"),
])  # fmt: skip
def test_the_reason_is_said_in_a_sentence(trust, words):
    assert words in reason_for(trust)
    settings, _ = resolve(SearchConfig(), ModelDefaults(), 1000, is_probability=False, trust=trust)
    assert settings.pool.why == reason_for(trust) and settings.to_json()["why"] == settings.pool.why


# -- in a checkpoint -------------------------------------------------------------------------------------------


def small_mlp(**changes) -> MlpScorer:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((6, 8), (6,), (1, 6), (1,))]
    return MlpScorer(ScorerInfo("mlp", hidden_size=8, **changes), tuple(weights))


def test_trust_travels_in_the_checkpoint(tmp_path):
    scorer = small_mlp(trust=trusted(0.7))
    save_checkpoint(scorer, tmp_path / "s.safetensors")
    assert load_checkpoint(tmp_path / "s.safetensors").info.trust == trusted(0.7)
    longer = trusted(0.7).model_copy(update={"median_tokens": 312.5})
    save_checkpoint(small_mlp(trust=longer), tmp_path / "s.safetensors")
    assert load_checkpoint(tmp_path / "s.safetensors").info.trust == longer


def test_what_nobody_could_say_is_unjudged(tmp_path):
    scorer = small_mlp(trust=ScorerTrust(auc=(math.nan,) * 4, num_problems=0))
    save_checkpoint(scorer, tmp_path / "s.safetensors")
    trust = load_checkpoint(tmp_path / "s.safetensors").info.trust
    assert not trust.is_judged and rule_for(trust) is RULES[-1]


@pytest.mark.parametrize("wrong", [
    3, {"problems": 30}, {"auc": {"0.5": 0.7}, "problems": 30}, {"auc": [0.5] * 3, "problems": 30},
    {"auc": dict.fromkeys(("0.25", "0.5", "0.75", "1"), 1.7), "problems": 30},
    {"auc": dict.fromkeys(("0.25", "0.5", "0.75", "1"), "high"), "problems": 30},
])  # fmt: skip
def test_nonsense_is_refused(tmp_path, wrong):
    path = tmp_path / "s.safetensors"
    save_checkpoint(small_mlp(), path, {"trust": wrong})
    with pytest.raises(UserError, match=r"s.safetensors is not a scorer's checkpoint: trust.*train the scorer again"):
        load_checkpoint(path)


# -- worse scorers, for benchmarks -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A scorer that reads the direction which tells right from wrong, and traces to judge it by."""
    data = load_dataset(make_collection(tmp_path_factory.mktemp("c"), num_problems=40), StatePosition.BOUNDARY)
    ones = torch.zeros(2, 8)
    ones[0, 0], ones[1, 0] = 1.0, -1.0
    weights = (ones, torch.zeros(2), torch.tensor([[1.0, -1.0]]), torch.zeros(1))
    return MlpScorer(ScorerInfo("mlp", hidden_size=8), weights), data


def test_noise_lowers_the_auc_to_where_it_is_wanted(judged):
    scorer, data = judged
    states, traces = data.states.float(), data.all_traces()
    best = auc_at(scorer, data, traces, 0.5)
    noise = noise_for(scorer, data, 0.6)
    worse = with_noise(scorer, states, noise)
    assert noise > 0 and auc_at(worse, data, traces, 0.5) == pytest.approx(0.6, abs=0.03) and best > 0.7
    assert noise_for(scorer, data, 0.999) == 0.0
    added = worse.logits(states) - scorer.logits(states)
    assert float(added.std()) == pytest.approx(noise, rel=0.01) and abs(float(added.mean())) < 0.01 * noise


def test_noise_is_a_function_of_the_state(judged, tmp_path):
    """The same prefix gets the same error in every batch; rounding of a state changes next to nothing."""
    scorer, data = judged
    states = data.states.float()
    worse = with_noise(scorer, states, 5.0)
    save_checkpoint(worse, tmp_path / "s.safetensors")
    again = load_checkpoint(tmp_path / "s.safetensors")
    assert torch.equal(worse.logits(states)[7:9], again.logits(states[7:9]))
    moved = worse.logits(states * (1 + 1e-6)) - worse.logits(states)
    assert float(moved.abs().max()) < 1e-2
    assert not torch.allclose(with_noise(scorer, states, 5.0, seed=1).logits(states), worse.logits(states))


def test_trust_in_the_wrong_scorer_is_the_others(judged):
    scorer, data = judged
    best = MlpScorer(dataclasses.replace(scorer.info, trust=trusted(0.9)), scorer.weights)
    wrong = trusted_as(with_noise(scorer, data.states.float(), 5.0), best)
    assert wrong.info.trust == trusted(0.9) and wrong.weights[0].shape[0] > scorer.weights[0].shape[0]
