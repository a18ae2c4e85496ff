"""Every option a user can set, with its default, and how flags and files become a checked configuration."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, runtime_checkable

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from gambit.answers import AnswerKind
from gambit.answers.schema import schema_text
from gambit.config.effort import SIZES, Effort, filled
from gambit.errors import UserError
from gambit.results.vote import Consensus, VoteKind
from gambit.types import Aggregation

# Far above what any engine holds, and low enough to refuse a slip of the finger.
MOST_TRACES_AT_ONCE = 65_536
MOST_TRACES = 10_000_000
MOST_TOKENS = 10_000_000  # of one trace
MOST_TOKENS_IN_ALL = 10**12
MOST_SECONDS = 10_000_000  # four months
Traces = Annotated[int, Field(ge=1, le=MOST_TRACES)]
PoolSize = Annotated[int, Field(ge=1, le=MOST_TRACES_AT_ONCE)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
TokensInAll = Annotated[int, Field(ge=1, le=MOST_TOKENS_IN_ALL)]
TokensOrNone = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, lt=1)]
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?|mps")
DTYPES = ("auto", "float32", "float16", "bfloat16")
Model = TypeVar("Model", bound=BaseModel)
# Options whose entries may come one by one.
NESTED_OPTIONS = ("adapters", "engine_options", "policy_options", "verifier_options")


class BranchPoint(StrEnum):
    """The place where a child leaves its parent; the paper's children continue mid-sentence."""

    LAST_TOKEN = "last_token"
    LAST_BOUNDARY = "last_boundary"


class PresetSource(StrEnum):
    """The source of settings that the user leaves open."""

    MODEL = "model"  # the model's own preset if it has one, else auto
    AUTO = "auto"  # from trace and thought lengths of earlier runs or of the model's preset
    PAPER = "paper"  # C = 256, K = 16, Δ = 200, w = 12,000


class Compat(StrEnum):
    """Another program whose rules a search follows."""

    AUTHORS = "authors"  # the public code of the method's authors


# Options that `compat: authors` fills where they are left open. docs/differences.md has the rules and their reasons.
_BY_AUTHORS = {"boundary": "blank-line-token", "own_limit": True}


class CheckedModel(BaseModel):
    """Base of options from flags, files and calls: every validation error becomes a one-sentence UserError."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    if not TYPE_CHECKING:  # type checkers see the fields as arguments

        def __init__(self, **values: object) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise UserError(sentence_of(type(self), error)) from error


@runtime_checkable
class PolicyObject(Protocol):
    """A policy, or its class, in place of a name: what is looked at here of `gambit.api.Policy`."""

    name: ClassVar[str]
    default_vote: ClassVar[VoteKind]

    @property
    def decide(self) -> object: ...


def policy_fault(policy: object) -> str | None:
    """Returns what keeps an object, or a class, from being a policy."""
    parts = ("name", "default_vote", "from_settings" if isinstance(policy, type) else "wake", "initial_state", "decide")
    if lacking := [part for part in parts if not hasattr(policy, part)]:
        return f"give the name of a policy, or an object with {', '.join(parts)}; this lacks {', '.join(lacking)}"
    vote, name = getattr(policy, "default_vote", None), getattr(policy, "name", None)
    if isinstance(vote, VoteKind) and isinstance(name, str):
        return None
    return f"its name is {name!r} and its default_vote {vote!r}: give a text and a VoteKind, as in VoteKind.SCORE"


def _named_or_object(value: object) -> object:
    if not isinstance(value, str) and (fault := policy_fault(value)) is not None:
        raise UserError(f"policy = {_shown(value)}: {fault}")
    return value


class SearchConfig(CheckedModel):
    """Options of a search. Those left out (None) come from the model's preset, or are worked out (`preset="auto"`)."""

    policy: Annotated[str | PolicyObject, PlainValidator(_named_or_object), WithJsonSchema({"type": "string"})] = Field(
        "gambit", description="search method; `gambit policies` lists them with their options"
    )
    policy_options: dict[str, Any] = Field(default_factory=dict, description="option of that method alone")
    compat: Compat | None = Field(
        None, description="authors: decide, cut thoughts, vote and prompt as the authors' public code does"
    )
    effort: Effort | None = Field(
        None,
        description="low: one trace that thinks 4,096 tokens at most; medium: rounds of 4 to 16 traces; high: the full "
        "pool; default: high, but for models that think medium (solve, serve, compare), unless an option sizes it",
    )
    preset: PresetSource = Field(PresetSource.MODEL, description="where open settings come from: model, auto or paper")
    capacity: PoolSize | None = Field(None, description="C: most traces in the pool at once")
    num_traces: Traces | None = Field(None, description="stop after this many completed traces; default: capacity")
    islands: PoolSize | Literal["auto"] | None = Field(
        None,
        description="M: parts of the pool that compete by themselves and vote together; 1 is the paper's pool, "
        "capacity is self-consistency; auto: by how far the scorer can be trusted",
    )
    swap_size: PoolSize | None = Field(None, description="K: traces swapped per tournament")
    check_interval: Tokens | None = Field(None, description="Decode steps between tournaments")
    warmup_tokens: TokensOrNone | None = Field(
        None, description="w: tokens a trace must generate itself before it may be a parent"
    )
    swap_margin: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None,
        description="least lead of a parent over the trace that gives way to its child, in log-odds where scores are "
        "chances; default: 0, or by how far the scorer can be trusted",
    )
    hard_floor: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="δ: a running trace below it becomes a ghost; 0 switches it off; default: 0.1, or off where the "
        "scorer can be trusted little",
    )
    child_temperature: Annotated[float, Field(gt=0, le=100)] = Field(1.0, description="factor of a child's temperature")
    branch_point: BranchPoint = Field(
        BranchPoint.LAST_TOKEN, description="where a child leaves its parent: last_token or last_boundary"
    )
    ghost_parents: bool = Field(False, description="let evicted traces be parents (their prefix is recomputed)")

    max_new_tokens: Tokens | None = Field(None, description="most tokens of a trace, inherited ones included")
    own_limit: bool = Field(
        False, description="count only a child's own tokens against --max-new-tokens; the context bounds the whole"
    )
    boundary: str | None = Field(
        None,
        description="where thoughts end: blank-line, blank-line-token, line, sentence or stride:N (every N tokens); "
        "default: as the scorer was trained",
    )
    temperature: Temperature | None = Field(None, description="of sampling; 0 is greedy")
    top_p: TopP | None = Field(None, description="nucleus sampling; 1 switches it off")
    top_k: TokensOrNone | None = Field(None, description="most likely tokens to sample from; 0 switches it off")
    min_p: MinP | None = Field(None, description="least share of the likeliest token; 0 switches it off")
    seed: Seed = Field(0, description="same seed, same tree, same answer")
    own_noise: bool = Field(
        False, description="draw each problem's random numbers by its id too, so that problems vary independently"
    )

    budget_tokens: TokensInAll | None = Field(None, description="stop before more tokens than this are generated")
    budget_seconds: Seconds | None = Field(None, description="stop after this long")
    budget_traces: Traces | None = Field(None, description="stop after this many completed traces")

    force_answers: Literal["auto", "off"] = Field(
        "off",
        description="auto: a trace near its limit, near the search's budgets or in a loop is given an end of thought "
        "and the beginning of an answer; for thinking models",
    )
    thinking_tokens: Tokens | None = Field(
        None, description="end a trace's thinking after this many tokens, inherited ones included; it then answers"
    )

    consensus_stop: str | float = Field(
        "off", description="end once the vote is settled: off, certain (nobody can catch up) or a share such as 0.95"
    )
    consensus_min_traces: Traces | None = Field(
        None,
        description="completed traces before a share of the votes counts for consensus_stop; default: 16, or "
        "first_traces where that is less",
    )
    first_traces: Traces | None = Field(
        None,
        description="traces to begin with; as many again each time all are over and the vote is not settled "
        "(consensus_stop), up to num_traces; default: all at once",
    )
    vote: VoteKind | None = Field(
        None, description=f"how answers are weighed: {', '.join(VoteKind)}; default: the policy's own"
    )
    confidence_window: Tokens = Field(
        2048, description="tokens in a window of the confidence votes; DeepConf has an option of its own"
    )
    lora: str | None = Field(None, description="adapter to search with: its folder, or a name given by --adapter; vllm")
    answer: AnswerKind = Field(
        AnswerKind.BOXED, description="how an answer is read: boxed, choice, number, text or json (an object)"
    )
    json_schema: str | None = Field(
        None, description="JSON schema that every answer is held to, an object; sets answer to json; vllm"
    )
    system_prompt: str | None = Field(
        None, description="what the model is told first; '' for nothing; default: its own, or to box its answer"
    )
    enable_thinking: bool = Field(True, description="let the model think first, where its template has the choice")

    @model_validator(mode="before")
    @classmethod
    def _fills_open_options(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fills what `effort` and `compat` decide; options that are given stay as they are."""
        values = filled(values)
        if values.get("json_schema") is not None:
            values = {**values, "answer": AnswerKind.JSON}
        if values.get("compat") != Compat.AUTHORS:
            return values
        given = {name: value for name, value in values.items() if value is not None}
        is_ours = given.get("policy", "gambit") == "gambit"
        return {**_BY_AUTHORS, **given, **({"policy": "gambit-authors"} if is_ours else {})}

    @field_validator("boundary")
    @classmethod
    def _is_boundary(cls, value: str | None) -> str | None:
        from gambit.text.boundary import check_boundary_rule  # not before it is needed: it imports numpy

        if value is not None:
            check_boundary_rule(value)
        return value

    @field_validator("json_schema", mode="before")
    @classmethod
    def _is_schema(cls, value: object) -> str | None:
        return None if value is None else schema_text(value)

    @field_validator("consensus_stop")
    @classmethod
    def _is_stop(cls, value: str | float) -> str | float:
        Consensus.parse(value, min_traces=1)
        return value

    def with_usual(self, effort: Effort) -> "SearchConfig":
        """Returns the options with this effort, unless they say themselves how much to search."""
        values = self.model_dump(exclude_unset=True)
        return self if SIZES & values.keys() else SearchConfig(**values, effort=effort)

    @property
    def policy_name(self) -> str:
        return self.policy if isinstance(self.policy, str) else self.policy.name

    @property
    def consensus(self) -> Consensus | None:
        least = self.consensus_min_traces or min(16, self.first_traces or 16)
        return Consensus.parse(self.consensus_stop, least)

    @model_validator(mode="after")
    def _swaps_fit(self) -> Self:
        """Checks K before a model is loaded; a preset's capacity is checked with the run's settings."""
        if self.capacity is not None and self.swap_size is not None:
            check_swap(self.swap_size, self.capacity)
        return self


_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)i?B?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """An amount of a device's memory: a share of it, or bytes."""

    share: float | None
    num_bytes: int | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `0.3`, or `8GB` (powers of 1024)."""
        found = _MEMORY.fullmatch(text.strip())
        number = float(found[1]) if found else 0.0
        if found is None or number <= 0 or (number >= 1 and text.strip() == found[1]):
            raise ValueError("a share between 0 and 1 such as 0.3, or bytes such as 8GB, is needed")
        if number < 1 and text.strip() == found[1]:
            return cls(number, None)
        return cls(None, int(number * 1024 ** " KMGT".index(found[2].upper() or " ")))

    def share_of(self, total_bytes: int) -> float:
        return self.share if self.share is not None else (self.num_bytes or 0) / total_bytes

    def bytes_of(self, total_bytes: int) -> int:
        return int(self.share * total_bytes) if self.share is not None else self.num_bytes or 0


class EngineConfig(CheckedModel):
    """Options of a solver: the model, the engine that runs it and the scorer that judges its thoughts."""

    model: str = Field("pawn", description="folder or hub name; pawn is the bundled model")
    engine: str = Field(
        "auto", description="what runs it: local, vllm or auto (vllm where a tested build and its GPU are there)"
    )
    engine_options: dict[str, Any] = Field(default_factory=dict, description="passed to the engine as it is")
    adapters: dict[str, str] = Field(
        default_factory=dict, description="LoRA adapter that searches may name with --lora, as NAME=FOLDER; vllm"
    )
    device: str = Field("auto", description="where it runs: auto, cpu, cuda, cuda:0 or mps")
    dtype: str = Field("auto", description="type of its weights: auto, float32, float16 or bfloat16")
    scorer: str = Field(
        "auto",
        description="checkpoint file, hf:ORG/REPO, published, a further one of the model's by name, confidence, "
        "constant; auto: its own, or the published one; "
        "verifier:[FORMAT:]FOLDER, verifier:NAME or verifier:http://…: a verifier that reads thoughts",
    )
    any_weights: bool = Field(False, description="use a scorer made for other weights of this model without a warning")
    offline: bool = Field(False, description="fetch nothing: use models and scorers as they are on this machine")
    kv_budget_tokens: TokensInAll | None = Field(
        None, description="tokens in the KV cache; default: what fits into memory"
    )
    memory_ratio: Annotated[float, Field(gt=0, le=1)] = Field(0.9, description="r: share of GPU memory to use")
    verifier_engine: Literal["auto", "local", "vllm"] = Field(
        "auto", description="what runs the verifier of --scorer verifier:…; auto: vllm on a GPU where it is installed"
    )
    verifier_device: str = Field("auto", description="where the verifier runs; auto: where the model runs")
    verifier_memory: str = Field(
        "0.3",
        description="the verifier's part of the device's memory, a share of it or bytes such as 8GB; the "
        "model gets the rest of --memory-ratio",
    )
    verifier_gpu_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="the most of a GPU's processors that the verifier takes at a time, so that decoding beside it is "
        "not held up; less than 1 needs NVIDIA's MPS",
    )
    verifier_aggregation: Aggregation | None = Field(
        None,
        description="how the verifier's scores of thoughts become that of a trace, last or mean; default: as it was "
        "made for, or last",
    )
    verifier_options: dict[str, Any] = Field(
        default_factory=dict, description="passed as it is to vLLM, where that runs the verifier"
    )
    verifier_lag: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        None,
        description="a tournament goes by the thoughts that had ended so many steps before it, whose scores are there "
        "without waiting; default: a quarter of --check-interval",
    )
    verifier_async: bool = Field(
        False, description="tournaments take the scores that have arrived instead of waiting; a run may not repeat"
    )
    verifier_optional: bool = Field(
        False, description="when the verifier fails, go on with the engine's own scores instead of ending"
    )

    @field_validator("verifier_memory", mode="before")
    @classmethod
    def _is_memory(cls, value: object) -> str:
        MemoryPart.parse(str(value))
        return str(value)

    @field_validator("device", "verifier_device")
    @classmethod
    def _is_device(cls, value: str) -> str:
        if DEVICE.fullmatch(value) is None:
            raise UserError(f"unknown device {value!r}: use auto, cpu, cuda, cuda:0 or mps")
        return value

    @property
    def verifier_part(self) -> MemoryPart:
        return MemoryPart.parse(self.verifier_memory)

    @field_validator("dtype")
    @classmethod
    def _is_dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise UserError(f"unknown dtype {value!r}: use {', '.join(DTYPES)}")
        return value

    @field_validator("model", "engine", "scorer")
    @classmethod
    def _is_named(cls, value: str) -> str:
        if not value.strip() or "\0" in value:
            raise ValueError("a name is needed")
        return value


def check_swap(swap_size: int, capacity: int) -> None:
    if swap_size > capacity:
        raise UserError(f"swap size {swap_size} is larger than the capacity {capacity}: "
                        "lower --swap-size or raise --capacity")  # fmt: skip


def build(kind: type[Model], values: Mapping[str, object]) -> Model:
    """Returns a config from plain values; pydantic's findings become one sentence."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise UserError(sentence_of(kind, error)) from error


def sentence_of(kind: type[BaseModel], error: ValidationError) -> str:
    """Returns one sentence that names each wrong option and what is wrong with it."""
    return "; ".join(dict.fromkeys(_finding(kind, dict(found)) for found in error.errors()))


# Types that pydantic calls by Python's names.
_IN_YAML = {"tuple_type": "must be a list, as in [a, b]", "dict_type": "must be a mapping, as in {key: value}"}


def _finding(kind: type[BaseModel], found: dict[str, object]) -> str:
    location = found["loc"]
    assert isinstance(location, tuple)
    name = str(location[0]) if location else "config"
    if found["type"] == "extra_forbidden":
        return unknown_key(name, kind.model_fields)
    message = str(found["msg"]).lower().removeprefix("value error, ")
    return f"{name} = {_shown(found['input'])}: {_IN_YAML.get(str(found['type']), message)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"


def unknown_key(name: str, known: Mapping[str, object], what: str = "option") -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known)) or 'none'}"
    return f"unknown {what} {_shown(name)}: {hint}"


def read_config_file(path: Path) -> dict[str, object]:
    """Returns the options of a YAML recipe: those of both configs, flat."""
    from gambit.config.yaml_file import read_mapping

    raw = read_mapping(path, "config")
    known = {**SearchConfig.model_fields, **EngineConfig.model_fields}
    for key in raw:
        if key not in known:
            raise UserError(f"{path}: {unknown_key(str(key), known)}")
    return raw


def overlaid(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Lays flags over a file's options; options of an engine, a policy or a verifier one by one."""
    values = {**below, **above}
    for name in NESTED_OPTIONS:
        lower, upper = below.get(name), above.get(name)
        if isinstance(lower, dict) and isinstance(upper, dict):
            values[name] = {**lower, **upper}
    return values
