"""Messages of requests, and tools: their definitions, the choice among them, calls and results of earlier turns."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gambit.answers.structured import NO_JSON, read_json
from gambit.types import ChatMessage, Toolbox

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
    def _are_there(self) -> Self:
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


# -- messages --------------------------------------------------------------------------------------------------------


class TextPart(RequestModel, extra="ignore"):
    """A piece of a message's text; other fields, such as annotations of an earlier answer, are ignored."""

    type: Literal["text", "input_text", "output_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"type": "text", "text": value} if isinstance(value, str) else value


def listed(value: object) -> list[object]:
    """Returns a list; a single string may stand for a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string or an array")
    return value


# First words of fields, by role: earlier thinking, what LiteLLM adds, and the name of the tool that was called.
IDLE_FIELDS = {"assistant": ("reasoning", "provider_specific_fields"), "tool": ("name",)}


class Message(RequestModel):
    """A message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(listed)]
    tool_calls: list[ToolCall] = Field([])
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, value: object) -> object:
        """Drops empty fields, and those that clients send along although chat templates leave them out as well."""
        if not isinstance(value, dict):
            return value
        is_assistant, idle = value.get("role") == "assistant", IDLE_FIELDS.get(str(value.get("role")), ())
        found = {
            name: item
            for name, item in value.items()
            if name in ("role", "content") or not (item in (None, [], "") or name.startswith(idle))
        }
        if is_assistant and "tool_calls" in found and found.get("content") is None:
            found["content"] = ""
        return found

    @model_validator(mode="after")
    def _suits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("has tool_calls, which an assistant alone makes")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("must have a tool_call_id if and only if its role is tool")
        return self

    def to_chat(self) -> ChatMessage:
        """Returns the message as prompts are made of it; a developer is a system by another name."""
        role = "system" if self.role == "developer" else self.role
        message = ChatMessage(role=role, content="".join(part.text for part in self.content))
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def ends_with_user(messages: list[Message]) -> list[Message]:
    roles = [message.role for message in messages]
    if "user" not in roles or roles[-1] not in ("user", "tool"):
        raise ValueError("must end with a user message, or after one with a tool's result")
    return messages


def from_prompt(value: object) -> list[object]:
    """Returns the only prompt as a user's message."""
    prompts = listed(value)
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise ValueError("must be one string: this server takes neither several prompts nor tokens")
    return from_input(prompts[0])


def from_input(value: object) -> list[object]:
    """Returns the input of `/v1/responses` as messages: a text is a user's, calls made together become one turn.

    Earlier thinking is left out.
    """
    messages: list[object] = []
    for item in [{"role": "user", "content": value}] if isinstance(value, str) else listed(value):
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
