"""Command-line options made from the fields of pydantic models, in panels; `--help-all` shows the advanced ones."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, EnumType
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from gambit.cli.commands import HelpAll
from gambit.cluster.plan import ClusterPlan
from gambit.config import registry
from gambit.config.options import NESTED_OPTIONS, EngineConfig, SearchConfig, build, overlaid, read_config_file
from gambit.config.presets import Preset
from gambit.errors import UserError
from gambit.events import Json
from gambit.storage.problems import runs_named

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
FROM_PRESET = "default: from the model's preset"
MANY = 10_000_000
FILE: JsonDict = {"metavar": "FILE"}
FOLDER: JsonDict = {"metavar": "FOLDER"}
# Options that switch off what is on by default, with words of their own.
OFF_SWITCHES = {
    "enable_thinking": ("--no-thinking", "answer without thinking first, where the chat template offers the choice")
}
# Given as key=value, any number of times.
PAIRS = {name: f"--{name.removesuffix('s').replace('_', '-')}" for name in NESTED_OPTIONS}
# Options whose flags do not follow from their names.
FLAGS = {
    **{name: (flag,) for name, flag in PAIRS.items()},
    "as_json": ("--json",),
    "columns": ("--map",),
    "model": ("--model", "-m"),
    "num_traces": ("--num-traces", "-n"),
    "out": ("--out", "-o"),
    "policies": ("--policies", "--policy"),
    "quiet": ("--quiet", "-q"),
    "seed": ("--seed", "-s"),
    "skip_corrupted": ("--skip-corrupted/--no-skip-corrupted",),
    "verbose": ("--verbose", "-v"),
}
# Options that take a name of the registry, which shells complete.
GROUPS = {
    "benchmark": "gambit.benchmarks",
    "engine": "gambit.engines",
    "model": "gambit.models",
    "policies": "gambit.policies",
    "policy": "gambit.policies",
    "problems": "gambit.benchmarks",
    "scorer": "gambit.scorers",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """A box of `--help` and the fields whose options it holds."""

    title: str
    model: type[BaseModel]
    fields: tuple[str, ...]


SEARCH_PANELS = (
    Panel("Model", EngineConfig, ("model", "scorer", "engine", "device")),
    Panel("Search", SearchConfig, ("effort", "policy", "policy_options", "capacity", "num_traces", "max_new_tokens",
                                   "temperature", "seed", "answer", "vote")),
    Panel("Limits", SearchConfig,
          ("budget_tokens", "budget_seconds", "budget_traces", "consensus_stop", "first_traces", "thinking_tokens",
           "force_answers")),
    Panel("Advanced: search", SearchConfig, (
        "compat", "preset", "islands", "swap_size", "check_interval", "warmup_tokens", "swap_margin", "hard_floor",
        "child_temperature", "branch_point", "ghost_parents", "boundary", "own_limit",
        "consensus_min_traces", "confidence_window", "lora",
    )),
    Panel("Advanced: prompt and sampling", SearchConfig,
          ("json_schema", "system_prompt", "enable_thinking", "top_p", "top_k", "min_p", "own_noise")),
    Panel("Advanced: engine", EngineConfig,
          ("engine_options", "adapters", "dtype", "kv_budget_tokens", "memory_ratio", "any_weights", "offline")),
    Panel("Advanced: verifier", EngineConfig, (
        "verifier_engine", "verifier_device", "verifier_memory", "verifier_gpu_share", "verifier_aggregation",
        "verifier_options", "verifier_lag", "verifier_async", "verifier_optional",
    )),
)  # fmt: skip


SPREAD_PANEL = Panel("Many engines", ClusterPlan, tuple(ClusterPlan.model_fields))
RAY_PANEL = Panel("Many engines", ClusterPlan, tuple(name for name in ClusterPlan.model_fields if name != "spread"))


def with_options(
    *panels: Panel, without: Collection[str] = (), usual: Collection[str] = ()
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command options for the fields of its models and, in place of its `**flags`, for those of the panels.

    A parameter whose type is a model receives that model, checked. Options of panels are text, and None where they were
    not given: pydantic checks them later, and a preset fills the gaps. `--help` shows the `usual` ones, or all.
    """

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        models = {each.name: each.annotation for each in own if isinstance(each.annotation, type(BaseModel))}
        named = [each for each in own if each.kind is not each.VAR_KEYWORD and each.name not in models]

        def wrapped(**values: object) -> int:
            values.pop(HELP_ALL.name, None)
            turned_off = {name: False for name in OFF_SWITCHES if values.get(name)}
            texts = {name: found for name in PAIRS if isinstance(found := values.get(name), list)}
            values |= {**turned_off, **{name: key_values(found, PAIRS[name]) for name, found in texts.items()}}
            for name, model in models.items():
                values[name] = build(model, given({field: values.pop(field) for field in model.model_fields}))
            return command(**values)

        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        of_models = [parameter for model in models.values() for parameter in _model_parameters(model)]
        of_panels = [parameter for panel in panels for parameter in _panel_parameters(panel, without)]
        made = [*of_models, *[HELP_ALL] * bool(usual), *of_panels]
        wrapped.__signature__ = inspect.Signature([*named, *made])  # type: ignore[attr-defined]
        if usual:
            wrapped.rare = {each.name for each in made} - {*usual, HELP_ALL.name}  # type: ignore[attr-defined]
        return wrapped

    return decorated


HELP_ALL = inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll)


def _model_parameters(model: type[BaseModel]) -> Iterator[inspect.Parameter]:
    """Yields the options of a command's own model, which typer checks; the model's title is that of their panel."""
    for name, field in model.model_fields.items():
        is_pairs = name in PAIRS
        bounds = {mine: getattr(each, its) for each in field.metadata
                  for mine, its in (("min", "ge"), ("max", "le")) if hasattr(each, its)}  # fmt: skip
        kind = list[str] | None if is_pairs else field.annotation
        default = inspect.Parameter.empty if field.is_required() else None if is_pairs else field.default
        yield _parameter(model, name, model.model_config.get("title"), kind, default, **bounds)


def _panel_parameters(panel: Panel, without: Collection[str]) -> Iterator[inspect.Parameter]:
    for name in panel.fields:
        if name not in without:
            kind = list[str] if name in PAIRS else bool if panel.model.model_fields[name].annotation is bool else str
            yield _parameter(panel.model, name, panel.title, kind | None, None)


def _parameter(
    model: type[BaseModel], name: str, panel: str | None, kind: object, default: object, **bounds: Any
) -> inspect.Parameter:
    field = model.model_fields[name]
    is_switch = bool in (field.annotation, *get_args(field.annotation))
    flag = "--" + name.replace("_", "-")
    is_paired = is_switch and field.default is not False
    flags = FLAGS.get(name, (f"{flag}/--no-{flag[2:]}" if is_paired else flag,))
    text = field.description or ""
    if name in OFF_SWITCHES:
        flags, text = OFF_SWITCHES[name][:1], OFF_SWITCHES[name][1]
    elif (standard := _default(name, field)) and "default:" not in text:
        text = f"{text} ({standard})"
    text = f"{text[:1].upper() + text[1:] if re.match('[a-z ]', text[1:2]) else text}."  # but C, K, Δ, r and i/n
    metavar = None if is_switch else _metavar(name, _properties(model)[name])
    complete = None if is_switch else _completer(name, field.annotation)
    option = typer.Option(
        *flags, help=text, metavar=metavar, rich_help_panel=panel, show_default=False, autocompletion=complete, **bounds
    )
    annotation = Annotated[kind, option]  # type: ignore[valid-type] # made, not written
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _completer(name: str, kind: object) -> Callable[[str], list[str]] | None:
    """Returns the function that completes an option's names or choices; None where the shell looks for files."""
    kinds = (kind, *get_args(kind))
    choices = [str(value) for each in kinds if isinstance(each, EnumType) for value in cast("type[Enum]", each)]
    choices += [value for each in kinds if get_origin(each) is Literal for value in get_args(each)]
    if name not in GROUPS and not choices:
        return None

    def complete(incomplete: str) -> list[str]:
        known = registry.names(GROUPS[name]) if name in GROUPS else choices
        return [each for each in known if each.startswith(incomplete)]

    return complete


@cache
def _properties(model: type[BaseModel]) -> Mapping[str, Mapping[str, Json]]:
    properties: Mapping[str, Mapping[str, Json]] = model.model_json_schema()["properties"]
    return properties


def _default(name: str, field: FieldInfo) -> str | None:
    """Returns what holds where an option is not given."""
    if field.default is None and name in Preset.__slots__:
        return FROM_PRESET
    is_plain = isinstance(field.default, str | int | float) and not isinstance(field.default, bool)
    return f"default: {field.default}" if is_plain else None


def _metavar(name: str, schema: Mapping[str, Json]) -> str:
    """Returns the kind of value; choices are named in the description."""
    if isinstance(own := schema.get("metavar"), str):
        return own
    if name in PAIRS or name == "columns":
        return "KEY=VALUE"
    branches = schema.get("anyOf", [schema])
    assert isinstance(branches, list)
    kinds = {branch.get("type") for branch in branches if isinstance(branch, dict)}
    return "INT" if "integer" in kinds else "NUMBER" if "number" in kinds and "string" not in kinds else "TEXT"


def run_argument(metavar: str, about: str) -> Any:
    """Returns an argument that shells complete with the folders in `runs/`."""
    return typer.Argument(metavar=metavar, help=about, show_default=False, autocompletion=runs_named)


def picked(model: type[Model], flags: Mapping[str, object]) -> Model:
    """Builds a model from those flags that are its fields."""
    return build(model, {name: value for name, value in given(flags).items() if name in model.model_fields})


def read_configs(file: Path | None, flags: Mapping[str, object]) -> tuple[SearchConfig, EngineConfig]:
    """Reads the options of a search and its engine; flags override the YAML file."""
    from gambit.search.choice import check_search

    values = overlaid(read_config_file(file) if file else {}, given(flags))
    search, engine = picked(SearchConfig, values), picked(EngineConfig, values)
    check_search(search)  # an unknown policy or option is refused before the model is loaded
    return search, with_adapter(engine, search.lora)


def with_adapter(engine: EngineConfig, lora: str | None) -> EngineConfig:
    """Has the engine serve the adapter of a search, where that is named by its folder."""
    if lora is None or lora in engine.adapters:
        return engine
    return engine.model_copy(update={"adapters": {**engine.adapters, lora: lora}})


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
