"""Diverse verifier tree search: beam search in trees that do not compete."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from gambit.policies.base import Branch, Decision, PoolView, Prune, TraceView
from gambit.policies.beam_search import BeamSearch


@dataclass(frozen=True, slots=True)
class Dvts(BeamSearch):
    """Diverse verifier tree search (Beeching et al. 2024): `capacity / beam_width` trees, each of which keeps its best
    trace at every check and branches it.

    Ours: a tree begins with `beam_width` roots and is over when its share of `num_traces` is complete.
    """

    name: ClassVar[str] = "dvts"

    def check(self, view: PoolView) -> list[Decision]:
        num_trees = max(1, self.capacity // self.beam_width)
        members: defaultdict[int, list[TraceView]] = defaultdict(list)
        for trace in view.traces:
            members[trace.root % num_trees].append(trace)
        decisions: list[Decision] = []
        for tree, traces in members.items():
            done = sum(trace.root % num_trees == tree for trace in view.finished)
            missing = math.ceil((self.num_traces - tree) / num_trees) - done
            places = min(math.ceil((self.capacity - tree) / num_trees), missing)
            if missing > 0:
                decisions += self.narrowed(traces, keep=1, places=places)
            else:
                decisions += [Prune(trace.id, "tree complete") for trace in traces]
        return sorted(decisions, key=lambda decision: isinstance(decision, Branch))  # places first, then their traces
