"""Command-line options made from the fields of the config models, in panels; `--help-all` shows the advanced ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

from gambit.config.options import NESTED_OPTIONS, EngineConfig, SearchConfig
from gambit.config.presets import Preset
from gambit.events import Json

T = TypeVar("T")
FROM_PRESET = "default: from the model's preset"
# Options that switch off what is on by default, with words of their own.
OFF_SWITCHES = {
    "enable_thinking": ("--no-thinking", "answer without thinking first, where the chat template offers the choice")
}
# Given as key=value, as often as wanted.
PAIRS = {name: f"--{name.removesuffix('s').replace('_', '-')}" for name in NESTED_OPTIONS}


@dataclass(frozen=True, slots=True)
class Panel:
    """A box of `--help`, and the fields whose options stand in it."""

    title: str
    model: type[BaseModel]
    fields: tuple[str, ...]


PANELS = (
    Panel("Model", EngineConfig, ("model", "scorer", "engine", "device")),
    Panel("Search", SearchConfig, ("policy", "policy_options", "capacity", "num_traces", "max_new_tokens",
                                   "temperature", "seed", "answer", "vote")),
    Panel("Limits", SearchConfig,
          ("budget_tokens", "budget_seconds", "budget_traces", "consensus_stop", "first_traces")),
    Panel("Advanced: search", SearchConfig, (
        "preset", "islands", "swap_size", "check_interval", "warmup_tokens", "swap_margin", "hard_floor",
        "child_temperature", "branch_point", "ghost_parents", "consensus_min_traces", "confidence_window",
    )),
    Panel("Advanced: prompt and sampling", SearchConfig,
          ("system_prompt", "enable_thinking", "top_p", "top_k", "min_p", "own_noise")),
    Panel("Advanced: engine", EngineConfig,
          ("engine_options", "dtype", "kv_budget_tokens", "memory_ratio", "any_weights")),
    Panel("Advanced: verifier", EngineConfig, (
        "verifier_engine", "verifier_device", "verifier_memory", "verifier_gpu_share", "verifier_aggregation",
        "verifier_options", "verifier_lag", "verifier_async", "verifier_optional",
    )),
)  # fmt: skip


def with_config_options(
    command: Callable[..., None], without: Collection[str] = (), further: Sequence[Panel] = ()
) -> Callable[..., None]:
    """The command with one option per config field, but those it is `without`, in place of its `**flags`.

    `further` panels hold options from fields of other models.

    Every option is text and None where it was not given: pydantic checks the values, and a preset fills the gaps.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    named = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]

    def wrapped(**values: object) -> None:
        turned_off = {name: False for name in OFF_SWITCHES if values.get(name)}
        given = {name: texts for name in PAIRS if isinstance(texts := values.get(name), list)}
        pairs = {name: key_values(texts, PAIRS[name]) for name, texts in given.items()}
        command(**{**values, **turned_off, **pairs})

    wrapped.__doc__ = command.__doc__
    wrapped.__signature__ = inspect.Signature([*named, *_parameters([*further, *PANELS], without)])  # type: ignore[attr-defined]
    return wrapped


def _parameters(panels: Sequence[Panel], without: Collection[str]) -> Iterator[inspect.Parameter]:
    schemas = {model: model.model_json_schema()["properties"] for model in {panel.model for panel in panels}}
    for panel in panels:
        for name in panel.fields:
            if name in without:
                continue
            field = panel.model.model_fields[name]
            option = _option(name, field, _metavar(name, field, schemas[panel.model][name]), panel.title)
            kind = list[str] if name in PAIRS else bool if field.annotation is bool else str
            annotation = Annotated[kind | None, option]  # type: ignore[valid-type] # made, not written
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str, field: FieldInfo, metavar: str | None, panel: str) -> OptionInfo:
    flag = PAIRS.get(name, "--" + name.replace("_", "-"))
    text = field.description or ""
    if name in OFF_SWITCHES:
        flag, text = OFF_SWITCHES[name]
    elif (default := _default(name, field)) and "default:" not in text:
        text = f"{text} ({default})"
    text = f"{text[:1].upper() + text[1:] if text[1:2].islower() else text}."  # but C, K, Δ and r
    option: OptionInfo = typer.Option(flag, help=text, metavar=metavar, rich_help_panel=panel, show_default=False)
    return option


def _default(name: str, field: FieldInfo) -> str | None:
    """What holds where an option is not given."""
    if field.default is None and name in Preset.__slots__:
        return FROM_PRESET
    is_plain = isinstance(field.default, str | int | float) and not isinstance(field.default, bool)
    return f"default: {field.default}" if is_plain else None


def _metavar(name: str, field: FieldInfo, schema: Mapping[str, Json]) -> str | None:
    """The kind of value; choices are named in the description."""
    if field.annotation is bool:
        return None
    if name in PAIRS:
        return "KEY=VALUE"
    branches = schema.get("anyOf", [schema])
    assert isinstance(branches, list)
    kinds = {branch.get("type") for branch in branches if isinstance(branch, dict)}
    return "INT" if "integer" in kinds else "NUMBER" if "number" in kinds and "string" not in kinds else "TEXT"


def given(options: Mapping[str, T | None]) -> dict[str, T]:
    """Those that the user named; the others are left to whoever has the defaults."""
    return {name: value for name, value in options.items() if value is not None}


def key_values(texts: list[str], flag: str) -> dict[str, object]:
    """`key=value` pairs; values are read as in a YAML recipe, so that 2 is a number and true a truth."""
    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise typer.BadParameter(f"{key!r} is not of the form key=value", param_hint=flag)
    return {key: yaml_value(value, flag) for key, _, value in pairs}


def yaml_value(text: str, flag: str) -> object:
    """As in a YAML recipe: 2 is a number and true a truth."""
    import yaml

    try:
        value: object = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise typer.BadParameter(f"{text!r} is neither a number, a truth nor plain text", param_hint=flag) from error
    return value
