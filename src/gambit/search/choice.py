"""Finds a policy by name, checks its options, and decides what a search with it needs."""

from collections.abc import Callable
from typing import cast

from pydantic import BaseModel

from gambit.config import registry
from gambit.config.options import CheckedModel, PolicyObject, SearchConfig, build, policy_fault
from gambit.config.presets import SearchSettings
from gambit.errors import UserError
from gambit.policies.base import Outcome, Policy
from gambit.results.vote import VoteKind, check_consensus
from gambit.types import Aggregation

GROUP = "gambit.policies"


def load_policy(policy: str | PolicyObject) -> type[Policy[object]]:
    """Returns the class behind a name, or that of an object."""
    if isinstance(policy, str):
        found = registry.load(GROUP, policy)
        fault = policy_fault(found) if isinstance(found, type) else f"it names {found!r}, which is no class"
        if fault is not None:
            raise UserError(f"policy {policy!r}: {fault}")
        return cast("type[Policy[object]]", found)
    return cast("type[Policy[object]]", policy if isinstance(policy, type) else type(policy))


def policy_for(config: SearchConfig, settings: SearchSettings) -> Policy[object]:
    """Returns the policy of one search; an object decides as it is."""
    if isinstance(config.policy, str | type):
        return load_policy(config.policy).from_settings(settings)
    return cast("Policy[object]", config.policy)


def options_model(policy: type[Policy[object]]) -> type[BaseModel]:
    """Returns the model of a policy's own options, an empty one if it declares none."""
    return getattr(policy, "Options", CheckedModel)


def policy_options(config: SearchConfig) -> BaseModel:
    """Returns the checked options of the configured policy; an error names the policy."""
    if config.policy_options and not isinstance(config.policy, str | type):
        raise UserError("policy_options are for a policy that is named: set the fields of the object itself")
    model = options_model(load_policy(config.policy))
    if config.policy_options and not model.model_fields:
        given = ", ".join(sorted(config.policy_options))
        raise UserError(f"the policy {config.policy_name!r} has no options of its own, but was given {given}")
    try:
        return build(model, config.policy_options)
    except UserError as error:
        raise UserError(f"policy {config.policy_name!r}: {error}") from error


def with_fixed_pool(config: SearchConfig) -> SearchConfig:
    """Returns the config with the number of traces that its policy fixes, if it does; the pool then follows it."""
    fixed = getattr(load_policy(config.policy), "fixed_traces", None)
    if fixed is None:
        return config
    return config.model_copy(update={"capacity": fixed, "num_traces": fixed, "swap_size": fixed})


def vote_of(config: SearchConfig, aggregation: Aggregation = Aggregation.MEAN) -> VoteKind:
    """Returns the vote of a search. `aggregation`: of the scorer; votes by position are only for means."""
    if config.vote is not None:
        return config.vote
    usual = load_policy(config.policy).default_vote
    return VoteKind.SCORE if usual is VoteKind.POSITION and aggregation is not Aggregation.MEAN else usual


def check_search(config: SearchConfig) -> None:
    """Refuses what is known to be wrong before a model is loaded."""
    check_options(config)
    if (missing := lacking(config)) is not None:
        raise UserError(missing)


def check_options(config: SearchConfig) -> None:
    """Refuses options that are wrong on every machine."""
    policy_options(config)
    check_end(config, is_probability=True)


def check_end(config: SearchConfig, *, is_probability: bool) -> None:
    """Refuses a vote that cannot be settled as configured. `is_probability`: scores are chances."""
    check_consensus(config.consensus, vote_of(config), is_probability=is_probability)
    if config.first_traces is not None and config.consensus is None:
        raise UserError(f"first_traces = {config.first_traces}: without a vote that settles the search, all others "
                        "follow; give consensus_stop too, such as --consensus-stop 0.8")  # fmt: skip


def lacking(config: SearchConfig) -> str | None:
    """Returns what the configured policy needs and this machine lacks; options may declare it in `lacking`."""
    missing: str | None = getattr(policy_options(config), "lacking", None)
    return None if missing is None else f"policy {config.policy_name!r}: {missing}"


def idle_reason(config: SearchConfig, outcome: Outcome) -> str | None:
    """Returns why a policy that is named had nothing to do in searches that are over, if it says so."""
    if not outcome.lengths or not isinstance(config.policy, str | type):
        return None
    idle: Callable[[BaseModel, Outcome], str | None] | None = getattr(load_policy(config.policy), "idle", None)
    return None if idle is None else idle(policy_options(config), outcome)
