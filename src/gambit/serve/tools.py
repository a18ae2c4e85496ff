"""Tools in requests: their definitions, the choice among them, and calls and results of earlier turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

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


class NamedFunction(RequestModel):
    """The function of a tool that is to be called."""

    name: ToolName


class ToolFunction(NamedFunction):
    """A function that the model may call. It is voted on and never executed here, and not held to its schema."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool, of which there is one kind."""

    type: Literal["function"]
    function: ToolFunction


class NamedTool(RequestModel):
    """The choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(NamedFunction):
    """A call of an earlier turn, with its arguments as JSON."""

    arguments: str

    @model_validator(mode="after")
    def _has_arguments(self) -> CalledFunction:
        try:
            is_object = isinstance(read_json(self.arguments or "{}"), dict)
        except NO_JSON:
            is_object = False
        if not is_object:
            raise ValueError("has arguments that are no JSON object")
        return self


class ToolCall(RequestModel):
    """A tool call of an earlier turn of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_chat(self) -> dict[str, object]:
        """Returns the call with its arguments as an object, which chat templates write as JSON themselves."""
        arguments = read_json(self.function.arguments or "{}")
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


def _distinct(tools: list[Tool]) -> list[Tool]:
    if len({tool.function.name for tool in tools}) < len(tools):
        raise ValueError("has two functions of one name")
    return tools


class ToolFields(RequestModel):
    """The fields about tools, of chat completions and responses."""

    tools: Annotated[
        list[Annotated[Tool, BeforeValidator(_nested)]], Field(max_length=MOST_TOOLS), AfterValidator(_distinct)
    ] = []
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool, BeforeValidator(_nested)] = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _has_choice(self) -> ToolFields:
        names = {tool.function.name for tool in self.tools}
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if (chosen is not None and chosen not in names) or (self.tool_choice == "required" and not names):
            raise ValueError("tool_choice requires a tool that is not among tools")
        return self

    @property
    def toolbox(self) -> Toolbox | None:
        """Returns the tools that a model may call; None where it may call none."""
        choice = self.tool_choice
        if not self.tools or choice == "none":
            return None
        return Toolbox(
            tuple(tool.model_dump(exclude_none=True) for tool in self.tools),
            frozenset(tool.function.name for tool in self.tools),
            choice if isinstance(choice, str) else choice.function.name,
            self.parallel_tool_calls,
        )


def as_messages(items: list[object]) -> list[object]:
    """Returns the items of `/v1/responses` as messages: calls made together become one turn; thinking is left out."""
    messages: list[object] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(item, dict) or kind not in ("function_call", "function_call_output", "reasoning", "message"):
            messages.append(item)
            continue
        given = {name: each for name, each in item.items() if name not in ("id", "status")}
        if kind == "message":
            messages.append(given)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": given.get("call_id"), "content": given.get("output")})
        elif kind == "function_call":
            function = {"name": given.get("name"), "arguments": given.get("arguments")}
            call = {"id": given.get("call_id"), "type": "function", "function": function}
            last = messages[-1] if messages else None
            if isinstance(last, dict) and last.get("role") == "assistant" and "tool_calls" in last:
                last["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    return messages
