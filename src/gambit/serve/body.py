"""Reads the body of a request within limits of size, time and depth."""

from __future__ import annotations

import asyncio
import json
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
    """A JSON object; whatever else comes is refused in a sentence."""
    try:
        value = json.loads(body, parse_constant=_no_number)
    except RecursionError:
        raise bad_request("the body is nested too deeply to be a request") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
