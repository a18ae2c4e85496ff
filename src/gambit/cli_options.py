"""Command-line options made from the fields of the config models, where their descriptions live; parses nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

from gambit.config import EngineConfig, SearchConfig
from gambit.events import Json

PANELS: Mapping[str, type[BaseModel]] = {"Search": SearchConfig, "Model and engine": EngineConfig}
OFF_SWITCHES = {"enable_thinking": "--no-thinking"}  # for what is on by default


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option per config field in place of its `**flags`.

    Every option is text and None where it was not given: pydantic checks the values, and a preset fills the gaps.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    named = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]

    def wrapped(**values: object) -> None:
        turned_off = {name: False for name in OFF_SWITCHES if values.get(name)}
        command(**{**values, **turned_off})

    wrapped.__doc__ = command.__doc__
    wrapped.__signature__ = inspect.Signature([*named, *_parameters()])  # type: ignore[attr-defined]
    return wrapped


def _parameters() -> Iterator[inspect.Parameter]:
    for panel, model in PANELS.items():
        schema = model.model_json_schema()["properties"]
        for name, field in model.model_fields.items():
            is_switch = field.annotation is bool
            option = _option(name, field, None if is_switch else _metavar(schema[name]), panel)
            kind = Annotated[bool | None, option] if is_switch else Annotated[str | None, option]
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _option(name: str, field: FieldInfo, metavar: str | None, panel: str) -> OptionInfo:
    flag = OFF_SWITCHES.get(name, "--" + name.replace("_", "-"))
    text = f"do not {field.description}" if name in OFF_SWITCHES else field.description or ""
    if field.default is not None and not isinstance(field.default, bool) and len(str(field.default)) < 20:
        text = f"{text} (default: {field.default})".lstrip()
    option: OptionInfo = typer.Option(flag, help=text, metavar=metavar, rich_help_panel=panel, show_default=False)
    return option


def _metavar(schema: Mapping[str, Json]) -> str:
    """The kind of value; choices are named in the description."""
    branches = schema.get("anyOf", [schema])
    assert isinstance(branches, list)
    kinds = {branch.get("type") for branch in branches if isinstance(branch, dict)}
    return "INT" if "integer" in kinds else "NUMBER" if "number" in kinds else "TEXT"
