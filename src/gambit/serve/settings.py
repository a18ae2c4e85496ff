"""Settings of a server: its address, its limits, and the API keys that it takes."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gambit.config.options import CheckedModel
from gambit.errors import UserError
from gambit.serve.keys import ApiKey

MIB = 1 << 20
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0.1)]


class ServeSettings(CheckedModel):
    """Everything but the model and the search. Fields with a description are options of `gambit serve`."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ("pawn",)
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
    """Raises where other machines would be served without a key, and the user has not said that they may."""
    if not has_keys and not no_auth and not is_loopback(host):
        raise UserError(
            f"--host {host} lets other machines in without a key: give --api-key (or GAMBIT_API_KEY), or --no-auth if "
            "the network itself is protected"
        )
