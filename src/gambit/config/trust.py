"""Trust in a scorer, and the islands, swaps and warm-up that suit it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from gambit.events import Json
from gambit.stats import FEWEST_PROBLEMS, log_odds
from gambit.types import PoolSettings

SHARES = (0.25, 0.5, 0.75, 1.0)  # of a trace's thoughts
HALFWAY = SHARES.index(0.5)
THOUGHTS = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of first thoughts after which the spread of scores is measured
FEWEST_TRACES = 8  # for a spread
LONGEST_TRACE = 100_000_000  # tokens; no model's context is as long


def _by_share(raw: object) -> object:
    """Returns the values at SHARES of an object such as {"0.25": 0.7, …}. NaN and null: unknown."""
    if isinstance(raw, dict):
        if missing := [f"{share:g}" for share in SHARES if f"{share:g}" not in raw]:
            raise ValueError(f"no AUC at {', '.join(missing)} of a trace")
        raw = [raw[f"{share:g}"] for share in SHARES]
    if not isinstance(raw, list | tuple):
        return raw
    return tuple(None if isinstance(value, float) and math.isnan(value) else value for value in raw)


def _by_count(raw: object) -> object:
    """Returns the values after each of THOUGHTS of an object such as {"1": 0.3, …}."""
    return tuple(raw.get(str(count)) for count in THOUGHTS if raw) if isinstance(raw, dict) else raw


Aucs = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1)] | None, ...],
    Field(min_length=len(SHARES), max_length=len(SHARES)),
    BeforeValidator(_by_share),
    PlainSerializer(lambda auc: {f"{share:g}": value for share, value in zip(SHARES, auc, strict=True)}),
]
Widths = Annotated[
    tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)] | None, ...],
    BeforeValidator(_by_count),
    PlainSerializer(lambda widths: {str(n): width for n, width in zip(THOUGHTS, widths, strict=False)}),
]


class ScorerTrust(BaseModel):
    """The AUC of a scorer: how often a right trace is above a wrong one of the same problem, on problems new to it."""

    model_config = ConfigDict(frozen=True, strict=True, populate_by_name=True, serialize_by_alias=True)

    auc: Aucs  # at each of SHARES, averaged over problems; 0.5 is chance, None unknown
    num_problems: int = Field(ge=0, alias="problems")  # with right and wrong traces
    base_model: str | None = None
    source: str | None = None  # where the problems came from
    # The deviation of the scores of a problem's traces after so many THOUGHTS (`spread_of`), averaged over problems;
    # None where too few traces had as many.
    spread: Widths = ()
    is_published: bool = Field(default=False, alias="published")  # by others for exactly this model's weights
    # Of these problems' traces: a warm-up follows from how long traces are.
    median_tokens: Annotated[float, Field(ge=1, le=LONGEST_TRACE)] | None = None

    @property
    def halfway(self) -> float:
        found = self.auc[HALFWAY]
        return math.nan if found is None else found

    @property
    def is_judged(self) -> bool:
        """Returns False if the figures are of a handful of problems, which is a matter of luck."""
        return self.num_problems >= FEWEST_PROBLEMS and None not in self.auc

    def to_json(self) -> dict[str, Json]:
        """Returns what a checkpoint stores."""
        return self.model_dump(mode="json", exclude_defaults=True)


MARGIN = 2.0  # odds of 7 to 1
USUAL_FLOOR = 0.1


class TrustRule(NamedTuple):
    """The pool that suits scorers from an AUC at half-way on, up to the rule before it."""

    from_auc: float
    island_size: int  # places of the pool to an island
    swaps_per_island: int
    least_warmup: float  # of a trace of median length; the model's own warm-up counts where it is longer
    margin: float  # log-odds by which a parent must lead the trace that gives way to its child
    has_floor: bool  # chances below a floor cost a trace its memory


# The one place to change. Evidence, C = 64:
# - pawn, 40 puzzles, one seed (AUC 0.77): 92.5 % with 1, 4, 16 and 32 islands alike, plain voting 67.5 %; with noise to
#   an AUC of about 0.7, 85 % with 1 island and 92.5 % with 4 to 16.
# - Qwen2.5-Coder-1.5B, 112 problems, AUC 0.62 (benchmarks/results/islands_settings.json): 16 islands with two swaps
#   each 67.9 %, with one swap or none 64.3 and 63.4 %; half the warm-up or half the interval 58 to 59 %.
# - pawn with a useless scorer: 30 % with 1 island, 60 % with 16, 67.5 % with 32, as plain voting.
# - Simulated searches over that LLM's traces, C = 16 (benchmarks/results/simulated_search.json): at an AUC of 0.64 4
#   islands lose 3 to 5 points to the same judge's votes over plain traces, and 1 to 2 with a margin of 2; at 0.71 they
#   gain 1 without a margin and lose 1 with it, at 0.78 they gain 4 and 2. Pairs with a margin lose nothing at 0.64.
# - pawn, 40 puzzles: at 0.75 65 % with a margin of 0 or 1, 57.5 % with 2, plain voting 55 %; at 0.65 57.5 % without a
#   margin, 55 % with one, as plain voting.
# - A floor would take the memory of nearly half of that LLM's traces: on hard problems most chances are below 0.1.
RULES = (
    TrustRule(0.8, island_size=16, swaps_per_island=4, least_warmup=0.0, margin=0.0, has_floor=True),
    TrustRule(0.7, island_size=4, swaps_per_island=2, least_warmup=0.0, margin=0.0, has_floor=False),
    TrustRule(0.0, island_size=2, swaps_per_island=1, least_warmup=0.5, margin=MARGIN, has_floor=False),
)


# A published scorer is made for its model, but how well it ranks is not known: few swaps, and by clear leads alone.
UNJUDGED = RULES[1]._replace(margin=MARGIN)


def rule_for(trust: ScorerTrust | None) -> TrustRule:
    """Returns the rule for a scorer; the safest for one that is not judged, on enough problems, and not published."""
    if trust is None or not trust.is_judged:
        return UNJUDGED if trust is not None and trust.is_published else RULES[-1]
    return next(rule for rule in RULES if trust.halfway >= rule.from_auc)


def reason_for(trust: ScorerTrust | None) -> str:
    """Returns the reason for the rule, as half a sentence."""
    if trust is None:
        return "nobody has judged the scorer, so islands are small; `gambit scorer eval --write` judges it"
    if trust.is_published and not trust.is_judged:
        return (
            f"the scorer for {trust.base_model} is published, not judged by us; `gambit scorer eval --write` judges it"
        )
    found = f"the scorer's AUC at half-way is {trust.halfway:.2f} on {trust.num_problems} problems"
    if not trust.is_judged:
        return f"{found}, fewer than the {FEWEST_PROBLEMS} that would count"
    place = RULES.index(rule_for(trust))
    above = f" to {RULES[place - 1].from_auc:g}" if place else " and more"
    return f"{found} ({RULES[place].from_auc:g}{above})"


# Scores that lie so many times as far apart as when the scorer was judged are doubted. On pawn noise that takes the AUC
# at half-way from 0.82 to 0.75, 0.65, 0.55 and 0.52 widens them 2.3, 4.3, 6.9 and 7.6 times; the scorer without noise
# was doubted in 3 of 900 searches (benchmarks/results/islands_noise.json).
DOUBTED_SPREAD = 2.0


@dataclass(frozen=True, slots=True)
class Doubt:
    """The rule by which a search withdraws its trust in a scorer, and the pools to which it falls back.

    A scorer is as sure of itself on problems unlike those it was judged on. The spread of its scores in the pool needs
    no labels and shows after two or three thoughts. Noise widens it, and lowers the AUC above chance in the same
    proportion.
    """

    auc: float  # at half-way, as judged
    spread: tuple[float | None, ...]  # as judged, after each of THOUGHTS
    is_probability: bool
    pools: tuple[tuple[float, PoolSettings], ...]  # each with the least AUC that it suits, the most trusting first

    def scale(self, score: float) -> float:
        """Returns a chance as log-odds, in which noise is equally wide near 0 and in the middle; else the score."""
        return log_odds(score) if self.is_probability else score

    def auc_at(self, num_thoughts: int, spread: float) -> float:
        """Returns the AUC at half-way that the spread of the pool's scores leaves."""
        known = self.spread[THOUGHTS.index(num_thoughts)]
        if not known or spread <= DOUBTED_SPREAD * known:
            return self.auc
        return 0.5 + (self.auc - 0.5) * known / spread


def spread_of(scores: Sequence[Sequence[float]]) -> float:
    """Returns the standard deviation of scores around the mean of each thought; `scores`: [trace][thought].

    First thoughts may be alike and last ones differ most: only traces at the same thought are compared.
    """
    return math.sqrt(np.var(scores, axis=0).mean())
