"""Checks what a policy hands to its search: policies are written by users, so their decisions are input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import get_args, get_origin, get_type_hints

from gambit.config.presets import SearchSettings
from gambit.errors import UserError
from gambit.policies.base import Branch, Decision, Discard, Evict, Force, Prune, SplitIslands, Start, Stop, Wake
from gambit.tree import ACTIVE, LIVE, Trace, TraceState, TraceTree
from gambit.types import Progress

MOST_SHOWN = 120  # characters of a decision in a message


def checked_wake(policy: str, wake: Wake) -> Wake:
    """Returns the moments at which a policy decides; raises for what is none."""
    every = getattr(wake, "every_steps", None)
    if isinstance(wake, Wake) and (every is None or (type(every) is int and every > 0)):
        return wake
    raise UserError(f"policy {policy!r}: its wake is {_short(wake)}: give a Wake, as in Wake(every_steps=20)")


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
    at: int
    progress_of: Callable[[], Mapping[int, Progress]]

    @cached_property
    def progress(self) -> Mapping[int, Progress]:
        return self.progress_of()

    def check(self, decision: Decision) -> None:
        if (fault := _wrong_field(decision) or self._fault(decision)) is not None:
            raise UserError(f"policy {self.settings.policy!r}, step {self.at}: {_short(decision)}: {fault}")

    def _fault(self, decision: Decision) -> str | None:
        if isinstance(decision, Stop):
            return None
        if isinstance(decision, Start):
            if decision.count < 0 or not 0 <= decision.island < self.num_islands:
                return f"count is at least 0, and islands are numbered from 0 to {self.num_islands - 1}"
            return self._room_fault(decision.count)
        if isinstance(decision, SplitIslands):
            now, then, most = self.num_islands, decision.pool.islands, self.settings.capacity
            is_split = now < then <= most and then % now == 0
            return None if is_split else f"{now} islands are split into a multiple of that, {most} at most"
        number = decision.parent if isinstance(decision, Branch) else decision.trace
        if not 0 <= number < len(self.tree.traces):
            return f"there is no trace {number}: {len(self.tree.traces)} were created, numbered from 0"
        trace = self.tree.traces[number]
        return self._branch_fault(decision, trace) if isinstance(decision, Branch) else self._end_fault(decision, trace)

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
        if isinstance(decision, Discard):
            is_right = trace.state is TraceState.FINISHED and not trace.is_discarded
        else:
            is_right = trace.state in (ACTIVE if isinstance(decision, Prune) else LIVE)
        return None if is_right else f"trace {trace.id} is {'discarded' if trace.is_discarded else trace.state}"


@cache
def _fields(kind: type) -> list[tuple[str, tuple[type, ...]]]:
    hints = get_type_hints(kind).items()
    return [(name, tuple(get_origin(each) or each for each in _kinds(hint))) for name, hint in hints]


def _kinds(hint: type) -> tuple[type, ...]:
    return (hint,) if get_origin(hint) is tuple else get_args(hint) or (hint,)


def _wrong_field(decision: Decision) -> str | None:
    kind: type = type(decision)
    if kind not in get_args(Decision):
        return f"this is none of {', '.join(each.__name__ for each in get_args(Decision))}"
    for name, kinds in _fields(kind):
        value = getattr(decision, name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return f"{name} is {value!r}: give {' or '.join(each.__name__ for each in kinds)}"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
