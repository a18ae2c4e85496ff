"""Options: defaults, presets, auto, and clear words for wrong ones."""

import json
from types import SimpleNamespace

import pytest

from gambit.config.effort import Effort
from gambit.config.options import EngineConfig, SearchConfig, build, read_config_file
from gambit.config.presets import PAPER_MODEL, ModelDefaults, Preset, preset_for, resolve
from gambit.config.trust import ScorerTrust
from gambit.errors import UserError
from gambit.models.files import usual_effort
from gambit.policies.base import Wake
from gambit.results.vote import VoteKind
from gambit.search.choice import check_search, load_policy, policy_for, vote_of
from gambit.solver.builder import LengthHistory


def settle(config=None, preset=Preset(), room=40_000, is_probability=True, sampling=None):  # noqa: B008
    defaults = ModelDefaults(preset, sampling or {})
    return resolve(SearchConfig(**(config or {})), defaults, room, is_probability=is_probability)


def test_without_any_knowledge_the_papers_ratios_hold():
    settings, warnings = settle()
    assert (settings.capacity, settings.num_traces) == (64, 64)
    assert (settings.pool.warmup_tokens, settings.pool.check_interval) == (12_000, 200)
    assert settle({"islands": 1})[0].pool.swap_size == 4
    assert (settings.max_new_tokens, warnings) == (32_768, [])


def test_the_papers_preset():
    settings, _ = settle({"preset": "paper"})
    assert (settings.capacity, settings.pool.swap_size, settings.pool.check_interval, settings.pool.warmup_tokens) == (
        256, 16, 200, 12_000,
    )  # fmt: skip
    assert preset_for("Qwen/Qwen3-4B-Thinking-2507", None) is PAPER_MODEL
    assert preset_for("microsoft/Phi-4-reasoning-plus", None) is PAPER_MODEL
    assert preset_for("Qwen/Qwen3-0.6B", None) == Preset()


def test_a_models_preset_fills_what_the_user_leaves_open(tmp_path):
    (tmp_path / "gambit.json").write_text(json.dumps({
        "capacity": 32, "swap_size": 4, "check_interval": 12, "warmup_tokens": 60, "temperature": 0.9, "note": "x",
    }))  # fmt: skip
    preset = preset_for("anything", tmp_path)
    settings, _ = settle({"check_interval": 7, "islands": 1}, preset, sampling={"temperature": 0.1, "top_p": 0.5})
    pool = settings.pool
    assert (settings.capacity, pool.swap_size, pool.check_interval, pool.warmup_tokens) == (32, 4, 7, 60)
    assert (settings.sampling.temperature, settings.sampling.top_p, settings.sampling.top_k) == (0.9, 0.5, 20)
    (tmp_path / "gambit.json").write_text("[1]")
    with pytest.raises(UserError, match="not a preset"):
        preset_for("anything", tmp_path)


@pytest.mark.parametrize(
    ("config", "preset", "room", "capacity"),
    [
        ({}, PAPER_MODEL, 410_000, 34),  # an H100 with Qwen3-4B-Thinking
        ({}, PAPER_MODEL, 900_000, 64),  # never more than were
        ({}, PAPER_MODEL, 5_000, 1),
        ({}, Preset(), 410_000, 34),
        ({"warmup_tokens": 4_000}, Preset(), 120_000, 30),
        ({"preset": "paper"}, PAPER_MODEL, 410_000, 256),
        ({"capacity": 48}, PAPER_MODEL, 410_000, 48),
        ({"islands": 40}, PAPER_MODEL, 410_000, 40),  # what is given must fit in
        ({"swap_size": 36}, PAPER_MODEL, 410_000, 36),
        ({}, Preset(capacity=32), 410_000, 32),
    ],
)
def test_an_open_capacity_follows_what_the_cache_holds_at_the_warm_up_length(config, preset, room, capacity):
    settings, notes = resolve(
        SearchConfig(**config), ModelDefaults(preset), 32_768, is_probability=True, room_tokens=room
    )
    assert (settings.capacity, settings.num_traces) == (capacity, capacity)
    expected = [f"the pool has {capacity} places"] if capacity < 64 and not {"capacity"} & config.keys() else []
    if preset.capacity != 32:
        assert [note[: len(expected[0])] for note in notes if "places" in note] == expected


def test_a_presets_swap_size_shrinks_with_the_pool():
    settings, _ = settle({"capacity": 32, "preset": "paper"})
    assert settings.pool.swap_size == 2


def test_auto_works_from_lengths():
    preset = Preset(capacity=64, swap_size=9, check_interval=9, warmup_tokens=9, median_length=3000,
                    mean_thought_length=40)  # fmt: skip
    settings, _ = settle({"preset": "auto", "islands": 1}, preset)
    assert (settings.pool.warmup_tokens, settings.pool.check_interval, settings.pool.swap_size) == (1500, 40, 4)
    history = LengthHistory()
    history._lengths.append(12_000)
    history._thoughts.append(30)
    settings, _ = settle({"preset": "auto"}, history.added_to(ModelDefaults(preset)).preset)  # history wins
    assert (settings.pool.warmup_tokens, settings.pool.check_interval) == (6000, 100)


@pytest.mark.parametrize("given", [{"islands": 1}, {"islands": 64}, {"preset": "paper"}])
def test_islands_that_somebody_chose_have_the_papers_floor_and_no_margin(given):
    settings, _ = settle(given)
    assert (settings.hard_floor, settings.pool.swap_margin) == (0.1, 0.0)
    assert settle(given, is_probability=False)[0].hard_floor is None
    assert settle({**given, "hard_floor": 0})[0].hard_floor is None


@pytest.mark.parametrize(
    ("auc", "floor", "margin"), [(0.85, 0.1, 0.0), (0.75, None, 0.0), (0.65, None, 2.0), (0.55, None, 2.0)]
)
def test_a_scorer_that_is_trusted_little_needs_a_clear_lead_and_takes_no_memory(auc, floor, margin):
    trust = ScorerTrust(auc=(auc,) * 4, num_problems=50)

    def settings(**options):
        defaults = ModelDefaults(Preset())
        return resolve(SearchConfig(**options), defaults, 40_000, is_probability=True, trust=trust)[0]

    assert (settings().hard_floor, settings().pool.swap_margin) == (floor, margin)
    given = settings(hard_floor=0.3, swap_margin=0.5)
    assert (given.hard_floor, given.pool.swap_margin) == (0.3, 0.5)
    assert settings(hard_floor=0, swap_margin=0).hard_floor is None


def test_what_cannot_branch_is_said():
    _, warnings = settle({"warmup_tokens": 500, "max_new_tokens": 500})
    assert "nothing can ever branch" in warnings[0]
    assert settle({"warmup_tokens": 500, "max_new_tokens": 500, "policy": "sc"})[1] == []


def test_an_effort_fills_what_is_left_open():
    low, medium = SearchConfig(effort="low"), SearchConfig(effort="medium", capacity=32)
    assert (low.policy, low.thinking_tokens) == ("single", 4096)
    assert (medium.policy, medium.capacity, medium.first_traces, medium.consensus_stop) == ("gambit", 32, 4, 0.8)
    assert SearchConfig(effort="low", policy="sc", thinking_tokens=5).model_dump(exclude_unset=True) == {
        "effort": "low", "policy": "sc", "thinking_tokens": 5
    }  # fmt: skip
    settings, notes = resolve(SearchConfig(effort="medium"), ModelDefaults(), 1000, is_probability=True)
    assert (settings.num_traces, settings.first_traces, notes) == (16, 4, [])


@pytest.mark.parametrize(
    "given", [{"policy": "sc"}, {"capacity": 4}, {"first_traces": 4, "consensus_stop": 0.6}, {"effort": "high"}]
)
def test_no_effort_is_assumed_where_an_option_says_how_much_to_search(given):
    assert SearchConfig(**given).with_usual(Effort.MEDIUM) == SearchConfig(**given)
    assert SearchConfig(seed=4).with_usual(Effort.MEDIUM) == SearchConfig(seed=4, effort="medium")


def test_models_that_think_have_a_medium_effort(tmp_path, tiny_folder):
    assert usual_effort(str(tiny_folder)) is Effort.MEDIUM
    assert usual_effort("pawn") is usual_effort(str(tmp_path)) is Effort.HIGH


def test_more_tokens_than_the_context_has_are_cut_and_said():
    settings, warnings = settle({"max_new_tokens": 5000}, room=1000)
    assert settings.max_new_tokens == 1000 and "cut to 1000" in warnings[0]


def test_more_swaps_than_places_are_refused():
    with pytest.raises(UserError, match="swap size 9 is larger than the capacity 8"):
        settle({"capacity": 8, "swap_size": 9})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"capacity": 0}, "capacity = 0: input should be greater than or equal to 1"),
        ({"swap_size": 0}, "swap_size = 0"),
        ({"temperature": -1}, "temperature = -1"),
        ({"top_p": 0}, "top_p = 0"),
        ({"vote": "loudest"}, "vote = 'loudest'"),
        ({"capasity": 3}, "unknown option 'capasity': did you mean 'capacity'?"),
        ({"zzz": 3}, "unknown option 'zzz': known are"),
        ({"seed": "x"}, "seed = 'x'"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(UserError) as error:
        build(SearchConfig, values)
    assert message in str(error.value)


def test_engine_options_are_checked_too():
    with pytest.raises(UserError, match="memory_ratio = 2"):
        build(EngineConfig, {"memory_ratio": 2})
    with pytest.raises(UserError, match="did you mean 'device'"):
        build(EngineConfig, {"devise": "cpu"})


def test_a_recipe_is_a_flat_mapping_of_known_options(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: pawn\ncapacity: 8\npolicy: sc\n")
    assert read_config_file(path) == {"model": "pawn", "capacity": 8, "policy": "sc"}
    for text, message in (("capacty: 8", "did you mean 'capacity'"), ("- 1", "mapping"), ("a: [", "cannot read")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_config_file(path)
    with pytest.raises(UserError, match="cannot read"):
        read_config_file(tmp_path / "none.yaml")


class Own:
    """A policy of a user's, as far as options look at it."""

    name = "own"
    default_vote = VoteKind.SCORE
    wake = Wake()

    @classmethod
    def from_settings(cls, settings):
        return cls()

    def initial_state(self):
        return None

    def decide(self, state, view):
        return state, []


def test_a_policy_may_be_an_object_or_a_class():
    own = Own()
    for given in (own, Own):
        config = SearchConfig(policy=given)
        assert config.policy is given and config.policy_name == "own"
        assert load_policy(given) is Own and vote_of(config) is VoteKind.SCORE
    assert policy_for(SearchConfig(policy=own), None) is own
    assert SearchConfig(policy="sc").policy_name == "sc"


@pytest.mark.parametrize("wrong", [3, None, object(), ["sc"]])
def test_what_is_no_policy_is_refused(wrong):
    with pytest.raises(
        UserError, match=r"policy = .*: give the name of a policy, or an object with name, .* this lacks name"
    ):
        SearchConfig(policy=wrong)


@pytest.mark.parametrize("part", ["name", "default_vote", "wake", "initial_state", "decide"])
def test_what_an_object_lacks_to_be_a_policy_is_named(part):
    parts = {name: getattr(Own, name) for name in ("name", "default_vote", "wake", "initial_state", "decide")}
    with pytest.raises(UserError, match=f"give the name of a policy.*; this lacks {part}$"):
        SearchConfig(policy=SimpleNamespace(**{name: value for name, value in parts.items() if name != part}))


@pytest.mark.parametrize("wrong", [{"default_vote": "score"}, {"name": 3}])
def test_a_policy_with_an_attribute_of_a_wrong_type_is_refused(wrong):
    with pytest.raises(UserError, match="give a text and a VoteKind"):
        SearchConfig(policy=type("Wrong", (Own,), wrong)())


def test_options_beside_an_object_are_refused():
    config = SearchConfig(policy=Own(), policy_options={"margin": 1})
    with pytest.raises(UserError, match="set the fields of the object itself"):
        check_search(config)
