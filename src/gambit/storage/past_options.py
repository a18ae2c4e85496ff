"""What was in effect in Gambit 0.1.0 where a user gave no option; its folders record only the options given."""

from __future__ import annotations

from collections.abc import Mapping

from gambit.events import Json

# Every option of a search and an engine stands here. For one that came later it is what 0.1.0 did without it, so that
# a folder made then is resumed, and compared with, as it was made.
IN_0_1_0: Mapping[str, Json] = {
    "policy": "gambit",
    "policy_options": {},
    "preset": "model",
    "capacity": None,
    "num_traces": None,
    "islands": 1,
    "swap_size": None,
    "check_interval": None,
    "warmup_tokens": None,
    "swap_margin": 0.0,
    "hard_floor": 0.1,
    "child_temperature": 1.0,
    "branch_point": "last_token",
    "ghost_parents": False,
    "max_new_tokens": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "seed": 0,
    "own_noise": False,
    "budget_tokens": None,
    "budget_seconds": None,
    "budget_traces": None,
    "consensus_stop": "off",
    "consensus_min_traces": 16,
    "first_traces": None,
    "vote": None,
    "confidence_window": 2048,
    "answer": "boxed",
    "system_prompt": None,
    "enable_thinking": True,
    "model": "pawn",
    "engine": "auto",
    "engine_options": {},
    "device": "auto",
    "dtype": "auto",
    "scorer": "auto",
    "any_weights": False,
    "kv_budget_tokens": None,
    "memory_ratio": 0.9,
    "verifier_engine": "auto",
    "verifier_device": "auto",
    "verifier_memory": "0.3",
    "verifier_gpu_share": 1.0,
    "verifier_aggregation": None,
    "verifier_options": {},
    "verifier_lag": 0,
    "verifier_async": False,
    "verifier_optional": False,
}

# The same for the options of a policy's own.
POLICIES_IN_0_1_0: Mapping[str, Mapping[str, Json]] = {
    "deepconf": {"warmup_traces": 16, "window_tokens": 2048, "percentile": 90.0},
    "slim-sc": {
        "variant": "diversity",
        "embedder": "states",
        "split": None,
        "min_thought_tokens": None,
        "threshold": None,
        "threshold_percentile": 99.0,
        "delay_tokens": 500,
        "embedding_size": 64,
    },
    "step": {"pruned_vote": False},
}

# How policies voted where nobody said; the others vote as they did.
VOTES_IN_0_1_0: Mapping[str, str] = {"gambit": "score"}


def in_effect(given: Mapping[str, Json], then: Mapping[str, Json], now: Mapping[str, Json]) -> dict[str, Json]:
    """The options given, and of all others those whose default has changed since, with what it was then.

    `then` and `now` are the defaults of the folder's version and of this one. An option that this version does not
    know stays out: it can no longer have an effect.
    """
    changed = {name: then[name] for name, value in now.items() if name in then and then[name] != value}
    return {**changed, **given}
