"""Requests as clients send them, checked: every field is used, or refused by name unless it changes nothing."""

import difflib
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from gambit.answers import AnswerKind
from gambit.answers.schema import schema_text
from gambit.config import registry
from gambit.config.effort import MOST_TRACES_OF, SIZES, Effort, least, replaced_by, unfilled
from gambit.config.options import SearchConfig, build
from gambit.errors import UserError
from gambit.search.choice import GROUP, check_search
from gambit.serve.http import ApiError, Fields, bad_request
from gambit.serve.messages import Message, RequestModel, ToolFields, ends_with_user, from_input, from_prompt, listed
from gambit.serve.settings import ApiKey
from gambit.types import ChatMessage, Problem, Toolbox

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_NUM_TRACES = 100_000
MOST_USER_LENGTH = 512
PLAIN_TEXT = {"type": "text"}

# Fields that Gambit cannot honour, by the values that change nothing. Null changes nothing everywhere.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    name: harmless
    for names, harmless in (
        ("guided_json guided_regex guided_choice guided_grammar prompt_cache_key prompt_cache_retention", ()),
        ("moderation prompt web_search_options conversation context_management", ()),
        ("max_tool_calls previous_response_id", ()),
        ("use_beam_search ignore_eos include_stop_str_in_output echo store continue_final_message logprobs", (False,)),
        ("parallel_tool_calls skip_special_tokens spaces_between_special_tokens", (True,)),
        ("add_generation_prompt include_reasoning", (True,)),
        ("presence_penalty frequency_penalty priority min_tokens top_logprobs", (0,)),
        ("repetition_penalty length_penalty best_of", (1,)), ("prompt_logprobs", (False, 0)),
        ("logit_bias structured_outputs audio prediction metadata", ({},)),
        ("stop_token_ids tools functions include", ([],)), ("tool_choice function_call", ("none", "auto")),
        ("service_tier", ("auto", "default")), ("response_format", (PLAIN_TEXT,)), ("modalities", (["text"],)),
        ("verbosity", ("medium",)), ("suffix", ("",)), ("truncation", ("disabled",)), ("reasoning", ({},)),
        ("text", ({"format": PLAIN_TEXT}, {}, {"format": PLAIN_TEXT, "verbosity": "medium"})),
    )
    for name in names.split()
}  # fmt: skip
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # of one trace, by format
# Fields of a search that have a name in OpenAI's format already.
NAMED_OTHERWISE = {"seed": "seed", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
                   "max_new_tokens": "max_tokens", "json_schema": "response_format"}  # fmt: skip

# What clients call an effort, with the names of models that have more steps.
EFFORTS = {"none": Effort.LOW, "minimal": Effort.LOW, "low": Effort.LOW, "medium": Effort.MEDIUM, "high": Effort.HIGH,
           "xhigh": Effort.HIGH, "max": Effort.HIGH}  # fmt: skip
FLAGS = {name for name, field in SearchConfig.model_fields.items() if field.annotation is bool}


# -- the formats -----------------------------------------------------------------------------------------------------


class StreamOptions(RequestModel):
    """Options of a stream, of which only the usage in its last chunk can be switched on."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


def _nested(value: object) -> object:
    """Returns a form of `/v1/responses`, which holds its schema flat, as chat completions write it."""
    if not isinstance(value, dict) or not {"name", "schema"} & value.keys():
        return value
    return {"type": value.get("type"), "json_schema": {name: value[name] for name in value if name != "type"}}


class NamedSchema(RequestModel):
    """A schema to which all answers are held, be it strict or not."""

    name: Annotated[str, Field(pattern=r"^[\w-]{1,64}$")]
    description: str | None = None
    strict: bool | None = None
    content: dict[str, Any] = Field(alias="schema")

    @field_validator("content")
    @classmethod
    def _can_be_kept(cls, value: dict[str, Any]) -> dict[str, Any]:
        schema_text(value)
        return value


class TextFormat(RequestModel):
    """The form of an answer: any text, a JSON object, or one that fits a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("has a schema if it is of type json_schema, and only then")
        return self

    def flat(self) -> dict[str, object]:
        """Returns it as `/v1/responses` writes it."""
        schema = self.json_schema
        return {"type": self.type, **(schema.model_dump(by_alias=True, exclude_none=True) if schema else {})}


AnyFormat = Annotated[TextFormat, BeforeValidator(_nested)]


class TextOptions(RequestModel):
    """The way in which `/v1/responses` names the form of an answer."""

    format: AnyFormat = TextFormat()
    verbosity: Literal["medium"] = "medium"


class TemplateOptions(RequestModel):
    """vLLM's way to switch thinking off."""

    enable_thinking: bool = True


EffortName = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(RequestModel):
    """The way in which `/v1/responses` names an effort; all of the thinking is returned, never a summary."""

    effort: EffortName | None = None
    summary: None = None


NonEmpty = Annotated[str, Field(min_length=1)]
Length = Annotated[int, Field(ge=1)]
User = Annotated[str, Field(max_length=MOST_USER_LENGTH)]


class SearchFields(RequestModel):
    """Fields of all three formats."""

    model: NonEmpty
    gambit: dict[str, Any] = Field({})
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Annotated[list[NonEmpty], BeforeValidator(listed)] = Field([], max_length=MOST_STOPS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: User | None = None
    safety_identifier: User | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    reasoning_effort: EffortName | None = None
    thinking_token_budget: Length | None = None

    @property
    def effort(self) -> EffortName | None:
        return self.reasoning_effort


class ChatFields(SearchFields, ToolFields):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], AfterValidator(ends_with_user)]
    response_format: AnyFormat = TextFormat()
    chat_template_kwargs: TemplateOptions | None = None
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None


class CompletionFields(SearchFields):
    """The body of `/v1/completions`."""

    messages: Annotated[list[Message], BeforeValidator(from_prompt)] = Field(alias="prompt")
    max_tokens: Length | None = None


class ResponseFields(SearchFields, ToolFields):
    """The body of `/v1/responses`."""

    messages: Annotated[list[Message], BeforeValidator(from_input), AfterValidator(ends_with_user)] = Field(
        alias="input"
    )
    instructions: str | None = None
    max_output_tokens: Length | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    background: bool = False
    store: bool = True
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        {}, max_length=16
    )

    @property
    def response_format(self) -> TextFormat:
        return self.text.format

    @property
    def effort(self) -> EffortName | None:
        return self.reasoning.effort or self.reasoning_effort


AnyRequest = ChatFields | CompletionFields | ResponseFields


def read_fields(kind: type[AnyRequest], fields: Fields) -> AnyRequest:
    """Returns the request; raises an error of status 400 that names the first field that is wrong."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name in [name for name in given if name in UNSUPPORTED and name not in _names_of(kind)]:
        if not _is_harmless(given.pop(name), UNSUPPORTED[name]):
            raise bad_request(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False)[0]) from error


def _names_of(kind: type[AnyRequest]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


def _is_harmless(value: object, harmless: tuple[object, ...]) -> bool:
    """Returns whether the value is one of the harmless ones; true is not 1 here."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)


def _refusal(kind: type[AnyRequest], found: ErrorDetails) -> ApiError:
    where = _place(found["loc"])
    if found["type"] == "missing":
        hint = ": `GET /v1/models` lists them" if where == "model" else ""
        return bad_request(f"{where} is missing{hint}", where)
    if found["type"] == "extra_forbidden":
        if len(found["loc"]) > 1:
            return bad_request(f"{where} is not supported by this server: leave it out", where)
        near = difflib.get_close_matches(where, [*_names_of(kind), *UNSUPPORTED], n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        return bad_request(f"unknown parameter {where!r}{hint}", where, "unknown_parameter")
    if found["type"] == "value_error":
        return bad_request(f"{where} {found['ctx']['error']}", where)
    rule = _IN_JSON.get(found["type"]) or re.sub("^[A-Z][a-z]+ should", "must", found["msg"])
    return bad_request(f"{where} = {_shown(found['input'])}: {rule.partition(' after ')[0]}", where)


_IN_JSON = {"model_type": "must be an object", "dict_type": "must be an object", "list_type": "must be an array"}


def _place(location: tuple[int | str, ...]) -> str:
    """Returns the place of a field as a client writes it: `messages[0].content`."""
    steps = [f"[{each}]" if isinstance(each, int) else f".{each[:80]}" for each in location if each != "[key]"]
    return "".join(steps).removeprefix(".").replace("text.format.json_schema", "text.format")


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:50]}…"


# -- the search of a request -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that was checked, with its question and how it is searched."""

    fields: AnyRequest
    question: str | tuple[ChatMessage, ...]
    config: SearchConfig
    warnings: tuple[str, ...] = ()

    @property
    def user(self) -> str | None:
        return self.fields.user or self.fields.safety_identifier

    @property
    def tools(self) -> Toolbox | None:
        return self.fields.toolbox if isinstance(self.fields, ToolFields) else None

    @property
    def schema_place(self) -> str:
        """Returns where a client writes the schema of its answers."""
        return "text.format.schema" if isinstance(self.fields, ResponseFields) else "response_format.json_schema.schema"

    @property
    def last_message(self) -> str:
        return Problem(self.question).last_message


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads requests by the server's model ids, its own options of the search, and its limits.

    The ids are `M` for the server's own policy, `M:sc` for self-consistency, `M:single` for one plain sample, …; the
    name of an adapter may stand in place of `M`.
    """

    names: tuple[str, ...]
    base: SearchConfig
    max_traces: int
    capacity_of: Callable[[SearchConfig], int]
    policies: Sequence[str] = field(default_factory=lambda: registry.names(GROUP))
    created: int = field(default_factory=lambda: int(time.time()))
    adapters: tuple[str, ...] = ()

    @property
    def ids(self) -> list[str]:
        names = (*self.names, *self.adapters)
        return [*names, *(f"{name}:{policy}" for name in names for policy in self.policies)]

    def card(self, model: str) -> dict[str, object]:
        """Returns the description of a model id; raises an error of status 404 for an unknown one."""
        policy = self._policy_of(model)
        return {"id": model, "object": "model", "created": self.created, "owned_by": "gambit", "policy": policy}

    def _policy_of(self, model: str) -> str | None:
        """Returns the policy that an id names, None for the server's own; raises an error of status 404."""
        names = (*self.names, *self.adapters)
        if model in names:
            return None
        name, _, policy = model.rpartition(":")
        if name in names and policy in self.policies:
            return policy
        sentence = f"the model {model[:200]!r} does not exist: this server has {', '.join(self.ids)}"
        raise ApiError(404, sentence, param="model", code="model_not_found")

    def read(self, kind: type[AnyRequest], fields: Fields, key: ApiKey) -> CheckedRequest:
        """Returns the checked request; raises an error of status 400, or 404 for an unknown model."""
        request = read_fields(kind, fields)
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options is for streams: set stream to true", "stream_options")
        if isinstance(request, ResponseFields) and request.background and not request.store:
            raise bad_request("background needs store: a response that is not kept cannot be read later", "store")
        config, warnings = self._config(request, key)
        if request.n > 1 and self.capacity_of(config) == 1:
            raise bad_request(
                f"n = {request.n}: the policy {config.policy_name!r} has one trace and so one answer", "n"
            )
        messages = tuple(message.to_chat() for message in request.messages)
        if isinstance(request, ResponseFields) and request.instructions:
            messages = (ChatMessage(role="system", content=request.instructions), *messages)
        question = messages[0]["content"] if len(messages) == 1 else messages  # logs and pages show it as it was typed
        return CheckedRequest(request, question, config, warnings)

    def _config(self, request: AnyRequest, key: ApiKey) -> tuple[SearchConfig, tuple[str, ...]]:
        own = {name: value for name, value in request.gambit.items() if value is not None}
        for name in own:
            if name in NAMED_OTHERWISE:
                raise bad_request(f"gambit.{name}: give it as {NAMED_OTHERWISE[name]} of the request", f"gambit.{name}")
            if isinstance(own[name], bool) and name in SearchConfig.model_fields.keys() - FLAGS:
                raise bad_request(f"gambit.{name} = {json.dumps(own[name])}: is no flag", f"gambit.{name}")
        effort, warnings = self._effort(request, own, key)
        base = self._base(effort)
        policy = self._policy(request.model, own) or str(
            base.get("policy", "single" if effort is Effort.LOW else "gambit")
        )
        sampling, found = _sampling(request, policy)
        given = {**own, **sampling, **_limits(request), "effort": effort, "policy": policy}
        given["lora"] = self._adapter(request.model, own.get("lora"))
        if isinstance(request, ChatFields) and request.chat_template_kwargs is not None:
            given["enable_thinking"] = request.chat_template_kwargs.enable_thinking
        elif request.effort == "none":
            given["enable_thinking"] = False
        if not isinstance(request, CompletionFields) and request.response_format.type != "text":
            schema = request.response_format.json_schema
            given |= {"answer": AnswerKind.JSON, "json_schema": None if schema is None else schema.content}
            if schema is not None and request.toolbox is not None:
                raise bad_request("tools: answers beside them cannot be held to a schema: leave one out", "tools")
        given.setdefault("seed", self.base.seed if "seed" in self.base.model_fields_set else secrets.randbits(31))
        if policy != self.base.policy_name:
            base.pop("policy_options", None)
        try:
            config = build(SearchConfig, {**base, **{name: each for name, each in given.items() if each is not None}})
            check_search(config)
        except UserError as error:
            name = str(error).partition(" = ")[0]
            param = f"gambit.{name}" if name in own else NAMED_OTHERWISE.get(name, "gambit")
            raise bad_request(f"gambit: {error}" if param.startswith("gambit") else str(error), param) from error
        config = config.model_copy(update=_ceilings(config, self.base, key))
        self._check_size(config, key)
        return config, (*warnings, *found)

    def _adapter(self, model: str, by_option: object) -> str | None:
        """Returns the adapter that an id or an option names; None where the request leaves that to the server."""
        name = model.removesuffix(f":{self._policy_of(model)}")
        by_id = name if name in self.adapters else None
        found = by_id if by_option is None else by_option
        if found is not None and (found not in self.adapters or by_id not in (None, found)):
            known = ", ".join(self.adapters) or "none"
            raise bad_request(
                f"gambit.lora = {_shown(by_option)}: this server's adapters are {known}, and an id may name one",
                "gambit.lora",
            )
        return None if found is None else str(found)

    def _effort(
        self, request: AnyRequest, own: Mapping[str, object], key: ApiKey
    ) -> tuple[Effort | None, tuple[str, ...]]:
        """Returns the effort of a search, and a warning where the key allows less than was requested.

        None: the server's own options, or sizes that the request gives.
        """
        named = own.get("effort") if request.effort is None else request.effort
        if named is not None and str(named) not in EFFORTS:
            raise bad_request(f"gambit.effort = {_shown(named)}: must be one of {', '.join(EFFORTS)}", "gambit.effort")
        is_sized = bool(SIZES & own.keys()) or self._policy_of(request.model) is not None
        wanted = EFFORTS[str(named)] if named is not None else None if is_sized else self.base.effort
        effort = least(wanted, key.max_effort)
        if named is None or effort is wanted:
            return effort, ()
        return effort, (f"the effort {named!r} is above the highest of this key: {effort} is used",)

    def _base(self, effort: Effort | None) -> dict[str, object]:
        """Returns the server's options that hold beside an effort, with its pool where that is the smaller one."""
        values = unfilled(self.base.model_dump(exclude_unset=True))
        found = {name: value for name, value in values.items() if name not in replaced_by(effort)}
        if effort is Effort.MEDIUM and "capacity" in values:
            found["capacity"] = min(self.capacity_of(self.base), MOST_TRACES_OF[effort])
        return found

    def _policy(self, model: str, own: Mapping[str, object]) -> str | None:
        """Returns the policy that a request names; None where it leaves that to the server."""
        by_id, by_option = self._policy_of(model), own.get("policy")
        if by_id is not None and by_option not in (None, by_id):
            raise bad_request(f"the model {model!r} names the policy {by_id!r}, gambit.policy {by_option!r}: "
                              "leave one out", "gambit.policy")  # fmt: skip
        if registry.is_import(str(by_option)):  # a client must not choose code
            raise bad_request(f"gambit.policy {by_option!r}: name an installed policy", "gambit.policy")
        return by_id or (None if by_option is None else str(by_option))

    def _check_size(self, config: SearchConfig, key: ApiKey) -> None:
        capacity = self.capacity_of(config)
        most = MOST_TRACES_OF.get(key.max_effort) if key.max_effort else None
        if most is not None and max(capacity, config.num_traces or 0) > most:
            raise bad_request(f"capacity {capacity}: the highest effort of this key is {key.max_effort}, at most "
                              f"{most} traces", "gambit.capacity")  # fmt: skip
        if capacity > self.max_traces:
            raise bad_request(f"capacity {capacity}: this server runs at most {self.max_traces} traces at a time "
                              "(--max-traces)", "gambit.capacity")  # fmt: skip
        if (config.num_traces or 0) > MOST_NUM_TRACES:
            raise bad_request(f"num_traces {config.num_traces}: at most {MOST_NUM_TRACES}", "gambit.num_traces")


def _sampling(request: AnyRequest, policy: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """Returns the options of sampling, and warnings about them."""
    given = request.model_dump(include={"temperature", "top_p", "top_k", "min_p", "seed"}, exclude_none=True)
    if given.get("top_k") == -1:  # vLLM's word for off
        given["top_k"] = 0
    if given.get("temperature") != 0 or policy == "single":
        return given, ()
    del given["temperature"]
    return given, ("temperature 0 would make all traces of a search equal: the model's own is used; "
                   "use the model id that ends in :single for greedy decoding",)  # fmt: skip


def _limits(request: AnyRequest) -> dict[str, object]:
    """Returns the most tokens of a trace, and of its thinking, as options."""
    given = {name: length for name in LENGTHS if (length := getattr(request, name, None)) is not None}
    if len(set(given.values())) > 1:
        raise bad_request(f"{' and '.join(given)} differ: give one of them", next(iter(given)))
    found = {"max_new_tokens": next(iter(given.values()), None), "thinking_tokens": request.thinking_token_budget}
    return {name: most for name, most in found.items() if most is not None}


def _ceilings(config: SearchConfig, base: SearchConfig, key: ApiKey) -> dict[str, float]:
    """Returns budgets: the least of the request's, the server's and the key's."""
    found = {}
    for name in ("budget_tokens", "budget_seconds", "budget_traces"):
        given = [budget for each in (config, base, key) if (budget := getattr(each, name, None)) is not None]
        if given:
            found[name] = min(given)
    return found
