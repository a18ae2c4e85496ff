"""Every option with its default, and how presets, history and the user's words become the settings of one run."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gambit.answers import AnswerKind
from gambit.errors import UserError
from gambit.prompts import DEFAULT_SYSTEM_PROMPT
from gambit.types import Sampling
from gambit.vote import Consensus, VoteKind

Positive = Annotated[int, Field(ge=1)]
T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
DEFAULT_CAPACITY = 64
DEFAULT_MAX_NEW_TOKENS = 32_768
PRESET_FILE = "gambit.json"  # in a model's folder
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
            _check_swap(self.swap_size, self.capacity)
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


@dataclass(frozen=True, slots=True)
class Preset:
    """What travels with a model: settings that suit its traces, and how long these are."""

    capacity: int | None = None
    swap_size: int | None = None
    check_interval: int | None = None
    warmup_tokens: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    system_prompt: str | None = None
    median_length: float | None = None  # of completed traces, in tokens
    mean_thought_length: float | None = None  # in tokens

    def lengths_only(self) -> Preset:
        """Without the pool's settings: these are then worked out from the lengths."""
        return dataclasses.replace(self, swap_size=None, check_interval=None, warmup_tokens=None)


PAPER = Preset(capacity=256, swap_size=16, check_interval=200, warmup_tokens=12_000)
_PAPER_MODELS = ("qwen3-4b-thinking-2507", "deepseek-r1-0528-qwen3-8b", "phi-4-reasoning-plus")


def preset_for(model: str, folder: Path | None) -> Preset:
    """The preset in a model's folder, or the paper's for the paper's models, or an empty one."""
    if folder is not None and (path := folder / PRESET_FILE).is_file():
        return _read_preset(path)
    is_paper_model = model.rstrip("/").rpartition("/")[2].lower() in _PAPER_MODELS
    return PAPER if is_paper_model else Preset()


def _read_preset(path: Path) -> Preset:
    known = {field.name for field in dataclasses.fields(Preset)}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Preset(**{key: value for key, value in raw.items() if key in known})
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a preset: {error}") from error


def system_prompt_of(config: SearchConfig, preset: Preset) -> str | None:
    """The user's, else the model's, else the one that asks for a boxed answer; None for none."""
    return _first(config.system_prompt, preset.system_prompt, DEFAULT_SYSTEM_PROMPT) or None


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """One run's settings, nothing left open."""

    policy: str
    capacity: int
    num_traces: int
    swap_size: int
    check_interval: int
    warmup_tokens: int
    hard_floor: float | None
    child_temperature: float
    branch_point: BranchPoint
    ghost_parents: bool
    max_new_tokens: int
    sampling: Sampling
    budget_tokens: int | None
    budget_seconds: float | None
    budget_traces: int | None
    consensus: Consensus | None = None
    policy_options: BaseModel | None = None  # checked by the policy's own model; None: its defaults

    def options_of(self, kind: type[Model]) -> Model:
        """The policy's own options."""
        options = kind() if self.policy_options is None else self.policy_options
        assert isinstance(options, kind), f"options of another policy: {options!r}"
        return options

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the log's header."""
        options = self.policy_options.model_dump(mode="json") if self.policy_options is not None else {}
        return dataclasses.asdict(dataclasses.replace(self, policy_options=None)) | {"policy_options": options}


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What the model and its earlier runs contribute."""

    preset: Preset = Preset()
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)  # its generation_config
    median_length: float | None = None  # of earlier runs
    mean_thought_length: float | None = None


def resolve(
    config: SearchConfig,
    defaults: ModelDefaults,
    room_tokens: int,
    *,
    has_floor: bool,
    policy_options: BaseModel | None = None,
) -> tuple[SearchSettings, list[str]]:
    """The settings of one run, and warnings; `room_tokens` is what the context leaves after the prompt."""
    preset = {
        PresetSource.MODEL: defaults.preset,
        PresetSource.AUTO: defaults.preset.lengths_only(),
        PresetSource.PAPER: PAPER,
    }[config.preset]
    capacity = _first(config.capacity, preset.capacity, DEFAULT_CAPACITY)
    wanted = _first(config.max_new_tokens, preset.max_new_tokens, DEFAULT_MAX_NEW_TOKENS)
    max_new_tokens = min(wanted, room_tokens)
    median = defaults.median_length or preset.median_length
    thought = defaults.mean_thought_length or preset.mean_thought_length or 0.0
    half_trace = int(median / 2) if median else min(12_000, max_new_tokens // 2)
    warmup = _first(config.warmup_tokens, preset.warmup_tokens, half_trace)
    settings = SearchSettings(
        policy=config.policy,
        capacity=capacity,
        num_traces=_first(config.num_traces, capacity),
        swap_size=_first(config.swap_size, _scaled_swap(preset, capacity), max(1, capacity // 16)),
        check_interval=_first(config.check_interval, preset.check_interval, max(1, round(max(thought, warmup / 60)))),
        warmup_tokens=warmup,
        hard_floor=config.hard_floor if has_floor and config.hard_floor > 0 else None,
        child_temperature=config.child_temperature,
        branch_point=config.branch_point,
        ghost_parents=config.ghost_parents,
        max_new_tokens=max_new_tokens,
        sampling=_sampling(config, preset, defaults.sampling),
        budget_tokens=config.budget_tokens,
        budget_seconds=config.budget_seconds,
        budget_traces=config.budget_traces,
        consensus=config.consensus,
        policy_options=policy_options,
    )
    return settings, _check(settings, config, room_tokens)


def _first(*values: T | None) -> T:
    """The first that is given; the last always is."""
    return next(value for value in values if value is not None)


def _scaled_swap(preset: Preset, capacity: int) -> int | None:
    """A preset's K belongs to its C: a smaller pool swaps proportionally fewer."""
    if preset.swap_size is None or preset.capacity is None:
        return preset.swap_size
    return max(1, round(preset.swap_size * capacity / preset.capacity))


def _sampling(config: SearchConfig, preset: Preset, model: Mapping[str, float]) -> Sampling:
    fallback = Sampling()
    return Sampling(
        temperature=_first(config.temperature, preset.temperature, model.get("temperature"), fallback.temperature),
        top_p=_first(config.top_p, preset.top_p, model.get("top_p"), fallback.top_p),
        top_k=int(_first(config.top_k, preset.top_k, model.get("top_k"), fallback.top_k)),
        min_p=_first(config.min_p, preset.min_p, model.get("min_p"), fallback.min_p),
        seed=config.seed,
    )


def _check_swap(swap_size: int, capacity: int) -> None:
    if swap_size > capacity:
        raise UserError(f"swap size {swap_size} is larger than the capacity {capacity}: "
                        "lower --swap-size or raise --capacity")  # fmt: skip


def _check(settings: SearchSettings, config: SearchConfig, room_tokens: int) -> list[str]:
    _check_swap(settings.swap_size, settings.capacity)
    warnings = []
    if config.max_new_tokens is not None and config.max_new_tokens > room_tokens:
        warnings.append(f"max_new_tokens {config.max_new_tokens} is cut to {room_tokens}, what the context leaves")
    if settings.policy == "gambit" and settings.warmup_tokens >= settings.max_new_tokens:
        warnings.append(f"the warm-up of {settings.warmup_tokens} tokens leaves a trace of at most "
                        f"{settings.max_new_tokens} tokens no room: nothing can ever branch")  # fmt: skip
    return warnings


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
