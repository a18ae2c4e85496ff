"""`gambit serve`: its options."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ConfigDict, Field

from gambit.cli.options import FILE, FOLDER, RAY_PANEL, SEARCH_PANELS, Panel, with_options
from gambit.config.options import CheckedModel
from gambit.errors import UserError, install_line
from gambit.serve.settings import ServeSettings

LIMITS = Panel("Limits of the server", ServeSettings, (
    "max_running", "max_traces", "max_waiting", "request_timeout", "shutdown_timeout", "max_body_bytes",
    "max_connections", "response_seconds", "sse_keep_alive_interval",
))  # fmt: skip


class ServeOptions(CheckedModel):
    """The options of `gambit serve` beside its limits and those of searches and the engine."""

    model_config = ConfigDict(title="Server")

    host: str = Field("127.0.0.1", description="address to serve at")
    port: int = Field(8000, ge=0, le=65535, description="0 takes a free one")
    api_key: list[str] | None = Field(
        None, description="key that clients must send, several if given again; else GAMBIT_API_KEY or VLLM_API_KEY"
    )
    api_keys: Path | None = Field(
        None, description="YAML of keys by name, with limits for each", json_schema_extra=FILE
    )
    no_auth: bool = Field(False, description="let other machines in without a key")
    served_model_name: list[str] | None = Field(
        None, description="model id in the API, several if given again; default: the model as given"
    )
    ssl_certfile: Path | None = Field(None, description="certificate for HTTPS", json_schema_extra=FILE)
    ssl_keyfile: Path | None = Field(None, description="its private key", json_schema_extra=FILE)
    out: Path | None = Field(
        None,
        description="keep every search's event log here; default: the recent ones in memory",
        json_schema_extra=FOLDER,
    )
    log_prompts: bool = Field(False, description="write questions and answers into the request log")
    config: Path | None = Field(None, description="YAML of options; flags override it", json_schema_extra=FILE)


@with_options(
    RAY_PANEL,
    LIMITS,
    *SEARCH_PANELS,
    usual=("host", "port", "api_key", "out", "config", "max_running", "scorer", "engine", "policy", "capacity"),
)
def serve(
    model_tag: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or hub name; pawn is the bundled model.")
    ] = None,
    *,
    options: ServeOptions,
    **flags: str | bool | None,
) -> int:
    """Serve a model behind OpenAI's API, with a page that shows its searches live.

    Options of the search are what every request starts from; its budgets are the most that a request may ask for.
    The first signal lets running searches end, the second ends the server. Exit codes: 0 ended by a signal, 1 failure,
    2 your input.
    """
    for name in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"gambit serve needs {name}: {install_line('serve')}")
    from gambit.cli import serve_work

    return serve_work.serve(model_tag, options, flags)
