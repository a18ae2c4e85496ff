"""Command-line options made from the fields of pydantic models, in panels; `--help-all` shows the advanced ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

from gambit.cli.commands import ADVANCED, HelpAll
from gambit.cluster.plan import ClusterConfig
from gambit.config.options import NESTED_OPTIONS, EngineConfig, SearchConfig, build, overlaid, read_config_file
from gambit.config.presets import Preset
from gambit.errors import UserError
from gambit.events import Json

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
FROM_PRESET = "default: from the model's preset"
# Options that switch off what is on by default, with words of their own.
OFF_SWITCHES = {
    "enable_thinking": ("--no-thinking", "answer without thinking first, where the chat template offers the choice")
}
# Given as key=value, as often as wanted.
PAIRS = {name: f"--{name.removesuffix('s').replace('_', '-')}" for name in NESTED_OPTIONS}


@dataclass(frozen=True, slots=True)
class Panel:
    """A box of `--help` and the fields whose options it holds."""

    title: str
    model: type[BaseModel]
    fields: tuple[str, ...]


SEARCH_PANELS = (
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


SPREAD_PANEL = Panel("Many engines", ClusterConfig, tuple(ClusterConfig.model_fields))
RAY_PANEL = Panel("Many engines", ClusterConfig, tuple(name for name in ClusterConfig.model_fields if name != "spread"))


def with_options(*panels: Panel, without: Collection[str] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command one option per field of the panels, but those it is `without`, in place of its `**flags`.

    Every option is text and None where it was not given: pydantic checks the values, and a preset fills the gaps.
    """

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        named = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        is_brief = any(panel.title.startswith(ADVANCED) for panel in panels)

        def wrapped(**values: object) -> int:
            values.pop(HELP_ALL.name, None)
            turned_off = {name: False for name in OFF_SWITCHES if values.get(name)}
            given = {name: texts for name in PAIRS if isinstance(texts := values.get(name), list)}
            pairs = {name: key_values(texts, PAIRS[name]) for name, texts in given.items()}
            return command(**{**values, **turned_off, **pairs})

        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        made = [parameter for panel in panels for parameter in _parameters(panel, without)]
        wrapped.__signature__ = inspect.Signature([*named, *[HELP_ALL] * is_brief, *made])  # type: ignore[attr-defined]
        wrapped.is_brief = is_brief  # type: ignore[attr-defined]
        return wrapped

    return decorated


HELP_ALL = inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll)


def _parameters(panel: Panel, without: Collection[str]) -> Iterator[inspect.Parameter]:
    schema = panel.model.model_json_schema()["properties"]
    for name in panel.fields:
        if name in without:
            continue
        field = panel.model.model_fields[name]
        option = _option(name, field, _metavar(name, field, schema[name]), panel.title)
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
    """Returns what holds where an option is not given."""
    if field.default is None and name in Preset.__slots__:
        return FROM_PRESET
    is_plain = isinstance(field.default, str | int | float) and not isinstance(field.default, bool)
    return f"default: {field.default}" if is_plain else None


def _metavar(name: str, field: FieldInfo, schema: Mapping[str, Json]) -> str | None:
    """Returns the kind of value; choices are named in the description."""
    if field.annotation is bool:
        return None
    if isinstance(own := schema.get("metavar"), str):
        return own
    if name in PAIRS:
        return "KEY=VALUE"
    branches = schema.get("anyOf", [schema])
    assert isinstance(branches, list)
    kinds = {branch.get("type") for branch in branches if isinstance(branch, dict)}
    return "INT" if "integer" in kinds else "NUMBER" if "number" in kinds and "string" not in kinds else "TEXT"


def picked(model: type[Model], flags: Mapping[str, object]) -> Model:
    """Builds a model from those flags that are its fields."""
    return build(model, {name: value for name, value in given(flags).items() if name in model.model_fields})


def read_configs(file: Path | None, flags: Mapping[str, object]) -> tuple[SearchConfig, EngineConfig]:
    """Reads the options of a search and its engine; flags override the YAML file."""
    from gambit.search.choice import check_search

    values = overlaid(read_config_file(file) if file else {}, given(flags))
    search, engine = picked(SearchConfig, values), picked(EngineConfig, values)
    check_search(search)  # an unknown policy or option is refused before the model is loaded
    return search, engine


def given(options: Mapping[str, T | None]) -> dict[str, T]:
    """Returns the options that the user named; the models have defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}


def key_values(texts: list[str], flag: str) -> dict[str, object]:
    """Reads `key=value` pairs, with values as in a YAML recipe."""
    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise UserError(f"{flag} {key!r} is not of the form key=value")
    return {key: yaml_value(value, flag) for key, _, value in pairs}


def yaml_value(text: str, flag: str) -> object:
    """Reads a value as in a YAML recipe: 2 is a number and true a truth value."""
    import yaml

    try:
        value: object = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{flag}: cannot parse {text!r}: expected a number, true, false or text") from error
    return value
