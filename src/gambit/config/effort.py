"""Effort: how much a search may spend on one question, in three steps that clients know by name."""

from collections.abc import Mapping
from enum import StrEnum

USUAL_THINKING_TOKENS = 4096  # of a low effort's only trace


class Effort(StrEnum):
    """The three sizes of a search, the smallest first."""

    LOW = "low"  # one trace with a thinking budget
    MEDIUM = "medium"  # rounds of 4 to 16 traces, until their vote is settled
    HIGH = "high"  # the full pool


# Options that an effort fills where they are left open.
FILLED: Mapping[Effort, Mapping[str, object]] = {
    Effort.LOW: {"policy": "single", "thinking_tokens": USUAL_THINKING_TOKENS},
    Effort.MEDIUM: {"capacity": 16, "first_traces": 4, "consensus_stop": 0.8},
    Effort.HIGH: {},
}
MOST_TRACES_OF = {Effort.LOW: 1, Effort.MEDIUM: 16}
POOL = frozenset((
    "capacity", "num_traces", "islands", "swap_size", "first_traces", "consensus_stop", "consensus_min_traces",
))  # fmt: skip
# Options that say how much to search: where one is given, no effort is assumed.
SIZES = POOL | {"effort", "policy", "compat", "preset"}


def filled(values: Mapping[str, object]) -> dict[str, object]:
    """Returns options of a search with those that their effort decides; options that are given stay as they are."""
    effort = values.get("effort")
    given = {name: value for name, value in values.items() if value is not None}
    return {**FILLED[Effort(str(effort))], **given} if effort in tuple(Effort) else dict(values)


def unfilled(values: Mapping[str, object]) -> dict[str, object]:
    """Returns options without their effort and what it has filled."""
    effort = values.get("effort")
    by_effort = {} if effort is None else FILLED[Effort(str(effort))]
    return {name: value for name, value in values.items() if name != "effort" and by_effort.get(name) != value}


def replaced_by(effort: Effort | None) -> frozenset[str]:
    """Returns the options of a server that give way to the effort of a request."""
    if effort is Effort.LOW:
        return POOL | {"policy", "compat"}
    return POOL if effort is Effort.MEDIUM else frozenset()


def least(*efforts: Effort | None) -> Effort | None:
    """Returns the lowest of the efforts that are given, None where none is."""
    return min((effort for effort in efforts if effort is not None), key=list(Effort).index, default=None)
