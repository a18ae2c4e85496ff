"""Frozen records that cross the borders between engines, search and results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

from gambit.errors import UserError

TokensOf = Callable[[int, int], Sequence[int]]  # those of a live trace from a position on


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """Returns a number with what it counts: 1 trace, 2 traces."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


class TraceKey(NamedTuple):
    """A trace's address on an engine that serves several searches."""

    search: int
    trace: int


class Aggregation(StrEnum):
    """The way from the scores of thoughts to the score of their trace; a scorer's checkpoint names it."""

    MEAN = "mean"
    LAST = "last"


class StatePosition(StrEnum):
    """The hidden state that a scorer reads (the paper and STEP's published scorers differ by one token)."""

    BEFORE = "before"  # the state that predicted the boundary token
    BOUNDARY = "boundary"  # the state of the boundary token itself, one decode step later


@dataclass(frozen=True, slots=True)
class RunningScore:
    """The scores of a trace's thoughts, folded; a child starts from its parent's, whose thoughts are its own too."""

    count: int = 0
    total: float = 0.0
    position_total: float = 0.0  # Σ i·sᵢ, i from 1
    last: float = 0.0

    def add(self, score: float) -> "RunningScore":
        count = self.count + 1
        return RunningScore(count, self.total + score, self.position_total + count * score, score)

    def value(self, aggregation: Aggregation) -> float | None:
        """Returns the trace's score, or None before its first finished thought."""
        if self.count == 0:
            return None
        return self.last if aggregation is Aggregation.LAST else self.total / self.count

    @property
    def position_weighted(self) -> float | None:
        """The mean with weights rising linearly over the thoughts: later ones count more."""
        if self.count == 0:
            return None
        return self.position_total / (self.count * (self.count + 1) / 2)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The way the next token is drawn; temperature 0 is greedy, and 0 switches top_k and min_p off, 1 top_p."""

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    min_p: float = 0.0
    seed: int = 0


class PressureAction(StrEnum):
    """The fate of a trace that loses its KV blocks."""

    QUEUE = "queue"  # it waits and is recomputed later (plain sampling)
    GHOST = "ghost"  # it stays logically active without memory (gambit)
    PRUNE = "prune"  # it is gone (STEP)


@dataclass(frozen=True, slots=True)
class OnPressure:
    """The rule an engine obeys when a KV allocation fails; it travels with each trace, so engines know no policy."""

    action: PressureAction
    unscored_first: bool = False
    spares_islands: bool = False  # the largest island gives way first, and the last live trace of one is queued


@dataclass(frozen=True, slots=True)
class StopRule:
    """Ends a trace as soon as its last `window_tokens` tokens have a mean confidence below `threshold` (DeepConf).

    The confidence of a token is minus the mean log-probability of the 20 likeliest, before temperature. Nothing ends
    before its window is full. An engine obeys at the very step; one more token that it computes is dropped.
    """

    window_tokens: int
    threshold: float


class TraceConfidence(NamedTuple):
    """Token confidence of an ended trace, folded to what votes need; a trace shorter than a window is one window."""

    num_tokens: int  # that were measured: all, but those inherited from a parent that was gone
    mean: float
    tail: float  # of the last window
    bottom: float  # mean of the lowest tenth of all windows
    lowest: float  # window


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """Everything an engine needs to run one trace.

    A root has neither parent nor prefix. A child names the live `parent` whose cached tokens it shares, or brings
    the inherited tokens in `prefix` when no engine row holds them any more. Either goes on after `given`, which is its
    own and not sampled. The thoughts in its `score` are the first
    ones of its parent; with a prefix, `history_of` names that parent to scorers that remember thoughts.
    """

    key: TraceKey
    sampling: Sampling
    max_new_tokens: int  # the inherited part counts
    on_pressure: OnPressure
    inherited: int = 0  # generated tokens taken over from the parent
    parent: TraceKey | None = None
    prefix: tuple[int, ...] = ()
    score: RunningScore = field(default_factory=RunningScore)
    history_of: TraceKey | None = None  # an ended trace of a search that keeps histories
    given: tuple[int, ...] = ()  # tokens after the inherited ones that end its thinking: it writes only its answer
    stop_rule: StopRule | None = None
    island: int = 0
    noise_id: int | None = None  # seeds its random numbers, besides the search's seed; None: its id
    eviction_score: float | None = None  # its verifier's score so far, in a search that has a verifier

    @property
    def first_length(self) -> int:
        """Returns the number of tokens that it begins with."""
        return self.inherited + len(self.given)

    @property
    def noise(self) -> int:
        return self.key.trace if self.noise_id is None else self.noise_id


@dataclass(frozen=True, slots=True)
class Forcing:
    """The tokens that end a trace's thinking for it, and the limits at which it is given them."""

    answer: tuple[int, ...]  # they end the thinking and begin an answer
    end_of_thought: tuple[int, ...] = ()  # they only end the thinking; empty where there is no think block
    answer_tokens: int = 32  # the most that a trace writes after `answer`
    is_auto: bool = False  # traces are forced near their limit, near the search's budgets, and when they loop
    thinking_tokens: int | None = None  # the most that a trace thinks, inherited tokens included


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The competition between the traces of a pool: M, K, Δ, w, and the reason for them, in a sentence."""

    islands: int
    swap_size: int
    check_interval: int
    warmup_tokens: int
    why: str = ""
    swap_margin: float = 0.0  # least lead of a parent, in log-odds where scores are chances

    def __str__(self) -> str:
        swaps = count_of(max(1, round(self.swap_size / self.islands)), "swap") + (
            " in each" if self.islands > 1 else ""
        )
        lead = f" by a lead of {self.swap_margin:g} or more" if self.swap_margin else ""
        warmup = f"warm-up of {count_of(self.warmup_tokens, 'token')}"
        return f"{count_of(self.islands, 'island')}, {swaps}{lead}, {warmup}: {self.why}"


class EndReason(StrEnum):
    """The reason for which a trace finished."""

    STOP = "stop"  # it generated a stop token
    LENGTH = "length"  # it reached max_new_tokens
    LOOP = "loop"  # it repeated itself
    MEMORY = "memory"  # it alone needs more KV cache than there is
    CONFIDENCE = "confidence"  # its stop rule


class StopReason(StrEnum):
    """The reason for which a search ended."""

    COMPLETED = "completed"  # the planned number of traces is complete
    EXHAUSTED = "exhausted"  # nothing runs any more
    POLICY = "policy"
    CONSENSUS = "consensus"  # its vote is settled
    BUDGET_TOKENS = "budget_tokens"
    BUDGET_SECONDS = "budget_seconds"
    BUDGET_TRACES = "budget_traces"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Admission:
    """A trace got its KV blocks; `reused` and `recomputed` split its inherited tokens."""

    trace: int
    reused: int
    recomputed: int
    waited_steps: int


@dataclass(frozen=True, slots=True)
class ThoughtScore:
    """One finished thought: its score and the trace's length (inherited part included) at its boundary token."""

    trace: int
    score: float
    num_tokens: int
    embedding: tuple[float, ...] | None = None  # unit norm, if the search requires it
    confidence: float | None = None  # mean of its tokens', where the scorer needs it


@dataclass(frozen=True, slots=True)
class Eviction:
    """A trace lost its KV blocks because an allocation failed; `score` is what the engine ranked it by."""

    trace: int
    action: PressureAction
    score: float | None
    num_tokens: int
    tokens: tuple[int, ...]  # all it generated or inherited; empty for a queued one, which goes on later


@dataclass(frozen=True, slots=True)
class TraceEnd:
    """A trace ended by itself; `tokens` is all it generated or inherited, the stop token included."""

    trace: int
    reason: EndReason
    tokens: tuple[int, ...]
    confidence: TraceConfidence | None = None  # if the search requires it


@dataclass(slots=True)
class SearchStep:
    """The events of one engine step in one search, in their order; filled in while the step is under way."""

    evicted: list[Eviction] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    num_generated: int = 0
    scored: list[ThoughtScore] = field(default_factory=list)
    finished: list[TraceEnd] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The wall-clock time of one engine step, divided."""

    engine: float = 0.0
    scoring: float = 0.0
    scheduling: float = 0.0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One engine step. It is sparse: a trace that neither started, finished a thought nor ended is only counted."""

    searches: Mapping[int, SearchStep]
    kv_used_tokens: int
    kv_capacity_tokens: int
    seconds: StepSeconds


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a live trace."""

    num_tokens: int  # generated, inherited part included
    is_thinking: bool  # False once it closed its think block


class ChatMessage(TypedDict):
    """One turn of a chat, as chat templates take it."""

    role: str
    content: str
    tool_calls: NotRequired[Sequence[Mapping[str, object]]]  # of an assistant, in OpenAI's form
    tool_call_id: NotRequired[str]  # of the result of a tool


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools that a model may call, in OpenAI's form: chat templates take it."""

    tools: tuple[Mapping[str, object], ...]
    names: frozenset[str]
    choice: str = "auto"  # auto: a call or an answer; required: a call; else the name of the function to call
    are_parallel: bool = True  # several calls may be made together


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, as text or as chat messages, the beginning of the model's answer, and the tools that it may call."""

    question: str | Sequence[ChatMessage]
    id: str = "problem"
    prefix_tokens: tuple[int, ...] = ()  # of the answer: traces continue it, and it counts as part of them
    tools: Toolbox | None = None  # traces then vote over calls

    def __post_init__(self) -> None:
        """Checks the id: it names a problem's folder, and must not lead out of the run's."""
        if self.id in ("", ".", "..") or any(mark in self.id for mark in "/\\\0"):
            raise UserError(f"the id {self.id!r} cannot name a problem's folder: leave out '/' and '\\', and use "
                            "letters, digits, '.', '_' and '-'")  # fmt: skip

    @property
    def last_message(self) -> str:
        """The text of the question, or of its last message."""
        if isinstance(self.question, str):
            return self.question
        return self.question[-1]["content"] if self.question else ""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that a package brings along, found by its name (entry-point group `gambit.models`)."""

    folder: Path
    check_question: Callable[[str], object]  # raises UserError for a question that the model was not made for
