"""`gambit serve`: checks address, keys and model, loads it, and serves until a signal comes."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gambit.cli.commands import BriefCommand, HelpAll, made_command
from gambit.cli.options import with_config_options
from gambit.cli.session import (
    CpusPerEngine,
    Engines,
    GpusPerEngine,
    Ray,
    check_model,
    cluster_plan,
    loaded,
    needs_in_cluster,
    only_our_warnings,
    solver_maker,
)
from gambit.cli.solve import read_configs
from gambit.cli.terminal import FAILURE, OK, exit_with, failed, say
from gambit.errors import UserError

if TYPE_CHECKING:
    from gambit.cluster.plan import ClusterPlan
    from gambit.cluster.serving import AnySolver
    from gambit.config.options import EngineConfig, SearchConfig
    from gambit.serve.keys import ApiKey
    from gambit.serve.settings import ServeSettings

KEY_VARIABLES = ("GAMBIT_API_KEY", "VLLM_API_KEY")  # the first that is set counts
SERVER, LIMITS = "Server", "Limits of the server"


def serve(
    model_tag: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or hub name; pawn is the bundled model.")
    ] = None,
    *,
    host: Annotated[
        str, typer.Option(metavar="TEXT", help="Address to serve at.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="INT", help="0 takes a free one.", rich_help_panel=SERVER)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Key that clients must send, several if given again; else GAMBIT_API_KEY or VLLM_API_KEY.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML of keys by name, with limits for each.", rich_help_panel=SERVER),
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Let other machines in without a key.", rich_help_panel=SERVER)
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Model id in the API, several if given again; default: the model as given.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate for HTTPS.", rich_help_panel=SERVER)
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its private key.", rich_help_panel=SERVER)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep every search's event log here; default: the recent ones in memory.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Write questions and answers into the request log.", rich_help_panel=SERVER),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML of options; flags override it.", rich_help_panel=SERVER)
    ] = None,
    max_running: Annotated[
        int, typer.Option(min=1, metavar="INT", help="Searches at a time.", rich_help_panel=LIMITS)
    ] = 32,
    max_traces: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="INT",
            help="Traces of all searches at a time; default: what the engine runs, else 1,024.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, metavar="INT", help="Searches in the queue; more get a 429.", rich_help_panel=LIMITS)
    ] = 128,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="NUMBER",
            help="Seconds from arrival; then the best vote so far is the answer.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="NUMBER",
            help="Seconds that running searches get to end after a signal.",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0,
    max_body_bytes: Annotated[
        int, typer.Option(min=1024, metavar="INT", help="Most bytes of a request.", rich_help_panel=LIMITS)
    ] = 2 << 20,
    max_connections: Annotated[
        int, typer.Option(min=1, metavar="INT", help="Connections at a time.", rich_help_panel=LIMITS)
    ] = 2048,
    response_seconds: Annotated[
        float,
        typer.Option(
            min=1, metavar="NUMBER", help="Seconds that a finished response can be asked for.", rich_help_panel=LIMITS
        ),
    ] = 3600.0,
    sse_keep_alive_interval: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="NUMBER", help="Seconds for which a stream may be silent.", rich_help_panel=LIMITS
        ),
    ] = 15.0,
    ray: Ray = None,
    engines: Engines = None,
    gpus_per_engine: GpusPerEngine = None,
    cpus_per_engine: CpusPerEngine = None,
    help_all: HelpAll = False,
    **flags: str | bool | None,
) -> None:
    """Serve a model behind OpenAI's API, with a page that shows its searches live.

    Options of the search are what every request starts from; its budgets are the most that a request may ask for.
    The first signal lets running searches end, the second ends the server. Exit codes: 0 ended by a signal, 1 failure,
    2 your input.
    """

    def body() -> int:
        from gambit.serve.settings import ServeSettings, check_binding

        search, engine = read_configs(config, _with_model(flags, model_tag))
        keys = _keys(api_key or [], api_keys)
        check_binding(host, has_keys=bool(keys), no_auth=no_auth)
        settings = ServeSettings(
            host=host, port=port, served_names=tuple(dict.fromkeys(served_model_name or [engine.model])), keys=keys,
            max_running=max_running, max_traces=max_traces, max_waiting=max_waiting, request_timeout=request_timeout,
            shutdown_timeout=shutdown_timeout, max_body_bytes=max_body_bytes, max_connections=max_connections,
            response_seconds=response_seconds, keep_alive_seconds=sse_keep_alive_interval, out_dir=out,
            log_prompts=log_prompts, ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile,
        )  # fmt: skip
        cluster = cluster_plan(ray, engines, gpus_per_engine, cpus_per_engine, engine)
        _check(settings, engine)
        return _run(settings, search, engine, cluster)

    exit_with(lambda: _with_libraries(body))


def command() -> object:
    return made_command(with_config_options(serve), "serve", BriefCommand)


def _with_libraries(body: Callable[[], int]) -> int:
    for name in ("starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"gambit serve needs {name}: pip install 'gambit-search[serve]'")
    return body()


def _with_model(flags: Mapping[str, str | bool | None], model_tag: str | None) -> dict[str, str | bool | None]:
    """`gambit serve M` and `gambit serve --model M` are the same."""
    given = flags.get("model")
    if model_tag is not None and given not in (None, model_tag):
        raise UserError(f"two models are named, {model_tag} and {given}: a server has one")
    return {**flags, "model": model_tag or given}


def _keys(given: list[str], file: Path | None) -> tuple[ApiKey, ...]:
    from gambit.serve.keys import check_keys, made_key, read_keys

    if not given and file is None:
        given = [key for key in map(os.environ.get, KEY_VARIABLES) if key][:1]
    if any(not key.strip() for key in given):
        raise UserError("--api-key is empty: anybody could send that")
    named = [made_key(f"key-{number}", key) for number, key in enumerate(dict.fromkeys(given), start=1)]
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
        failure = serve(
            solver, settings, search, bound, lambda _: say(f"{', '.join(settings.served_names)} at {address}/v1")
        )
    if failure is not None:
        return failed(failure, f"the engine has failed: {failure}", FAILURE)
    return OK


@contextmanager
def _loaded_solver(engine: EngineConfig, cluster: ClusterPlan | None, settings: ServeSettings) -> Iterator[AnySolver]:
    """On an engine of this process, or on engines under Ray, of which the first must be ready."""
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
    """Says what is loading; a server has no live view."""

    def loading(self, model: str) -> None:
        say(f"loading {model} …")

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def _request_log() -> Iterator[None]:
    """Request lines on stdout, each as it is; what uvicorn complains about goes to stderr."""
    lines = logging.getLogger("gambit.serve.requests")
    handler = logging.StreamHandler(sys.stdout)
    lines.addHandler(handler)
    lines.setLevel(logging.INFO)
    lines.propagate = False
    try:
        yield
    finally:
        lines.removeHandler(handler)
