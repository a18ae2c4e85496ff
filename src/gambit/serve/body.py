"""Reads the body of a request within limits of size, time and depth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import NoReturn

from starlette.requests import ClientDisconnect, Request

from gambit.serve.errors import bad_request, closing

Fields = dict[str, object]


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """The whole body; one that is too large or too slow ends the connection."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > max_bytes:
        raise closing(413, f"the body has {declared[:20]} bytes: at most {max_bytes} are taken (--max-body-bytes)")
    chunks, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise closing(413, f"the body has more than {max_bytes} bytes (--max-body-bytes)")
                chunks.append(chunk)
    except TimeoutError:
        raise closing(408, f"the body did not arrive within {seconds:g} seconds") from None
    except ClientDisconnect:
        raise closing(400, "the connection ended before the body did") from None
    return b"".join(chunks)


def parse_object(body: bytes) -> Fields:
    """Reads a JSON object; raises an error of status 400 for anything else, and for text that cannot be encoded."""
    try:
        value = json.loads(body, parse_constant=_no_number)
        _check_text(value)
    except RecursionError:
        raise bad_request("the body is nested too deeply to be a request") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _check_text(value: object) -> None:
    r"""Refuses half of a surrogate pair (`"\ud800"`), which no tokenizer, log or answer could hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        field = next(_places_of_surrogates(value, "")) or None
        raise bad_request(f"{field or 'the body'} holds half of a surrogate pair, which is not text", field) from None


def _places_of_surrogates(value: object, where: str) -> Iterator[str]:
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        yield where
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _places_of_surrogates(item, f"{where}[{number}]")
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _places_of_surrogates(name, where)
            yield from _places_of_surrogates(item, f"{where}.{name}" if where else name)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
