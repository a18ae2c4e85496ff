"""The engine protocol, and the choice and start of an engine."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from gambit.config import registry
from gambit.config.options import EngineConfig
from gambit.engines.vllm import installed, note_on
from gambit.errors import UserError
from gambit.models.files import adapter_rank, check_weights
from gambit.scorers.base import Scorer
from gambit.text.boundary import BoundaryRule
from gambit.text.tokenizers import Tokenizer
from gambit.types import Aggregation, Progress, StepBatch, TraceKey, TraceSpec


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine, for the log and for checks before a search starts."""

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
    kv_asked_tokens: int | None = None  # as the user set it, before it is rounded down to whole blocks
    state_tokens: int = 0  # that weigh as much in the KV cache as the state of one trace's recurrent layers
    token_weight: int = 1  # 0 if no layer keeps keys and values

    def weight(self, num_tokens: int) -> int:
        """Returns what a trace of so many tokens takes of the KV cache, in tokens."""
        return num_tokens * self.token_weight + self.state_tokens


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """One search as an engine sees it: a prompt that its roots share and how its text is cut into thoughts."""

    search: int
    prompt: tuple[int, ...]
    rule: BoundaryRule
    stop_ids: frozenset[int]
    kv_quota_tokens: int | None = None  # None: an equal share among the open searches
    keeps_histories: bool = False  # scorers' memory of ended traces stays until the search is closed
    confidence_window: int = 0  # tokens; token confidence is measured and reported at each trace's end unless 0
    embedding_size: int = 0  # of the vector reported with each scored thought; none with 0
    aggregation: Aggregation | None = None  # of the scores by which traces are evicted; None: the scorer's
    lora: str | None = None  # the name of an adapter of the engine; None: the weights as they are
    has_verifier: bool = False  # traces are evicted by the scores of `set_scores`, not those of the engine's own scorer
    json_schema: str | None = None  # of every answer, for an engine with a `check_schema`
    answer_after: int | None = None  # the token after which an answer begins; None: with the first


def check_prompt(info: EngineInfo, num_tokens: int) -> None:
    """Raises for a prompt that leaves no room for a single token."""
    if num_tokens >= info.context_tokens:
        raise UserError(f"the prompt has {num_tokens} tokens, the model's context is {info.context_tokens}: "
                        "shorten the problem")  # fmt: skip
    # The prompt's state is kept, and each root begins with a copy.
    if info.weight(num_tokens) + info.weight(info.block_tokens) > info.kv_capacity_tokens:
        budget = f"{info.kv_capacity_tokens} tokens"
        if info.kv_asked_tokens not in (None, info.kv_capacity_tokens):
            capacity = f"which is {info.kv_capacity_tokens} in whole blocks of {info.block_tokens}"
            budget = f"{info.kv_asked_tokens} tokens, {capacity},"
        least = info.weight(-(-num_tokens // info.block_tokens) * info.block_tokens) + info.weight(info.block_tokens)
        states = f", two states that weigh {info.state_tokens} tokens each," if info.state_tokens else ""
        raise UserError(f"a KV budget of {budget} cannot hold a prompt of {num_tokens} tokens{states} and one block "
                        f"more: raise --kv-budget-tokens to {least}")  # fmt: skip


class Engine(Protocol):
    """Everything a search needs of an engine. Calls come from one thread. Nothing happens between calls to `step`.

    The contract, tested for every engine in `tests/engines/test_engine_contract.py`:

    - a running trace gets exactly one token per step; a trace that was stopped, evicted or has finished gets none;
    - a child's next token depends on its tokens, its sampling and its own id alone: greedy, it continues its parent;
    - a child with `given` tokens continues them as if it had sampled them, and none of its later thoughts is scored;
    - no other trace in the batch changes it;
    - thoughts are scored once each, with the state at the scorer's position, also across a branch; a scorer that
      remembers thoughts gets each trace's own, the inherited ones included, also when its parent is gone;
    - KV blocks run out at an allocation and nowhere else, and then the rule of the victim is obeyed; a waiting trace
      does not cost a running one its blocks;
    - a trace with a stop rule ends with the first token at which the rule holds.
    """

    @property
    def info(self) -> EngineInfo:
        """The model it runs, and the room that it has."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def open(self, spec: SearchSpec) -> None:
        """Announces a search; its prompt must leave room for at least one token."""

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        """Queues traces of open searches. They are admitted by a later `step`, in this order."""

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        """Ends traces now; returns all tokens each had generated or inherited."""

    def set_scores(self, scores: Mapping[TraceKey, float]) -> None:
        """Takes the verifier's scores of live traces; evictions follow them from the next step on."""

    def regroup(self, islands: Mapping[TraceKey, int]) -> None:
        """Moves live traces to other islands."""

    def progress(self, search: int) -> Mapping[int, Progress]:
        """Returns the progress of a search's live traces, by trace."""

    def tokens(self, key: TraceKey, start: int = 0) -> Sequence[int]:
        """Returns the tokens that a live trace has generated or inherited so far, from a position on."""

    def step(self) -> StepBatch:
        """Advances every admitted trace by one token."""

    def close_search(self, search: int) -> None:
        """Ends a search and all its traces."""

    def close(self) -> None:
        """Frees memory and ends processes."""


GROUP = "gambit.engines"
_LOADING = threading.Lock()  # transformers and vLLM patch torch while they load a model: one at a time
StartEngine = Callable[[EngineConfig, str, Scorer], Engine]


def check_engine(config: EngineConfig) -> str:
    """Returns the name of the engine that will run; raises for mistakes that can be found without starting it."""
    name = _auto_engine(config.device) if config.engine == "auto" else config.engine
    if not registry.knows(GROUP, name):
        registry.load(GROUP, name)  # raises, with the known names
    if name == "local" and config.engine_options:
        given = ", ".join(f"--engine-option {key}" for key in config.engine_options)
        raise UserError(f"the local engine has no options of its own, but was given {given}: leave it out, or use "
                        "--engine vllm")  # fmt: skip
    if config.adapters and name == "local":
        raise UserError(f"the local engine serves no adapters, and {', '.join(config.adapters)} was given: use "
                        "--engine vllm, or merge the adapter into the weights")  # fmt: skip
    for folder in config.adapters.values():
        adapter_rank(folder)  # raises for a folder without an adapter
    return name


def start_engine(config: EngineConfig, source: str, scorer: Scorer) -> Engine:
    """Checks the weights and starts an engine. `source` is the model's folder or hub name."""
    start = cast("StartEngine", registry.load(GROUP, check_engine(config)))
    check_weights(source)
    with _LOADING:
        return start(config, source, scorer)


def _auto_engine(device: str) -> str:
    """Returns "vllm" where a tested build is installed and its GPU is there, else "local", which runs everywhere."""
    found = installed()
    is_tried = found is not None and found[1] == "cuda" and note_on(*found) is None
    if not is_tried or device.partition(":")[0] not in ("auto", "cuda"):
        return "local"
    import torch

    return "vllm" if torch.cuda.is_available() else "local"
