"""Settings of a server: its address, its limits, and the API keys that it takes."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from gambit.config.effort import Effort
from gambit.config.options import MOST_SECONDS, MOST_TOKENS_IN_ALL, CheckedModel, build
from gambit.config.yaml_file import read_mapping
from gambit.errors import UserError
from gambit.models.files import BUNDLED

EXAMPLE_PUZZLE = "a = 23; b = 45; c = a * b; d = c - a; e = d * b; e?"  # for the bundled model
MIB = 1 << 20
MOST_KEY_LENGTH = 512
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0.1)]


def _digest(key: object) -> bytes:
    if not isinstance(key, str) or not 1 <= len(key) <= MOST_KEY_LENGTH:
        raise ValueError(f"must be text of 1 to {MOST_KEY_LENGTH} characters")
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class ApiKey(CheckedModel):
    """A key that clients may send: its name for logs, its hash in place of the key, and limits for its holder."""

    name: str
    digest: Annotated[bytes, BeforeValidator(_digest)] = Field(alias="key")
    max_running: Count | None = None  # searches at a time; None sets no limit beyond the server's own
    max_waiting: Count | None = None  # searches in the queue
    budget_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS_IN_ALL)] | None = None  # of one search
    budget_seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)] | None = None  # of one search
    max_effort: Effort | None = None  # the highest; its limit on traces holds for explicit sizes too


def example_question(model: str) -> str:
    """Returns a question to begin with."""
    return EXAMPLE_PUZZLE if model == BUNDLED else "What is 17 * 23?"


NOBODY = ApiKey.model_construct(name="nobody", digest=b"")  # stands for clients where no key is needed


class ServeSettings(CheckedModel):
    """Everything but the model and the search. Fields with a description are options of `gambit serve`."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ("pawn",)
    adapters: tuple[str, ...] = ()  # further model ids
    keys: tuple[ApiKey, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    out_dir: Path | None = None  # for event logs
    log_prompts: bool = False

    max_running: Count = Field(32, description="searches at a time")
    max_traces: Count | None = Field(
        None, description="traces of all searches at a time; default: what the engine runs, else 1,024"
    )
    max_waiting: Annotated[int, Field(ge=0)] = Field(128, description="searches in the queue; more get a 429")
    request_timeout: Seconds | None = Field(
        None, description="seconds from arrival; then the best vote so far is the answer"
    )
    shutdown_timeout: Annotated[float, Field(ge=0)] = Field(
        30.0, description="seconds that running searches get to end after a signal"
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(2 * MIB, description="most bytes of a request")
    max_connections: Count = Field(2048, description="connections at a time")
    response_seconds: Annotated[float, Field(ge=1)] = Field(
        3600.0, description="seconds for which a finished response can be fetched"
    )
    sse_keep_alive_interval: float = Field(15.0, gt=0, description="seconds for which a stream may be silent")

    header_timeout: float = 10.0  # seconds from a connection's beginning to a request's headers and key
    body_timeout: float = 30.0  # seconds for a whole request to arrive
    idle_timeout: float = 30.0  # seconds from an answer to the next request
    max_responses: int = 1000
    keep_searches: int = 100  # recent ones, for the page
    keep_log_bytes: int = 64 * MIB  # of their compressed logs, in memory

    @property
    def needs_key(self) -> bool:
        return bool(self.keys)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, *, has_keys: bool, no_auth: bool) -> None:
    """Raises if other machines would be served without a key, unless the user allows it."""
    if not has_keys and not no_auth and not is_loopback(host):
        raise UserError(
            f"--host {host} lets other machines in without a key: give --api-key (or GAMBIT_API_KEY), or --no-auth if "
            "the network itself is protected"
        )


def key_of(presented: str, keys: Iterable[ApiKey]) -> ApiKey | None:
    """Returns the key that was presented. Each is compared, in constant time, so that the time taken reveals none."""
    digest, found = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest(), None
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
    try:
        return build(ApiKey, {"name": str(name), **(entry if isinstance(entry, dict) else {"key": entry})})
    except UserError as error:  # its sentence must not show the key
        field_name = "key" if "key" in str(error).split(" = ")[0] else str(error)
        raise UserError(f"{path}: the entry {name!r} is wrong ({field_name}): see docs/serve.md") from None


def check_keys(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """Raises if two keys have the same name or text, since their clients could not be distinguished."""
    found = tuple(keys)
    for what, values in (("name", [key.name for key in found]), ("key", [key.digest for key in found])):
        if len(set(values)) < len(values):
            raise UserError(f"two API keys have the same {what}: give each client one of its own")
    return found
