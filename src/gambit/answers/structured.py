"""Answers that are JSON: objects, and calls of tools.

Two are equal if they hold the same, however they are written: such an answer is spelled in one way only.
"""

import json
from collections.abc import Callable
from typing import TypeAlias

from gambit.types import Toolbox

Call: TypeAlias = dict[str, object]  # "name" and "arguments"
THINK_END = "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"  # Hermes' tags, which Qwen and others took over
FENCES = ("```json", "```")
NO_JSON = (ValueError, RecursionError)  # raised for text that is no JSON, or none that can be written again


def canonical_json(value: object) -> str:
    """Returns the one spelling of a JSON value; raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def read_json(text: str) -> object:
    """Returns a JSON value, with 1.0 read as 1; raises one of NO_JSON."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


def extract_json(text: str) -> str | None:
    """Returns the object after the thinking, which may stand in a code block, in its one spelling; None without one."""
    final = text.rpartition(THINK_END)[2].strip()
    for fence in FENCES:
        if final.startswith(fence):
            final = final.removeprefix(fence).removesuffix(FENCES[-1])
    try:
        value = read_json(final)
        return canonical_json(value) if isinstance(value, dict) else None
    except NO_JSON:
        return None


def with_calls(extract: Callable[[str], str | None], tools: Toolbox) -> Callable[[str], str | None]:
    """Returns an extractor of calls. Where none is required, a text without any has its usual answer."""

    def calls_or_answer(text: str) -> str | None:
        calls = calls_in(text, tools)
        if calls:
            return canonical_json(calls)
        return extract(text) if tools.choice == "auto" and CALL not in text.rpartition(THINK_END)[2] else None

    return calls_or_answer


def calls_in(text: str, tools: Toolbox) -> list[Call]:
    """Returns the calls of tools after the thinking, each once; none where one is broken or of no tool that there is.

    They are sorted, since calls that are made together have no order.
    """
    calls = [_call_in(passage) for passage in text.rpartition(THINK_END)[2].split(CALL)[1:]]
    wanted = tools.names if tools.choice in ("auto", "required") else {tools.choice}
    if any(call is None or call["name"] not in wanted for call in calls):
        return []
    distinct = {canonical_json(call): call for call in calls if call is not None}
    if not tools.are_parallel:
        return list(distinct.values())[:1]
    return [distinct[spelling] for spelling in sorted(distinct)]


def _call_in(passage: str) -> Call | None:
    """Returns the call after a tag; None for one that is broken."""
    try:
        call = read_json(passage.partition(CALL_END)[0].strip())
        canonical_json(call)
    except NO_JSON:
        return None
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
    return {"name": name, "arguments": arguments} if isinstance(name, str) and isinstance(arguments, dict) else None


def answered_calls(answer: str | None) -> list[Call]:
    """Returns the calls that an answer of a vote stands for; none where it is another answer."""
    if answer is None or not answer.startswith('[{"arguments": '):
        return []
    calls: list[Call] = json.loads(answer)
    return calls
