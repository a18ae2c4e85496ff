"""What a server is started with: address, keys, limits; and the rules that these must obey."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gambit.config.options import MOST_SECONDS, MOST_TOKENS_IN_ALL, CheckedModel, build
from gambit.config.yaml_file import read_mapping
from gambit.errors import UserError

MIB = 1 << 20
Count = Annotated[int, Field(ge=1)]


class KeyLimits(CheckedModel):
    """What the holder of one key may use; None: as much as the server gives everybody."""

    max_running: Count | None = Field(None, description="searches at a time")
    max_waiting: Count | None = Field(None, description="searches that wait for their turn")
    budget_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS_IN_ALL)] | None = Field(
        None, description="most tokens of one search"
    )
    budget_seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)] | None = Field(
        None, description="most seconds of one search"
    )


class KeyEntry(KeyLimits):
    """One key as a file of keys has it."""

    key: Annotated[str, Field(min_length=1, max_length=512)]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that may be presented: its name for logs, and only the hash of the key itself."""

    name: str
    digest: bytes
    limits: KeyLimits = field(default_factory=KeyLimits)


NOBODY = ApiKey("nobody", b"")  # who asks where no key is needed


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything but the model and how it searches."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ("pawn",)
    keys: tuple[ApiKey, ...] = ()
    max_running: int = 32  # searches at a time
    max_traces: int | None = None  # of all running searches together; None: what the engine says, else 1,024
    max_waiting: int = 128  # searches in the queue
    request_timeout: float | None = None  # seconds from arrival; then the best vote so far is the answer
    shutdown_timeout: float = 30.0  # seconds that running searches get to end
    keep_alive_seconds: float = 15.0  # a stream is silent for no longer
    max_body_bytes: int = 2 * MIB
    body_timeout: float = 30.0  # seconds for a whole request to arrive
    header_timeout: float = 10.0  # seconds from a connection's beginning to a request's headers and key
    idle_timeout: float = 30.0  # seconds from an answer to the next request
    max_connections: int = 2048
    response_seconds: float = 3600.0  # how long a finished response can be asked for
    max_responses: int = 1000
    keep_searches: int = 100  # recent ones that the page shows
    keep_log_bytes: int = 64 * MIB  # of their logs, compressed, in memory
    out_dir: Path | None = None  # event logs on disk
    log_prompts: bool = False
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    @property
    def needs_key(self) -> bool:
        return bool(self.keys)


def made_key(name: str, key: str, limits: KeyLimits | None = None) -> ApiKey:
    return ApiKey(name, _digest(key), limits or KeyLimits())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_of(presented: str, keys: Iterable[ApiKey]) -> ApiKey | None:
    """Whose key this is. All are compared, in constant time: how long it takes says nothing about any of them."""
    digest, found = _digest(presented), None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


def read_keys(path: Path) -> list[ApiKey]:
    """A YAML file: name: key, or name: {key: …, max_running: …}."""
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
    """Each name and each key once: two names of one key could not be told apart."""
    found = tuple(keys)
    for what, values in (("name", [key.name for key in found]), ("key", [key.digest for key in found])):
        if len(set(values)) < len(values):
            raise UserError(f"two API keys have the same {what}: give each client one of its own")
    return found


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, *, has_keys: bool, no_auth: bool) -> None:
    """Without a key only this machine is served, unless somebody says that this is wanted."""
    if not has_keys and not no_auth and not is_loopback(host):
        raise UserError(f"--host {host} lets other machines in without a key: give --api-key (or GAMBIT_API_KEY), or "
                        "--no-auth if the network itself is protected")  # fmt: skip
