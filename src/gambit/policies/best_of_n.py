"""Best of N: independent traces, of which the one with the highest score answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gambit.policies.self_consistency import SelfConsistency
from gambit.results.vote import VoteKind


@dataclass(frozen=True, slots=True)
class BestOfN(SelfConsistency):
    """Best-of-N by verifier score (Cobbe et al. 2021), the verifier being the search's own thought scorer.

    Ours: a trace's score is that of its thoughts (their mean, or as the scorer's checkpoint says), not of a separate
    model that reads the whole text; a trace without an answer cannot be the best.
    """

    name: ClassVar[str] = "best-of-n"
    default_vote: ClassVar[VoteKind] = VoteKind.BEST
