"""Checks what a policy hands to its search: policies are written by users, so their decisions are input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import get_args

from gambit.config.presets import SearchSettings
from gambit.errors import UserError
from gambit.policies.base import Branch, Decision, Discard, Evict, Force, Prune, SplitIslands, Start, Stop, Wake
from gambit.tree import ACTIVE, LIVE, Trace, TraceState, TraceTree
from gambit.types import OnPressure, PoolSettings, Progress, StopRule

_KIND_OF = {
    "count": int, "island": int, "parent": int, "inherited": int, "trace": int, "reason": str, "given": tuple,
    "max_tokens": int | None, "on_pressure": OnPressure, "stop_rule": StopRule | None, "pool": PoolSettings,
}  # fmt: skip


def checked_wake(policy: str, wake: Wake) -> Wake:
    """Returns the moments at which a policy decides; raises for what is none."""
    every = getattr(wake, "every_steps", None)
    if isinstance(wake, Wake) and (every is None or (type(every) is int and every > 0)):
        return wake
    raise UserError(f"policy {policy!r}: its wake is {wake!r}: give a Wake, as in Wake(every_steps=20)")


def check_answer(policy: str, answer: object, at: int) -> None:
    """Raises unless `decide` has returned a pair."""
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], list | tuple)):
        raise UserError(f"policy {policy!r}, step {at}: decide returned {_short(answer)}: "
                        "return a pair (state, [decision, …])")  # fmt: skip


@dataclass
class DecisionCheck:
    """Refuses decisions that cannot be carried out on the pool as it is."""

    tree: TraceTree
    settings: SearchSettings
    num_islands: int
    progress: Mapping[int, Progress]  # of live traces, where one is to branch

    def check(self, decision: Decision, at: int) -> None:
        if (fault := _wrong_field(decision) or self._fault(decision)) is not None:
            raise UserError(f"policy {self.settings.policy!r}, step {at}: {_short(decision)}: {fault}")

    def _fault(self, decision: Decision) -> str | None:
        now, traces = self.num_islands, self.tree.traces
        if isinstance(decision, Stop):
            return None
        if isinstance(decision, SplitIslands):
            then, most = decision.pool.islands, self.settings.capacity
            is_right = now < then <= most and then % now == 0
            return None if is_right else f"{now} islands are split into a multiple of that, {most} at most"
        if isinstance(decision, Start):
            is_right = decision.count >= 0 and 0 <= decision.island < now
            wrong = f"count is at least 0, and islands are numbered from 0 to {now - 1}"
            return self._room_fault(decision.count) if is_right else wrong
        number = decision.parent if isinstance(decision, Branch) else decision.trace
        if not 0 <= number < len(traces):
            return f"there is no trace {number}: {len(traces)} were created, numbered from 0"
        if isinstance(decision, Branch):
            return self._branch_fault(decision, traces[number])
        return self._end_fault(decision, traces[number])

    def _room_fault(self, count: int) -> str | None:
        room = self.tree.capacity - self.tree.num_active
        return None if count <= room else f"the pool of {self.tree.capacity} has room for {room} (`top_up` counts)"

    def _branch_fault(self, branch: Branch, parent: Trace) -> str | None:
        is_ghost = parent.state is TraceState.GHOST and self.settings.ghost_parents
        if not is_ghost and parent.state is not TraceState.RUNNING:
            return f"trace {parent.id} is {parent.state}: running ones branch, and ghosts with ghost_parents"
        least, most = parent.boundary_tokens, parent.num_tokens if is_ghost else self.progress[parent.id].num_tokens
        if not least <= branch.inherited <= most:
            return f"a child of trace {parent.id} inherits {least} to {most} tokens"
        return self._room_fault(1)

    def _end_fault(self, decision: Force | Prune | Evict | Discard, trace: Trace) -> str | None:
        if isinstance(decision, Force):
            can_force = self.settings.forcing or (decision.given and decision.max_tokens)
            return None if can_force else "give tokens and max_tokens, since the search has no force_answers"
        allowed = {Prune: ACTIVE, Evict: LIVE, Discard: {TraceState.FINISHED}}[type(decision)]
        is_right = trace.state in allowed and not trace.is_discarded
        return None if is_right else f"trace {trace.id} is {'discarded' if trace.is_discarded else trace.state}"


def _wrong_field(decision: Decision) -> str | None:
    if type(decision) not in get_args(Decision):
        return f"this is none of {', '.join(kind.__name__ for kind in get_args(Decision))}"
    for name in decision.__slots__:
        value, kind = getattr(decision, name), _KIND_OF[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{name} is {value!r}: give {getattr(kind, '__name__', kind)}"
    return None


def _short(value: object) -> str:
    return shorten(repr(value), 60, placeholder=" …")
