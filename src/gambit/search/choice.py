"""Finds a policy by name, checks its options, and loads what it asks for."""

from __future__ import annotations

from typing import cast

from pydantic import BaseModel, ConfigDict

from gambit.config import registry
from gambit.config.options import SearchConfig, build
from gambit.config.presets import SearchSettings
from gambit.errors import UserError
from gambit.policies.base import Policy, Requirements, ScoreUse
from gambit.policies.slim_sc import Embed, load_embedder
from gambit.results.vote import VoteKind, check_consensus
from gambit.types import Aggregation

GROUP = "gambit.policies"


class NoOptions(BaseModel):
    """The options of a policy that has none of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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


def vote_of(config: SearchConfig, aggregation: Aggregation = Aggregation.MEAN) -> VoteKind:
    """`aggregation`: how the scores of a trace's thoughts become one; where that is no mean, no mean is voted with."""
    if config.vote is not None:
        return config.vote
    usual = load_policy(config.policy).default_vote
    return VoteKind.SCORE if usual is VoteKind.POSITION and aggregation is not Aggregation.MEAN else usual


def check_search(config: SearchConfig) -> None:
    """Refuse what can be known to be wrong before a model is loaded."""
    check_options(config)
    if (missing := lacking(config)) is not None:
        raise UserError(missing)


def check_options(config: SearchConfig) -> None:
    """Refuse options that are wrong on every machine."""
    policy_options(config)
    _check_end(config, is_probability=True)


def _check_end(config: SearchConfig, *, is_probability: bool) -> None:
    """Refuse a vote that cannot be settled as it should be."""
    check_consensus(config.consensus, vote_of(config), is_probability=is_probability)
    if config.first_traces is not None and config.consensus is None:
        raise UserError(f"first_traces = {config.first_traces}: without a vote that settles the search, all others "
                        "follow; give consensus_stop too, such as --consensus-stop 0.8")  # fmt: skip


def lacking(config: SearchConfig) -> str | None:
    """What the configured policy needs and this machine does not have; options may say so in `lacking`."""
    missing: str | None = getattr(policy_options(config), "lacking", None)
    return None if missing is None else f"policy {config.policy!r}: {missing}"


def make_policy(config: SearchConfig, settings: SearchSettings, *, is_probability: bool) -> Policy[object]:
    """`is_probability`: whether the scorer's scores are."""
    _check_end(config, is_probability=is_probability)
    return load_policy(config.policy).from_settings(settings)


def needs_scores(requirements: Requirements, config: SearchConfig) -> bool:
    """Whether anyone looks at scores; where nobody does, a verifier need not read."""
    return requirements.scores is not ScoreUse.NEVER or vote_of(config).needs_scores


def confidence_window(requirements: Requirements, config: SearchConfig) -> int:
    """Tokens in a window of confidence; 0 where neither policy nor vote wants to know, and nothing is measured."""
    return requirements.confidence_window or (config.confidence_window if vote_of(config).needs_confidence else 0)


def embedder_of(requirements: Requirements) -> Embed | None:
    """The text embedder a policy asks for, loaded."""
    thoughts = requirements.thoughts
    return load_embedder(thoughts.embedder) if thoughts and thoughts.embedder else None
