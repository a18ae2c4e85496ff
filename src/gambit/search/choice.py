"""Finds a policy by name and checks its options and wishes; never runs one."""

from __future__ import annotations

from typing import cast

from pydantic import BaseModel

from gambit import registry
from gambit.config import SearchConfig, build
from gambit.errors import UserError
from gambit.search.policy import NoOptions, Policy, needs_of

GROUP = "gambit.policies"


def load_policy(name: str) -> type[Policy[object]]:
    """The class behind a name."""
    return cast("type[Policy[object]]", registry.load(GROUP, name))


def options_model(policy: type[Policy[object]]) -> type[BaseModel]:
    """The model of a policy's own options; a policy that declares none has none."""
    return getattr(policy, "Options", NoOptions)


def policy_options(config: SearchConfig) -> BaseModel:
    """The checked options of the configured policy; what is wrong is said in the user's words."""
    model = options_model(load_policy(config.policy))
    if config.policy_options and not model.model_fields:
        given = ", ".join(sorted(config.policy_options))
        raise UserError(f"the policy {config.policy!r} has no options of its own, but was given {given}")
    try:
        return build(model, config.policy_options)
    except UserError as error:
        raise UserError(f"policy {config.policy!r}: {error}") from error


def with_fixed_pool(config: SearchConfig) -> SearchConfig:
    """A policy may fix how many traces there are; the pool's own settings then follow."""
    fixed = getattr(load_policy(config.policy), "fixed_traces", None)
    if fixed is None:
        return config
    return config.model_copy(update={"capacity": fixed, "num_traces": fixed, "swap_size": fixed})


def confidence_window(policy: Policy[object], config: SearchConfig) -> int:
    """Tokens in a window of confidence; 0 where neither policy nor vote wants to know, and nothing is measured."""
    vote = config.vote or policy.default_vote
    return needs_of(policy).confidence_window or (config.confidence_window if vote.needs_confidence else 0)
