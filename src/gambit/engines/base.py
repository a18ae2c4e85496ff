"""The engine protocol: runs the traces of several searches in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gambit.errors import UserError
from gambit.text.boundary import BoundaryRule
from gambit.text.tokenizers import Tokenizer
from gambit.types import Progress, StepBatch, TraceKey, TraceSpec


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, for the log and for checks before a search starts."""

    name: str
    model: str
    device: str
    dtype: str
    hidden_size: int
    context_tokens: int
    kv_capacity_tokens: int
    block_tokens: int
    versions: Mapping[str, str] = field(default_factory=dict)
    most_traces: int | None = None  # that run at a time; None: as many as the KV cache holds
    most_traces_option: str | None = None  # the engine option that raises it
    kv_asked_tokens: int | None = None  # as the user said, before it is rounded down to whole blocks


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """One search as an engine sees it: a prompt that its roots share and how its text is cut into thoughts."""

    search: int
    prompt: tuple[int, ...]
    rule: BoundaryRule
    stop_ids: frozenset[int]
    kv_quota_tokens: int | None = None  # None: an equal share among the open searches
    keeps_histories: bool = False  # what scorers remember of ended traces stays until the search is closed
    confidence_window: int = 0  # tokens; token confidence is measured and reported at each trace's end unless 0
    embedding_size: int = 0  # of the vector reported with each scored thought; none with 0
    has_verifier: bool = (
        False  # traces are evicted by the scores of `set_scores`, not by those of the engine's own scorer
    )


def check_prompt(info: EngineInfo, num_tokens: int) -> None:
    """Refuse a prompt that leaves no room for a single token."""
    if num_tokens >= info.context_tokens:
        raise UserError(f"the prompt has {num_tokens} tokens, the model's context is {info.context_tokens}: "
                        "shorten the problem")  # fmt: skip
    if num_tokens + info.block_tokens > info.kv_capacity_tokens:
        raise UserError(f"{_kv_budget(info)} cannot hold a prompt of {num_tokens} tokens and one block more: raise "
                        f"--kv-budget-tokens to {_whole_blocks(num_tokens + info.block_tokens, info)}")  # fmt: skip


def _kv_budget(info: EngineInfo) -> str:
    if info.kv_asked_tokens in (None, info.kv_capacity_tokens):
        return f"a KV budget of {info.kv_capacity_tokens} tokens"
    return (
        f"a KV budget of {info.kv_asked_tokens} tokens, which is {info.kv_capacity_tokens} in whole blocks of "
        f"{info.block_tokens},"
    )


def _whole_blocks(num_tokens: int, info: EngineInfo) -> int:
    return -(-num_tokens // info.block_tokens) * info.block_tokens


class Engine(Protocol):
    """What a search needs of an engine. Calls come from one thread; nothing happens between calls to `step`.

    The contract, tested for every engine in `tests/engines/test_engine_contract.py`:

    - a running trace gets exactly one token per step; a trace that was stopped, evicted or has finished gets none;
    - a child's next token depends on its tokens, its sampling and its own id alone: greedy, it continues its parent;
    - what else is in the batch changes no trace;
    - thoughts are scored once each, with the state at the scorer's position, also across a branch; a scorer that
      remembers thoughts gets each trace's own, the inherited ones included, whatever became of its parent;
    - KV blocks run out at an allocation and nowhere else, and then the rule of the victim is obeyed; a waiting trace
      does not cost a running one its blocks;
    - a trace with a stop rule ends with the first token at which the rule holds.
    """

    @property
    def info(self) -> EngineInfo:
        """What it runs, and how much fits."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def open(self, spec: SearchSpec) -> None:
        """Announce a search; its prompt must leave room for at least one token."""

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        """Queue traces of open searches; they are admitted by a later `step`, in this order."""

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        """End traces now; gives all tokens each had generated or inherited."""

    def set_scores(self, scores: Mapping[TraceKey, float]) -> None:
        """What the verifier of a search thinks of its live traces; evictions follow it from the next step on."""

    def regroup(self, islands: Mapping[TraceKey, int]) -> None:
        """Live traces that belong to another island from now on."""

    def progress(self, search: int) -> Mapping[int, Progress]:
        """How far the live traces of a search are."""

    def tokens(self, key: TraceKey, start: int = 0) -> Sequence[int]:
        """What a live trace has generated or inherited so far, from a position on."""

    def step(self) -> StepBatch:
        """Advance every admitted trace by one token."""

    def close_search(self, search: int) -> None:
        """Forget a search and whatever still runs of it."""

    def close(self) -> None:
        """Give back memory and processes."""
