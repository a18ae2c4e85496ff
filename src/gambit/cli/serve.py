"""`gambit serve`: checks address, keys and model, loads it, and serves until a signal comes."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gambit.cli.options import RAY_PANEL, SEARCH_PANELS, Panel, given, picked, read_configs, with_options
from gambit.cli.session import (
    check_model,
    loaded,
    needs_in_cluster,
    only_our_warnings,
    solver_maker,
)
from gambit.cli.terminal import FAILURE, OK, failed, say
from gambit.cluster.plan import ClusterConfig
from gambit.errors import UserError
from gambit.serve.settings import ApiKey, ServeSettings, check_binding, check_keys, read_keys

if TYPE_CHECKING:
    from gambit.cluster.plan import ClusterPlan
    from gambit.cluster.serving import AnySolver
    from gambit.config.options import EngineConfig, SearchConfig

KEY_VARIABLES = ("GAMBIT_API_KEY", "VLLM_API_KEY")  # the first that is set counts
LIMITS = Panel("Limits of the server", ServeSettings, (
    "max_running", "max_traces", "max_waiting", "request_timeout", "shutdown_timeout", "max_body_bytes",
    "max_connections", "response_seconds", "sse_keep_alive_interval",
))  # fmt: skip
option = partial(typer.Option, rich_help_panel="Server")


@with_options(RAY_PANEL, LIMITS, *SEARCH_PANELS)
def serve(
    model_tag: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or hub name; pawn is the bundled model.")
    ] = None,
    *,
    host: Annotated[str, option(metavar="TEXT", help="Address to serve at.")] = "127.0.0.1",
    port: Annotated[int, option(min=0, max=65535, metavar="INT", help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        option(
            metavar="TEXT",
            help="Key that clients must send, several if given again; else GAMBIT_API_KEY or VLLM_API_KEY.",
        ),
    ] = None,
    api_keys: Annotated[Path | None, option(metavar="FILE", help="YAML of keys by name, with limits for each.")] = None,
    no_auth: Annotated[bool, option("--no-auth", help="Let other machines in without a key.")] = False,
    served_model_name: Annotated[
        list[str] | None,
        option(metavar="TEXT", help="Model id in the API, several if given again; default: the model as given."),
    ] = None,
    ssl_certfile: Annotated[Path | None, option(metavar="FILE", help="Certificate for HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, option(metavar="FILE", help="Its private key.")] = None,
    out: Annotated[
        Path | None,
        option(metavar="FOLDER", help="Keep every search's event log here; default: the recent ones in memory."),
    ] = None,
    log_prompts: Annotated[
        bool, option("--log-prompts", help="Write questions and answers into the request log.")
    ] = False,
    config: Annotated[Path | None, option(metavar="FILE", help="YAML of options; flags override it.")] = None,
    **flags: str | bool | None,
) -> int:
    """Serve a model behind OpenAI's API, with a page that shows its searches live.

    Options of the search are what every request starts from; its budgets are the most that a request may ask for.
    The first signal lets running searches end, the second ends the server. Exit codes: 0 ended by a signal, 1 failure,
    2 your input.
    """
    _check_libraries()
    search, engine = read_configs(config, _with_model(flags, model_tag))
    keys = _keys(api_key or [], api_keys)
    check_binding(host, has_keys=bool(keys), no_auth=no_auth)
    settings = ServeSettings(
        host=host,
        port=port,
        served_names=tuple(dict.fromkeys(served_model_name or [engine.model])),
        keys=keys,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        out_dir=out,
        log_prompts=log_prompts,
        **given({name: flags[name] for name in LIMITS.fields}),
    )
    cluster = picked(ClusterConfig, flags).plan(engine)
    _check(settings, engine)
    return _run(settings, search, engine, cluster)


def _check_libraries() -> None:
    for name in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"gambit serve needs {name}: pip install 'gambit-search[serve]'")


def _with_model(flags: Mapping[str, str | bool | None], model_tag: str | None) -> dict[str, str | bool | None]:
    """Adds the model of `gambit serve M`, which stands for `--model M`."""
    named = flags.get("model")
    if model_tag is not None and named not in (None, model_tag):
        raise UserError(f"two models are named, {model_tag} and {named}: a server has one")
    return {**flags, "model": model_tag or named}


def _keys(typed: list[str], file: Path | None) -> tuple[ApiKey, ...]:
    if not typed and file is None:
        typed = [key for key in map(os.environ.get, KEY_VARIABLES) if key][:1]
    if any(not key.strip() for key in typed):
        raise UserError("--api-key is empty: anybody could send that")
    named = [ApiKey(name=f"key-{number}", key=key) for number, key in enumerate(dict.fromkeys(typed), start=1)]
    return check_keys([*named, *(read_keys(file) if file else [])])


def _check(settings: ServeSettings, engine: EngineConfig) -> None:
    from gambit.engines.base import check_engine
    from gambit.storage.run_folder import check_writable

    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise UserError("HTTPS needs both --ssl-certfile and --ssl-keyfile")
    for path in filter(None, (settings.ssl_certfile, settings.ssl_keyfile)):
        if not path.is_file():
            raise UserError(f"no file {path}: HTTPS needs a certificate and its key in PEM format")
    if settings.out_dir is not None:
        check_writable(settings.out_dir)
    check_engine(engine)
    check_model(engine.model)


def _run(settings: ServeSettings, search: SearchConfig, engine: EngineConfig, cluster: ClusterPlan | None) -> int:
    from gambit.serve.server import bound_socket, serve

    bound = bound_socket(settings.host, settings.port)
    scheme = "https" if settings.ssl_certfile else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{scheme}://{host}:{bound.getsockname()[1]}"
    with only_our_warnings(), _loaded_solver(engine, cluster, settings) as solver, _request_log():
        ready = f"{', '.join(settings.served_names)} at {address}/v1"
        failure = asyncio.run(serve(solver, settings, search, bound, lambda _: say(ready)))
    if failure is not None:
        return failed(failure, f"the engine has failed: {failure}", FAILURE)
    return OK


@contextmanager
def _loaded_solver(engine: EngineConfig, cluster: ClusterPlan | None, settings: ServeSettings) -> Iterator[AnySolver]:
    """Loads the model on an engine of this process, or on engines under Ray until the first is ready."""
    console = _Console()
    if cluster is None:
        with loaded(engine, console) as solver:
            yield solver
        return
    from gambit.cluster.engines import EnginePool
    from gambit.cluster.serving import ReplicaSolver

    with needs_in_cluster(cluster, engine, console) as needs:
        console.loading(f"{engine.model} on {cluster.num_engines} engines")
        make = solver_maker(engine, needs)
        with (
            EnginePool(make, cluster.num_engines, needs, jobs_per_engine=settings.max_running) as pool,
            closing(ReplicaSolver(engine.model, pool)) as remote,
        ):
            pool.wait_for_one()
            yield remote


class _Console:
    """Stands in for a live view, which a server does not have: prints what is loading."""

    def loading(self, model: str) -> None:
        say(f"loading {model} …")

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def _request_log() -> Iterator[None]:
    """Writes request lines to stdout as they are; warnings of uvicorn go to stderr."""
    lines = logging.getLogger("gambit.serve.requests")
    handler = logging.StreamHandler(sys.stdout)
    lines.addHandler(handler)
    lines.setLevel(logging.INFO)
    lines.propagate = False
    try:
        yield
    finally:
        lines.removeHandler(handler)
