"""What clients send, read and checked: every field is used, or refused by name where it differs from its default."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gambit.config.options import SearchConfig, build
from gambit.errors import UserError
from gambit.search.choice import check_search
from gambit.serve.body import Fields
from gambit.serve.errors import bad_request
from gambit.serve.model_ids import ModelIds
from gambit.serve.settings import KeyLimits
from gambit.types import ChatMessage, Problem

T = TypeVar("T")
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_NUM_TRACES = 100_000
MOST_USER_LENGTH = 512
TEXT_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
PLAIN_TEXT = {"type": "text"}

# What Gambit cannot do, with the values that ask for nothing. Null asks for nothing everywhere.
UNSUPPORTED_EVERYWHERE: Mapping[str, tuple[object, ...]] = {
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "priority": (0,),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (False, 0),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
}
UNSUPPORTED_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    **UNSUPPORTED_EVERYWHERE,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": (PLAIN_TEXT,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "audio": ({},),
    "modalities": (["text"],),
    "prediction": ({},),
    "store": (False,),
    "metadata": ({},),
    "verbosity": ("medium",),
    "reasoning_effort": (),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
}
UNSUPPORTED_IN_COMPLETIONS: Mapping[str, tuple[object, ...]] = {
    **UNSUPPORTED_EVERYWHERE,
    "response_format": (PLAIN_TEXT,),
    "logprobs": (),
    "echo": (False,),
    "suffix": ("",),
}
UNSUPPORTED_IN_RESPONSES: Mapping[str, tuple[object, ...]] = {
    **UNSUPPORTED_EVERYWHERE,
    "conversation": (),
    "context_management": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "text": ({"format": PLAIN_TEXT}, {}, {"format": PLAIN_TEXT, "verbosity": "medium"}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "moderation": (),
    "stream_options": ({},),
}
# Fields of a search that have a name in OpenAI's format already.
NAMED_OTHERWISE = {"seed": "seed", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
                   "max_new_tokens": "max_tokens"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SearchAsk:
    """One request, checked: what to search, how, and how the answer is wanted."""

    model: str
    question: str | tuple[ChatMessage, ...]
    config: SearchConfig
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    is_streamed: bool = False
    has_usage_chunk: bool = False
    user: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def last_message(self) -> str:
        return Problem(self.question).last_message


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What only `/v1/responses` has."""

    is_background: bool
    is_stored: bool
    instructions: str | None
    metadata: Mapping[str, str]
    max_output_tokens: int | None


@dataclass(frozen=True, slots=True)
class AskReader:
    """Reads requests for one server: its ids, how it searches by default, and what it allows at most."""

    ids: ModelIds
    base: SearchConfig
    max_traces: int
    capacity_of: Callable[[SearchConfig], int]

    def chat(self, fields: Fields, limits: KeyLimits) -> SearchAsk:
        reader = FieldReader(fields, UNSUPPORTED_IN_CHAT)
        question = read_messages(reader.take("messages", list))
        options = reader.take("chat_template_kwargs", dict) or {}
        return self._ask(reader, question, limits, {"max_tokens", "max_completion_tokens"}, _thinking(options))

    def completion(self, fields: Fields, limits: KeyLimits) -> SearchAsk:
        reader = FieldReader(fields, UNSUPPORTED_IN_COMPLETIONS)
        return self._ask(reader, _only_prompt(reader.take("prompt", str, list)), limits, {"max_tokens"}, {})

    def response(self, fields: Fields, limits: KeyLimits) -> tuple[SearchAsk, ResponseOptions]:
        reader = FieldReader(fields, UNSUPPORTED_IN_RESPONSES)
        instructions = reader.take("instructions", str)
        question = read_input(reader.take("input", str, list), instructions)
        is_background = reader.take("background", bool) or False
        stored = reader.take("store", bool)
        metadata = _metadata(reader.take("metadata", dict) or {})
        most = _whole(fields.get("max_output_tokens"), "max_output_tokens", 1, None)
        ask = self._ask(reader, question, limits, {"max_output_tokens"}, {})
        if is_background and stored is False:
            raise bad_request("background needs store: a response that is not kept cannot be asked for", "store")
        return ask, ResponseOptions(is_background, stored is not False, instructions, metadata, most)

    def _ask(
        self,
        reader: FieldReader,
        question: str | tuple[ChatMessage, ...],
        limits: KeyLimits,
        length_names: Iterable[str],
        options: Mapping[str, object],
    ) -> SearchAsk:
        model = reader.take("model", str)
        if not model:
            raise bad_request("the request names no model: `GET /v1/models` lists them", "model")
        warnings: list[str] = []
        is_streamed = reader.take("stream", bool) or False
        has_usage = _usage_wanted(reader.take("stream_options", dict), is_streamed)
        config = self._config(reader, model, limits, length_names, options, warnings)
        num_choices = _whole(reader.take("n", int), "n", 1, MOST_CHOICES) or 1
        if num_choices > 1 and self.capacity_of(config) == 1:
            raise bad_request(f"n = {num_choices}: the policy {config.policy!r} has one trace and so one answer", "n")
        stops = _stops(reader.take("stop", str, list))
        user = reader.take("user", str) or reader.take("safety_identifier", str)
        if user is not None and len(user) > MOST_USER_LENGTH:
            raise bad_request(f"user has {len(user)} characters: at most {MOST_USER_LENGTH} are taken", "user")
        reader.refuse_rest()
        if isinstance(question, tuple) and len(question) == 1:  # logs and pages show it as it was typed
            question = question[0]["content"]
        return SearchAsk(model, question, config, num_choices, stops, is_streamed, has_usage, user, tuple(warnings))

    def _config(
        self,
        reader: FieldReader,
        model: str,
        limits: KeyLimits,
        length_names: Iterable[str],
        options: Mapping[str, object],
        warnings: list[str],
    ) -> SearchConfig:
        own = _search_options(reader.take("gambit", dict) or {})
        policy = self._policy(model, own)
        asked = {**options, **own, **_sampling(reader, policy, warnings)}
        if (length := _same_length(reader, length_names)) is not None:
            asked["max_new_tokens"] = length
        asked.setdefault("seed", self.base.seed if "seed" in self.base.model_fields_set else secrets.randbits(31))
        base = self.base.model_dump(exclude_unset=True)
        if policy != self.base.policy:
            base.pop("policy_options", None)
        try:
            config = build(SearchConfig, {**base, **asked, **_ceilings(asked, self.base, limits), "policy": policy})
            check_search(config)
        except UserError as error:
            raise bad_request(str(error), _named_field(str(error), own)) from error
        self._check_size(config)
        return config

    def _policy(self, model: str, own: Mapping[str, object]) -> str:
        by_id, by_option = self.ids.policy_of(model), own.get("policy")
        if by_id is not None and by_option not in (None, by_id):
            raise bad_request(f"the model {model!r} names the policy {by_id!r}, gambit.policy {by_option!r}: "
                              "leave one out", "gambit.policy")  # fmt: skip
        return str(by_id or by_option or self.base.policy)

    def _check_size(self, config: SearchConfig) -> None:
        capacity = self.capacity_of(config)
        if capacity > self.max_traces:
            raise bad_request(f"capacity {capacity}: this server runs at most {self.max_traces} traces at a time "
                              "(--max-traces)", "gambit.capacity")  # fmt: skip
        if (config.num_traces or 0) > MOST_NUM_TRACES:
            raise bad_request(f"num_traces {config.num_traces}: at most {MOST_NUM_TRACES}", "gambit.num_traces")


class FieldReader:
    """Takes fields out of a request; what nobody took is refused at the end."""

    def __init__(self, fields: Fields, unsupported: Mapping[str, tuple[object, ...]]) -> None:
        self._left = {name: value for name, value in fields.items() if value is not None}
        self._known = {*unsupported}
        for name, harmless in unsupported.items():
            value = self._left.pop(name, None)
            if value is not None and not _asks_for_nothing(value, harmless):
                raise bad_request(
                    f"{name} is not supported by this server: leave it out", name, "unsupported_parameter"
                )

    def take(self, name: str, *kinds: type[T]) -> T | None:
        """Its value, of one of these types; None where it is not given."""
        self._known.add(name)
        value = self._left.pop(name, None)
        if value is None:
            return None
        is_kind = isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
        if not is_kind:
            wanted = " or ".join(_JSON_NAMES.get(kind, kind.__name__) for kind in kinds)
            raise bad_request(f"{name} must be {wanted}, not {_shown(value)}", name)
        return value  # type: ignore[return-value] # checked above

    def refuse_rest(self) -> None:
        for name in self._left:
            near = difflib.get_close_matches(name, self._known, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise bad_request(f"unknown parameter {name[:80]!r}{hint}", name[:80], "unknown_parameter")


def _asks_for_nothing(value: object, harmless: Iterable[object]) -> bool:
    """True is not 1 here."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)


_JSON_NAMES: Mapping[type, str] = {
    str: "a string", list: "an array", dict: "an object", bool: "true or false", int: "a whole number",
    float: "a number",
}  # fmt: skip


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}…"


# -- what is asked ---------------------------------------------------------------------------------------------------


def read_messages(messages: Sequence[object] | None) -> tuple[ChatMessage, ...]:
    """A conversation that ends with the user's question; a developer is a system by another name."""
    if not messages:
        raise bad_request("messages is empty: it must end with a user message", "messages")
    found = tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))
    if found[-1]["role"] != "user":
        raise bad_request(f"messages must end with a user message, not one of {found[-1]['role']!r}", "messages")
    return found


def _message(message: object, where: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise bad_request(f"{where} must be an object, not {_shown(message)}", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in TEXT_ROLES:
        roles = ", ".join(TEXT_ROLES)
        raise bad_request(f"{where}.role is {_shown(role)}: this server takes {roles}", f"{where}.role")
    for name, value in message.items():
        # What an assistant thought earlier is not shown to it again, as in the chat templates of reasoning models.
        is_known = name in ("role", "content", "type") or (role == "assistant" and name.startswith("reasoning"))
        if not is_known and value not in (None, [], ""):
            raise bad_request(f"{where}.{name} is not supported by this server: leave it out", f"{where}.{name}")
    return ChatMessage(role=TEXT_ROLES[role], content=_text(message.get("content"), f"{where}.content"))


def _text(content: object, where: str) -> str:
    """Text, or parts of text put together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or an array of text parts, not {_shown(content)}", where)
    return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "input_text", "output_text"):
        raise bad_request(f"{where}.type is {_shown(kind)}: this server takes text alone", f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text must be a string, not {_shown(text)}", f"{where}.text")
    return text


def read_input(given: str | Sequence[object] | None, instructions: str | None) -> tuple[ChatMessage, ...]:
    """The input of `/v1/responses`: a question, or messages; instructions come first."""
    if given is None:
        raise bad_request("input is missing: give the question as a string or as messages", "input")
    before = [ChatMessage(role="system", content=instructions)] if instructions else []
    if isinstance(given, str):
        return (*before, ChatMessage(role="user", content=given))
    for number, item in enumerate(given):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind != "message":
            raise bad_request(f"input[{number}].type is {_shown(kind)}: this server takes messages", f"input[{number}]")
    messages = [{key: value for key, value in item.items() if key not in ("id", "status")}
                for item in given if isinstance(item, dict)]  # fmt: skip
    return (*before, *read_messages(messages))


def _only_prompt(prompt: str | Sequence[object] | None) -> str:
    if prompt is None:
        raise bad_request("prompt is missing", "prompt")
    if isinstance(prompt, str):
        return prompt
    if len(prompt) != 1 or not isinstance(prompt[0], str):
        raise bad_request("prompt must be one string: this server takes neither several prompts nor tokens", "prompt")
    return prompt[0]


# -- how it is searched and answered ---------------------------------------------------------------------------------


def _thinking(options: Mapping[str, object]) -> dict[str, object]:
    """vLLM's way to switch thinking off."""
    for name, value in options.items():
        if name != "enable_thinking" or not isinstance(value, bool):
            raise bad_request(f"chat_template_kwargs.{name} = {_shown(value)}: only enable_thinking, true or false, "
                              "is supported", f"chat_template_kwargs.{name}")  # fmt: skip
    return dict(options)


def _search_options(own: dict[str, object]) -> dict[str, object]:
    for name in own:
        if name in NAMED_OTHERWISE:
            raise bad_request(f"gambit.{name}: give it as {NAMED_OTHERWISE[name]} of the request", f"gambit.{name}")
    try:
        build(SearchConfig, own)
    except UserError as error:
        raise bad_request(f"gambit: {error}", _named_field(str(error), own)) from error
    return {name: value for name, value in own.items() if value is not None}


def _named_field(sentence: str, own: Mapping[str, object]) -> str:
    """Which field an error of the config is about."""
    name = sentence.partition(" = ")[0]
    if name in own:
        return f"gambit.{name}"
    return NAMED_OTHERWISE.get(name, "gambit")


def _sampling(reader: FieldReader, policy: str, warnings: list[str]) -> dict[str, object]:
    given = {
        "temperature": reader.take("temperature", float, int),
        "top_p": reader.take("top_p", float, int),
        "top_k": reader.take("top_k", int),
        "min_p": reader.take("min_p", float, int),
        "seed": reader.take("seed", int),
    }
    if given["temperature"] == 0 and policy != "single":
        given["temperature"] = None
        warnings.append("temperature 0 would make all traces of a search equal: the model's own is used; "
                        "ask the model id that ends in :single for greedy decoding")  # fmt: skip
    if given["top_k"] == -1:  # vLLM's word for off
        given["top_k"] = 0
    return {name: value for name, value in given.items() if value is not None}


def _same_length(reader: FieldReader, names: Iterable[str]) -> int | None:
    found = {name: _whole(reader.take(name, int), name, 1, None) for name in sorted(names)}
    given = {name: value for name, value in found.items() if value is not None}
    if len(set(given.values())) > 1:
        raise bad_request(f"{' and '.join(given)} differ: give one of them", next(iter(given)))
    return next(iter(given.values()), None)


def _ceilings(asked: Mapping[str, object], base: SearchConfig, limits: KeyLimits) -> dict[str, float]:
    """Budgets: the least of what is asked for and what server and key allow."""
    found = {}
    for name in ("budget_tokens", "budget_seconds", "budget_traces"):
        values = [asked.get(name), getattr(base, name), getattr(limits, name, None)]
        given = [value for value in values if isinstance(value, int | float)]
        if given:
            found[name] = min(given)
    return found


def _whole(value: object, name: str, least: int, most: int | None) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise bad_request(f"{name} = {_shown(value)}: must be a whole number of at least {least}{upper}", name)
    return value


def _usage_wanted(options: Mapping[str, object] | None, is_streamed: bool) -> bool:
    if options is None:
        return False
    if not is_streamed:
        raise bad_request("stream_options is for streams: set stream to true", "stream_options")
    for name, value in options.items():
        is_known = isinstance(value, bool) and (name == "include_usage" or not value)
        if not is_known:
            raise bad_request(f"stream_options.{name} = {_shown(value)} is not supported", f"stream_options.{name}")
    return options.get("include_usage") is True


def _stops(stop: str | Sequence[object] | None) -> tuple[str, ...]:
    given = [stop] if isinstance(stop, str) else stop or []
    if len(given) > MOST_STOPS:
        raise bad_request(f"stop has {len(given)} entries: at most {MOST_STOPS} are taken", "stop")
    for each in given:
        if not isinstance(each, str) or not each:
            raise bad_request(f"stop must be one or several non-empty strings, not {_shown(each)}", "stop")
    return tuple(str(each) for each in given)


def _metadata(metadata: Mapping[str, object]) -> dict[str, str]:
    for name, value in metadata.items():
        if len(metadata) > 16 or not isinstance(value, str) or len(name) > 64 or len(value) > 512:
            raise bad_request("metadata must be at most 16 short strings by name", "metadata")
    return {name: str(value) for name, value in metadata.items()}
