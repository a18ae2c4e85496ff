"""What a server is started with: address, keys, limits; and the rules that these must obey."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from gambit.errors import UserError
from gambit.serve.keys import ApiKey

MIB = 1 << 20


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
