"""Command-line options made from the fields of the config models, where their descriptions live; parses nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

from gambit.config.options import NESTED_OPTIONS, EngineConfig, SearchConfig
from gambit.core.events import Json

PANELS: Mapping[str, type[BaseModel]] = {"Search": SearchConfig, "Model and engine": EngineConfig}
OFF_SWITCHES = {"enable_thinking": "--no-thinking"}  # for what is on by default
# Given as key=value, as often as wanted.
PAIRS = {name: f"--{name.removesuffix('s').replace('_', '-')}" for name in NESTED_OPTIONS}


def with_config_options(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """The command with one option per config field, but those it is `without`, in place of its `**flags`.

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
    wrapped.__signature__ = inspect.Signature([*named, *_parameters(without)])  # type: ignore[attr-defined]
    return wrapped


def _parameters(without: Collection[str]) -> Iterator[inspect.Parameter]:
    for panel, model in PANELS.items():
        schema = model.model_json_schema()["properties"]
        for name, field in model.model_fields.items():
            if name in without:
                continue
            option = _option(name, field, _metavar(name, field, schema[name]), panel)
            kind = list[str] if name in PAIRS else bool if field.annotation is bool else str
            annotation = Annotated[kind | None, option]  # type: ignore[valid-type] # made, not written
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str, field: FieldInfo, metavar: str | None, panel: str) -> OptionInfo:
    flag = {**OFF_SWITCHES, **PAIRS}.get(name, "--" + name.replace("_", "-"))
    text = f"do not {field.description}" if name in OFF_SWITCHES else field.description or ""
    if isinstance(field.default, str | int | float) and field.default is not False and len(str(field.default)) < 20:
        text = f"{text} (default: {field.default})".lstrip()
    option: OptionInfo = typer.Option(flag, help=text, metavar=metavar, rich_help_panel=panel, show_default=False)
    return option


def _metavar(name: str, field: FieldInfo, schema: Mapping[str, Json]) -> str | None:
    """The kind of value; choices are named in the description."""
    if field.annotation is bool:
        return None
    if name in PAIRS:
        return "KEY=VALUE"
    branches = schema.get("anyOf", [schema])
    assert isinstance(branches, list)
    kinds = {branch.get("type") for branch in branches if isinstance(branch, dict)}
    return "INT" if "integer" in kinds else "NUMBER" if "number" in kinds else "TEXT"


def key_values(texts: list[str], flag: str) -> dict[str, object]:
    """`key=value` pairs; values are read as in a YAML recipe, so that 2 is a number and true a truth."""
    import yaml

    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise typer.BadParameter(f"{key!r} is not of the form key=value", param_hint=flag)
    return {key: yaml.safe_load(value) for key, _, value in pairs}
