"""The policy protocol: what a search method sees and what it may decide; a policy touches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias, TypeVar

from gambit.config import SearchSettings
from gambit.tree import TraceState
from gambit.types import OnPressure
from gambit.vote import VoteKind


@dataclass(frozen=True, slots=True)
class TraceView:
    """A logically active trace, as a policy sees it."""

    id: int
    state: TraceState
    score: float | None  # None before its first finished thought
    num_scored: int
    num_generated: int  # since its own creation
    num_tokens: int  # inherited part included
    boundary_tokens: int  # length at its last scored boundary, inherited part included
    is_thinking: bool


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool at one moment."""

    step: int  # decode steps of this pool so far
    traces: tuple[TraceView, ...]  # the tree view, by id
    num_created: int
    num_completed: int


@dataclass(frozen=True, slots=True)
class Start:
    """Begin `count` roots."""

    count: int
    on_pressure: OnPressure


@dataclass(frozen=True, slots=True)
class Prune:
    """End a trace for good."""

    trace: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Take a trace's memory; it stays in the pool as a ghost."""

    trace: int
    reason: str


@dataclass(frozen=True, slots=True)
class Branch:
    """Begin a child that shares the parent's first `inherited` tokens."""

    parent: int
    inherited: int
    on_pressure: OnPressure


@dataclass(frozen=True, slots=True)
class Stop:
    """End the search."""


Decision: TypeAlias = Start | Prune | Evict | Branch | Stop
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Wake:
    """When a policy wants to be asked, besides once at the very start."""

    every_steps: int | None = None
    on_completion: bool = False
    on_boundary: bool = False


class Policy(Protocol[State]):
    """A search method: `(state, view) -> (state', decisions)`, a pure function, asked when `wake` says so.

    Decisions are carried out in their order. What must happen inside an engine step is declared with each trace.
    """

    name: ClassVar[str]
    default_vote: ClassVar[VoteKind]

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Policy[State]: ...

    @property
    def wake(self) -> Wake: ...

    def initial_state(self) -> State: ...

    def decide(self, state: State, view: PoolView) -> tuple[State, list[Decision]]: ...
