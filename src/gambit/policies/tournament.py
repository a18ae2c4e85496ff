"""The paper's method: thought-level beam search by tournaments (Algorithm 1), on one pool."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gambit.config.options import BranchPoint
from gambit.policies.base import Branch, Decision, Evict, PoolView, Prune, Start, TraceView
from gambit.stats import log_odds
from gambit.tree import TraceState
from gambit.types import OnPressure, PressureAction

AS_GHOST = OnPressure(PressureAction.GHOST)
FLOOR_THOUGHTS = 8  # scored thoughts before the hard floor may act: a mean of fewer is mostly noise


class ParentChoice(StrEnum):
    """The way in which a tournament chooses parents among the traces that may be one."""

    SCORE = "score"  # the best
    RANDOM = "random"  # an ablation: drawn by lot, while victims still go by their scores


@dataclass(frozen=True, slots=True)
class Tournament:
    """Algorithm 1. Every Δ decode steps the pool is ranked, and places of the worst traces go to children of the best.

    The engine does the algorithm's *Generate* and *Schedule*: it scores thoughts as they end, and evicts the trace with
    the lowest score as a ghost when the KV cache is full (`on_pressure`). Ghosts count, are ranked and may be pruned.
    Ours are the margin, the hard floor, ghosts as parents and the branch point, all off or as in the paper by default.
    docs/how-it-works.md has the points that the paper leaves open.
    """

    capacity: int  # C
    swap_size: int  # K
    check_interval: int  # Δ
    warmup_tokens: int  # w
    margin: float = 0.0  # the least lead of a parent over the trace that it replaces
    in_log_odds: bool = False  # of the margin: a lead from 0.01 to 0.07 is as clear as one from 0.5 to 0.88
    hard_floor: float | None = None  # δ
    ghost_parents: bool = False
    branch_point: BranchPoint = BranchPoint.LAST_TOKEN
    on_pressure: OnPressure = AS_GHOST
    lot: int | None = None  # parents are drawn by this seed instead of by score: an ablation

    def decide(self, view: PoolView) -> list[Decision]:
        """Returns the decisions of the main loop: C traces at the start, then a tournament every Δ steps."""
        if view.num_created == 0:
            return [Start(self.capacity, self.on_pressure)]
        if not self.is_due(view.step):
            return []
        return self.tournament(view.traces, self.capacity - len(view.traces), view.step)

    def is_due(self, step: int) -> bool:
        return step % self.check_interval == 0

    def tournament(self, active: Sequence[TraceView], vacancies: int, step: int) -> list[Decision]:
        """Ranks the active traces and reallocates places; `vacancies` is C - N, or less."""
        ranked = self.ranked(active)
        parents = [trace for trace in ranked if self.can_parent(trace)]  # B
        if self.lot is not None and parents:
            doomed = ranked[len(ranked) - self.swap_size :] if vacancies <= 0 else []
            parents = by_lot([trace for trace in parents if trace not in doomed], self.lot, step + parents[0].id)
        decisions: list[Decision]
        if vacancies > 0:  # case 1, under capacity: the best branch once each, as many as there are places
            decisions = [self.branch(parent) for parent in parents[:vacancies]]
        else:  # case 2, at capacity: the bottom K are pruned and the top K branch
            swaps = self.swaps(ranked, parents)
            # All prunes first: the pool must never hold more than its capacity, not even between two decisions.
            decisions = [Prune(victim.id, "tournament") for _, victim in swaps]
            decisions += [self.branch(parent) for parent, _ in swaps]
        return decisions + self.below_floor(ranked, decisions)

    def ranked(self, active: Sequence[TraceView]) -> list[TraceView]:
        """Returns the traces, best first, ties by id. One without a thought is left out until its warm-up is over."""
        known = [trace for trace in active if trace.score is not None or trace.num_generated >= self.warmup_tokens]
        return sorted(known, key=lambda trace: (-score_of(trace), trace.id))

    def can_parent(self, trace: TraceView) -> bool:
        is_there = trace.state is TraceState.RUNNING or (self.ghost_parents and trace.state is TraceState.GHOST)
        return is_there and trace.is_thinking and trace.num_generated >= self.warmup_tokens

    def swaps(self, ranked: Sequence[TraceView], parents: Sequence[TraceView]) -> list[tuple[TraceView, TraceView]]:
        """Pairs the top K with the bottom K, best with worst; a pair that would not gain is dropped."""
        top = parents[: self.swap_size]
        chosen = {trace.id for trace in top}
        bottom = [trace for trace in reversed(ranked) if trace.id not in chosen]
        pairs = zip(top, bottom, strict=False)
        return [(parent, victim) for parent, victim in pairs if self.leads(score_of(parent), score_of(victim))]

    def leads(self, parent: float, victim: float) -> bool:
        """Returns True if a parent's score leads clearly enough. In the paper any lead is enough.

        A branch is no independent voter. If scores are poor, most leads are noise, and swaps by them cost the pool its
        variety for nothing.
        """
        if self.margin == 0 or parent <= victim:
            return parent > victim
        return (log_odds(parent) - log_odds(victim) if self.in_log_odds else parent - victim) >= self.margin

    def branch(self, parent: TraceView) -> Branch:
        at_boundary = self.branch_point is BranchPoint.LAST_BOUNDARY
        return Branch(parent.id, parent.boundary_tokens if at_boundary else parent.num_tokens, self.on_pressure)

    def below_floor(self, ranked: Sequence[TraceView], decisions: Sequence[Decision]) -> list[Decision]:
        """Evicts hopeless traces. The best running one stays, so that one always runs."""
        if self.hard_floor is None:
            return []
        pruned = {decision.trace for decision in decisions if isinstance(decision, Prune)}
        running = [trace for trace in ranked if trace.state is TraceState.RUNNING and trace.id not in pruned]
        return [
            Evict(trace.id, "floor")
            for trace in running[1:]
            if score_of(trace) < self.hard_floor and trace.num_scored >= FLOOR_THOUGHTS
        ]


def by_lot(traces: Sequence[TraceView], seed: int, moment: int) -> list[TraceView]:
    """Returns the traces in a random order, which depends on the seed and the moment."""
    return random.Random(f"{seed} {moment}").sample(traces, len(traces))


def score_of(trace: TraceView) -> float:
    """Returns the score that a trace is ranked by: without a thought, 0."""
    return 0.0 if trace.score is None else trace.score
