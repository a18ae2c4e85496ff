"""API keys with their limits, and sessions of the page, each of which stands for a key."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gambit.config.options import MOST_SECONDS, MOST_TOKENS_IN_ALL, CheckedModel, build
from gambit.config.yaml_file import read_mapping
from gambit.errors import UserError

Count = Annotated[int, Field(ge=1)]
SESSION_SECONDS = 12 * 3600
MOST_SESSIONS = 1000


class KeyLimits(CheckedModel):
    """Limits for the holder of one key; None sets none beyond the server's own."""

    max_running: Count | None = None  # searches at a time
    max_waiting: Count | None = None  # searches in the queue
    budget_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS_IN_ALL)] | None = None  # of one search
    budget_seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)] | None = None  # of one search


class KeyEntry(KeyLimits):
    """A key as a file of keys has it."""

    key: Annotated[str, Field(min_length=1, max_length=512)]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients may send: its name for logs, and the hash of the key in place of the key."""

    name: str
    digest: bytes
    limits: KeyLimits = field(default_factory=KeyLimits)


NOBODY = ApiKey("nobody", b"")  # stands for clients where no key is needed


def made_key(name: str, key: str, limits: KeyLimits | None = None) -> ApiKey:
    return ApiKey(name, _digest(key), limits or KeyLimits())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_of(presented: str, keys: Iterable[ApiKey]) -> ApiKey | None:
    """Returns the key that was presented. Each is compared, in constant time, so that the time taken reveals none."""
    digest, found = _digest(presented), None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


def read_keys(path: Path) -> list[ApiKey]:
    """Reads a YAML file of `name: key` or `name: {key: …, max_running: …}`."""
    raw = read_mapping(path, "the keys in")
    if not raw:
        raise UserError(f"{path} must map names to keys, as in `alice: sk-…` or `alice: {{key: sk-…, max_running: 2}}`")
    return [_read_key(path, name, entry) for name, entry in raw.items()]


def _read_key(path: Path, name: str, entry: object) -> ApiKey:
    values = entry if isinstance(entry, dict) else {"key": entry}
    try:
        checked = build(KeyEntry, values)
    except UserError as error:  # its sentence must not show the key
        field_name = "key" if "key" in str(error).split(" = ")[0] else str(error)
        raise UserError(f"{path}: the entry {name!r} is wrong ({field_name}): see docs/serve.md") from None
    return made_key(name, checked.key, KeyLimits(**checked.model_dump(exclude={"key"})))


def check_keys(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """Raises where a name or a key stands twice: their clients could not be told apart."""
    found = tuple(keys)
    for what, values in (("name", [key.name for key in found]), ("key", [key.digest for key in found])):
        if len(set(values)) < len(values):
            raise UserError(f"two API keys have the same {what}: give each client one of its own")
    return found


# -- sessions of the page --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageSession:
    """A session: the key it was begun with, and its token against forged requests."""

    key: ApiKey
    csrf_token: str
    expires: float


class Sessions:
    """Sessions by the value of their cookie, in memory alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: OrderedDict[str, PageSession] = OrderedDict()

    def begin(self, key: ApiKey) -> str:
        """Begins a session; returns the value of its cookie."""
        while len(self._open) >= MOST_SESSIONS:
            self._open.popitem(last=False)
        name = secrets.token_urlsafe(32)
        self._open[name] = PageSession(key, secrets.token_urlsafe(32), self._clock() + SESSION_SECONDS)
        return name

    def find(self, cookie: str) -> PageSession | None:
        found = self._open.get(cookie)
        return found if found is not None and found.expires > self._clock() else None

    def end(self, cookie: str) -> None:
        self._open.pop(cookie, None)


def are_equal(first: str, second: str) -> bool:
    """Compares two tokens in constant time; an empty one equals nothing."""
    return bool(first) and hmac.compare_digest(first.encode(), second.encode())
