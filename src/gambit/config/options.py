"""Every option a user can set, with its default, and how flags and files become a checked configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gambit.core.errors import UserError
from gambit.results.vote import Consensus, VoteKind
from gambit.text.answers import AnswerKind

Positive = Annotated[int, Field(ge=1)]
Model = TypeVar("Model", bound=BaseModel)
NESTED_OPTIONS = ("engine_options", "policy_options")  # of which each may be given by itself


class BranchPoint(StrEnum):
    """Where a child leaves its parent; the paper's children continue mid-sentence."""

    LAST_TOKEN = "last_token"
    LAST_BOUNDARY = "last_boundary"


class PresetSource(StrEnum):
    """Where settings come from that the user leaves open."""

    MODEL = "model"  # the model's own preset if it has one, else auto
    AUTO = "auto"  # from trace and thought lengths of earlier runs or of the model's preset
    PAPER = "paper"  # C = 256, K = 16, Δ = 200, w = 12,000


class SearchConfig(BaseModel):
    """How to search. What is left out (None) comes from the model's preset, or is worked out (`preset="auto"`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = Field("gambit", description="search method; `gambit policies` lists them with their options")
    policy_options: dict[str, Any] = Field(default_factory=dict, description="options of that method alone")
    preset: PresetSource = Field(PresetSource.MODEL, description="where open settings come from: model, auto or paper")
    capacity: Positive | None = Field(None, description="C: most traces in the pool at once")
    num_traces: Positive | None = Field(None, description="stop after this many completed traces; default: capacity")
    islands: Positive | Literal["auto"] | None = Field(
        None,
        description="M: parts of the pool that compete by themselves and vote together; 1 is the paper's pool, "
        "capacity is self-consistency; auto: by how far the scorer can be trusted",
    )
    swap_size: Positive | None = Field(None, description="K: traces swapped per tournament")
    check_interval: Positive | None = Field(None, description="Δ: decode steps between tournaments")
    warmup_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="w: tokens a trace must generate itself before it may be a parent"
    )
    hard_floor: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="δ: a running trace below it becomes a ghost; 0 switches it off"
    )
    child_temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="multiplies a child's temperature")
    branch_point: BranchPoint = Field(
        BranchPoint.LAST_TOKEN, description="where a child leaves its parent: last_token or last_boundary"
    )
    ghost_parents: bool = Field(False, description="let evicted traces be parents (their prefix is recomputed)")

    max_new_tokens: Positive | None = Field(None, description="per trace, inherited part included")
    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="1 switches it off")
    top_k: Annotated[int, Field(ge=0)] | None = Field(None, description="0 switches it off")
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = Field(None, description="0 switches it off")
    seed: int = Field(0, description="same seed, same tree, same answer")

    budget_tokens: Positive | None = Field(None, description="never generate more tokens than this")
    budget_seconds: Annotated[float, Field(gt=0)] | None = Field(None, description="stop after this long")
    budget_traces: Positive | None = Field(None, description="stop after this many completed traces")

    consensus_stop: str | float = Field(
        "off", description="end once the vote is settled: off, certain (nobody can catch up) or a share such as 0.95"
    )
    consensus_min_traces: Positive = Field(
        16, description="completed traces before a share of the votes counts for consensus_stop"
    )
    vote: VoteKind | None = Field(None, description=f"{', '.join(VoteKind)}; default: the policy's own")
    confidence_window: Positive = Field(
        2048, description="tokens in a window of the confidence votes; DeepConf has an option of its own"
    )
    answer: AnswerKind = Field(AnswerKind.BOXED, description="how an answer is read: boxed, choice, number or text")
    system_prompt: str | None = Field(
        None, description="default: the model's own, or one that asks for a box; '' for none"
    )
    enable_thinking: bool = Field(True, description="let the model think, where its chat template offers the choice")

    @field_validator("consensus_stop")
    @classmethod
    def _is_stop(cls, value: str | float) -> str | float:
        Consensus.parse(value, min_traces=1)
        return value

    @property
    def consensus(self) -> Consensus | None:
        return Consensus.parse(self.consensus_stop, self.consensus_min_traces)

    @model_validator(mode="after")
    def _swaps_fit(self) -> Self:
        """Before a model is loaded; a preset's capacity is checked with the run's settings."""
        if self.capacity is not None and self.swap_size is not None:
            check_swap(self.swap_size, self.capacity)
        return self


class EngineConfig(BaseModel):
    """What to search with: the model, the engine that runs it and the scorer that judges its thoughts."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field("pawn", description="folder or hub name; pawn is the bundled model")
    engine: str = Field("auto", description="local or vllm; auto: vllm where a tested build and its GPU are there")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="passed to the engine as they are")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, mps")
    dtype: str = Field("auto", description="auto, float32, float16, bfloat16")
    scorer: str = Field(
        "auto", description="checkpoint file, a further one of the model's by name, confidence, constant; auto: its own"
    )
    any_weights: bool = Field(False, description="use a scorer made for other weights of this model without a warning")
    kv_budget_tokens: Positive | None = Field(None, description="KV room in tokens; default: what memory allows")
    memory_ratio: Annotated[float, Field(gt=0, le=1)] = Field(0.9, description="r: share of GPU memory to use")


def check_swap(swap_size: int, capacity: int) -> None:
    if swap_size > capacity:
        raise UserError(f"swap size {swap_size} is larger than the capacity {capacity}: "
                        "lower --swap-size or raise --capacity")  # fmt: skip


def build(kind: type[Model], values: Mapping[str, object]) -> Model:
    """A config from plain values; pydantic's findings become one sentence."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise UserError("; ".join(_sentence(kind, dict(found)) for found in error.errors())) from error


def _sentence(kind: type[BaseModel], found: dict[str, object]) -> str:
    location = found["loc"]
    assert isinstance(location, tuple)
    name = ".".join(map(str, location[:1])) or "config"
    if found["type"] == "extra_forbidden":
        return unknown_key(name, kind.model_fields)
    return f"{name} = {found['input']!r}: {str(found['msg']).lower().removeprefix('value error, ')}"


def unknown_key(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"unknown option {name!r}: {hint}"


def read_config_file(path: Path) -> dict[str, object]:
    """A YAML recipe: the options of both configs, flat."""
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read config {path}: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"config {path} must be a mapping of options to values, not {type(raw).__name__}")
    known = {**SearchConfig.model_fields, **EngineConfig.model_fields}
    for key in raw:
        if key not in known:
            raise UserError(f"{path}: {unknown_key(str(key), known)}")
    return raw


def overlaid(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Flags over a file's options; those of an engine or a policy one by one."""
    values = {**below, **above}
    for name in NESTED_OPTIONS:
        lower, upper = below.get(name), above.get(name)
        if isinstance(lower, dict) and isinstance(upper, dict):
            values[name] = {**lower, **upper}
    return values
