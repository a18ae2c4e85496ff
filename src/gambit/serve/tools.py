"""Tools in requests: their definitions, the choice among them, and calls and results of earlier turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gambit.answers.structured import NO_JSON, read_json
from gambit.types import Toolbox

MOST_TOOLS = 128


class RequestModel(BaseModel):
    """A JSON object of a request: types are not converted, and unknown fields are refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())


ToolName = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]


def _nested(value: object) -> object:
    """Returns what `/v1/responses` writes in one object as chat completions write it, with the function inside."""
    if not isinstance(value, dict) or "function" in value or "name" not in value:
        return value
    return {"type": value.get("type"), "function": {name: value[name] for name in value if name != "type"}}


class ToolFunction(RequestModel):
    """A function that the model may call. It is voted on and never executed here, and not held to its schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool, of which there is one kind."""

    type: Literal["function"]
    function: ToolFunction


def _arguments(value: object) -> object:
    """Returns the object that a text holds: chat templates write arguments as JSON themselves."""
    try:
        return read_json(value or "{}") if isinstance(value, str) else None
    except NO_JSON:
        raise ValueError("must be a JSON object, written as text") from None


class CalledFunction(RequestModel):
    """A call of an earlier turn."""

    name: ToolName
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class ToolCall(RequestModel):
    """A tool call of an earlier turn of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


CHOICES = ("none", "auto", "required")


def _choice(value: object) -> object:
    """Returns one of CHOICES, or the name of the function that is chosen."""
    if isinstance(value, str) and value not in CHOICES:
        raise ValueError(f"must be {', '.join(CHOICES)} or a function")
    nested = _nested(value)
    function = nested.get("function") if isinstance(nested, dict) and nested.get("type") == "function" else value
    return function.get("name") if isinstance(function, dict) else function


class ToolFields(RequestModel):
    """The fields about tools, of chat completions and responses."""

    tools: Annotated[list[Annotated[Tool, BeforeValidator(_nested)]], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Annotated[str, BeforeValidator(_choice)] = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _are_there(self) -> ToolFields:
        names = {tool.function.name for tool in self.tools}
        if len(names) < len(self.tools):
            raise ValueError("tools has two functions of one name")
        if self.tool_choice not in names | set(CHOICES) or (self.tool_choice == "required" and not names):
            raise ValueError("tool_choice requires a tool that is not among tools")
        return self

    @property
    def toolbox(self) -> Toolbox | None:
        """Returns the tools that a model may call; None where it may call none."""
        if not self.tools or self.tool_choice == "none":
            return None
        shown = tuple(tool.model_dump(exclude_none=True) for tool in self.tools)
        names = frozenset(tool.function.name for tool in self.tools)
        return Toolbox(shown, names, self.tool_choice, self.parallel_tool_calls)


def as_messages(items: list[object]) -> list[object]:
    """Returns the items of `/v1/responses` as messages: calls made together become one turn; thinking is left out."""
    messages: list[object] = []
    for item in items:
        if not isinstance(item, dict):
            messages.append(item)
            continue
        given = {name: each for name, each in item.items() if name not in ("id", "status")}
        kind = given.get("type")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": given.get("call_id"), "content": given.get("output")})
        elif kind == "function_call":
            function = {"name": given.get("name"), "arguments": given.get("arguments")}
            call = {"id": given.get("call_id"), "function": function}
            last = messages[-1] if messages else None
            if isinstance(last, dict) and last.get("tool_calls"):
                last["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind != "reasoning":
            messages.append(given)
    return messages
