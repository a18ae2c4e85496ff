"""The policy protocol: what a search method sees and what it may decide. The first half is enough to write one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol, TypeAlias, TypeVar, cast

from gambit.config.presets import SearchSettings
from gambit.results.vote import VoteKind
from gambit.tree import TraceState
from gambit.types import OnPressure, PoolSettings, StopRule, TraceConfidence

State = TypeVar("State")
NEARLY_ALL = 0.9


class Policy(Protocol[State]):
    """A search method: `(state, view) -> (state', decisions)`, a pure function that is called at the moments of `wake`.

    Decisions are carried out in their order. What must happen inside an engine step is declared with each trace.
    A policy may also have `Options` (a pydantic model, all fields with defaults), `requirements` (a `Requirements`),
    `fixed_traces` (how many traces there are, whatever the settings are) and `idle(options, outcome)`, a class method
    that returns why searches with this `Outcome` gave it nothing to do; None if they did.
    """

    name: ClassVar[str]
    default_vote: ClassVar[VoteKind]

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Policy[State]:
        """Returns the policy for one search; `settings.options_of(Options)` has its own options."""

    @property
    def wake(self) -> Wake:
        """The moments at which it is called."""

    def initial_state(self) -> State:
        """Returns the first state, before any trace has been started."""

    def decide(self, state: State, view: PoolView) -> tuple[State, list[Decision]]:
        """Returns the next state and what is to be done, from this state and the pool as it is."""


@dataclass(frozen=True, slots=True)
class Wake:
    """The moments at which a policy decides, besides once at the very start."""

    every_steps: int | None = None
    on_completion: bool = False  # also when a trace was pruned inside the engine
    on_boundary: bool = False  # a thought has ended


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool at one moment."""

    step: int  # decode steps of this pool so far
    traces: tuple[TraceView, ...]  # logically active ones, by id: ghosts and waiting ones are among them
    num_created: int
    finished: tuple[TraceView, ...] = ()  # all of them, in the order of their ends
    thoughts: tuple[ThoughtView, ...] = ()  # that ended since the last view, where the policy requires them
    num_planned: int | None = None  # traces that may be started by now; None: all
    first_scores: tuple[tuple[float, ...], ...] = ()  # of each root's first thoughts, where the policy requires them

    def most(self, num_traces: int) -> int:
        """Returns how many of so many traces may be started by now."""
        return num_traces if self.num_planned is None else min(num_traces, self.num_planned)


@dataclass(frozen=True, slots=True)
class TraceView:
    """A trace as a policy sees it."""

    id: int
    state: TraceState
    score: float | None  # None before its first finished thought
    num_scored: int
    num_generated: int  # since its own creation
    num_tokens: int  # inherited part included
    boundary_tokens: int  # length at its last scored boundary, inherited part included
    is_thinking: bool
    island: int = 0
    answer: str | None = None  # once it has finished
    confidence: TraceConfidence | None = None  # once it has finished, where the policy requires it
    root: int = 0  # the trace that it descends from, or itself
    parent: int | None = None
    last_score: float | None = None  # of its newest scored thought


@dataclass(frozen=True, slots=True)
class Start:
    """Starts `count` roots on one island."""

    count: int
    on_pressure: OnPressure
    stop_rule: StopRule | None = None
    island: int = 0


@dataclass(frozen=True, slots=True)
class Branch:
    """Starts a child that shares the parent's first `inherited` tokens."""

    parent: int
    inherited: int
    on_pressure: OnPressure


@dataclass(frozen=True, slots=True)
class Force:
    """Has a running trace write its answer: a child takes its place and goes on after given tokens.

    Without tokens of its own the decision takes those of the search, which end the thinking and begin an answer.
    Nothing happens to a trace that waits, or that was forced before.
    """

    trace: int
    reason: str
    given: tuple[int, ...] = ()
    max_tokens: int | None = None  # that the child may write; None: as many as a forced answer may have


@dataclass(frozen=True, slots=True)
class Prune:
    """Ends a trace for good."""

    trace: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Takes a trace's memory; it stays in the pool as a ghost."""

    trace: int
    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Excludes a finished trace from the vote."""

    trace: int
    reason: str


@dataclass(frozen=True, slots=True)
class SplitIslands:
    """Divides every island into equally many, roots with their descendants; the policy decides again at once.

    The number of islands becomes that of `pool`, a multiple of today's.
    """

    pool: PoolSettings


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the search."""


Decision: TypeAlias = Start | Branch | Force | Prune | Evict | Discard | SplitIslands | Stop


def top_up(
    view: PoolView, capacity: int, num_traces: int, on_pressure: OnPressure, stop_rule: StopRule | None = None
) -> list[Decision]:
    """Starts as many roots as the pool has places, `num_traces` in all."""
    count = min(capacity - len(view.traces), view.most(num_traces) - view.num_created)
    return [Start(count, on_pressure, stop_rule)] if count > 0 else []


# -- what only some policies need ------------------------------------------------------------------------------


class ScoreUse(StrEnum):
    """The moments at which a policy looks at scores: those of a verifier have to be waited for."""

    ALWAYS = "always"  # whenever it decides
    ROUNDS = "rounds"  # every `Wake.every_steps` steps, and at boundaries where it wakes there
    NEVER = "never"


class SplitBy(StrEnum):
    """The shares of a search that may run on different engines, since each depends on nothing outside itself."""

    NOTHING = "nothing"
    ISLANDS = "islands"
    TRACES = "traces"


@dataclass(frozen=True, slots=True)
class Requirements:
    """The needs of a policy; everything but scores is off by default, and then costs nothing."""

    scores: ScoreUse = ScoreUse.ALWAYS
    has_fixed_size: bool = False  # it never creates more than num_traces traces: what is to come can be counted
    provisional_traces: int = 0  # until so many are complete it may still take votes back
    pruned_answers: bool = False  # a trace pruned under memory pressure votes if it has an answer by then
    confidence_window: int = 0  # tokens; finished traces then bring their confidence
    first_scores: int = 0  # thoughts of each root whose scores views then bring
    thoughts: ThoughtNeed | None = None  # views then bring the thoughts that ended, embedded
    embedding_size: int = 0  # of the engine's boundary states, for thoughts that are embedded by them
    split_by: SplitBy = SplitBy.NOTHING  # how the search may be spread over several engines


def requirements_of(policy: Policy[State]) -> Requirements:
    """Returns the requirements of a policy, which need not declare any."""
    return cast("Requirements", getattr(policy, "requirements", Requirements()))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of searches that are over, as far as it shows whether their policy had anything to do."""

    num_roots: int  # of the largest search
    num_pruned: int
    lengths: Sequence[int]  # tokens of completed traces
    kv_share: float  # the most that was seen in use

    def too_short(self, num_tokens: int, what: str) -> str | None:
        """Returns the sentence that nearly all traces ended before so many tokens; None if they did not."""
        reached = self.num_pruned + sum(length >= num_tokens for length in self.lengths)
        share = 1 - reached / max(1, self.num_pruned + len(self.lengths))
        if not self.lengths or share < NEARLY_ALL:
            return None
        return f"{share:.0%} of its traces were shorter than its {what} of {num_tokens:,} tokens"


class ThoughtSplit(StrEnum):
    """The places where thoughts end."""

    MARKERS = "markers"  # before a discourse marker
    BLANK_LINES = "blank_lines"  # at the boundaries that scorers use


@dataclass(frozen=True, slots=True)
class ThoughtNeed:
    """The thoughts that a policy compares: how they are cut and embedded."""

    split: ThoughtSplit
    min_tokens: int
    embedder: str | None  # a sentence-transformers model; None: the engine's own boundary states


@dataclass(frozen=True, slots=True)
class ThoughtView:
    """A thought that ended since the last view, embedded."""

    trace: int
    num_tokens: int  # length of the trace at its end
    vector: tuple[float, ...]  # unit norm
