"""The work of `gambit serve`: checks address, keys and model, loads it, and serves until a signal comes."""

import asyncio
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from gambit.cli.options import given, picked, read_configs
from gambit.cli.serve import LIMITS, ServeOptions
from gambit.cli.session import check_model, loaded, needs_in_cluster, only_our_warnings, solver_maker
from gambit.cli.terminal import FAILURE, OK, failed, say
from gambit.cluster.engines import EnginePool
from gambit.cluster.plan import ClusterPlan
from gambit.cluster.serving import AnySolver, ReplicaSolver
from gambit.config.options import EngineConfig
from gambit.engines.base import check_engine
from gambit.errors import UserError
from gambit.models.files import usual_effort
from gambit.serve import server
from gambit.serve.settings import ApiKey, ServeSettings, check_binding, check_keys, example_question, key_of, read_keys
from gambit.storage.run_folder import check_writable

KEY_VARIABLES = ("GAMBIT_API_KEY", "VLLM_API_KEY")  # the first that is set counts


def serve(model_tag: str | None, options: ServeOptions, flags: Mapping[str, str | bool | None]) -> int:
    named = flags.get("model")
    if model_tag is not None and named not in (None, model_tag):
        raise UserError(f"two models are named, {model_tag} and {named}: a server has one")
    search, engine = read_configs(options.config, {**flags, "model": model_tag or named})
    keys = _keys(options.api_key or [], options.api_keys)
    check_binding(options.host, has_keys=bool(keys), no_auth=options.no_auth)
    settings = ServeSettings(
        host=options.host,
        port=options.port,
        served_names=tuple(dict.fromkeys(options.served_model_name or [engine.model])),
        adapters=tuple(name for name, folder in engine.adapters.items() if name != folder),  # no folders as ids
        keys=keys,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        out_dir=options.out,
        log_prompts=options.log_prompts,
        **given({name: flags[name] for name in LIMITS.fields}),
    )
    cluster = picked(ClusterPlan, flags).checked(engine)
    _check(settings, engine)
    search = search.with_usual(usual_effort(engine.model))
    bound = server.bound_socket(settings.host, settings.port)
    scheme = "https" if settings.ssl_certfile else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    greeting = greeting_of(settings, f"{scheme}://{host}:{bound.getsockname()[1]}")
    with only_our_warnings(), _loaded_solver(engine, cluster, settings) as solver, _request_log():
        failure = asyncio.run(server.serve(solver, settings, search, bound, lambda _: say(greeting)))
    if failure is not None:
        return failed(failure, f"the engine has failed: {failure}", FAILURE)
    return OK


def greeting_of(settings: ServeSettings, address: str) -> str:
    """Returns the addresses of the API and of the page, and a line that tries the API."""
    name = settings.served_names[0]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": example_question(name)}]})
    variable = next((f"${name}" for name in KEY_VARIABLES if key_of(os.environ.get(name, ""), settings.keys)), "KEY")
    key = f'-H "Authorization: Bearer {variable}" ' if settings.keys else ""
    return (
        f"{', '.join(settings.served_names)} at {address}/v1\n"
        f"page: {address}/ shows searches live\n"
        f"try:  curl -s {address}/v1/chat/completions {key}-d {shlex.quote(body)}"
    )


def _keys(typed: Sequence[str], file: Path | None) -> tuple[ApiKey, ...]:
    if not typed and file is None:
        typed = [key for key in map(os.environ.get, KEY_VARIABLES) if key][:1]
    if any(not key.strip() for key in typed):
        raise UserError("--api-key is empty, which any client could send: give a key")
    named = [ApiKey(name=f"key-{number}", key=key) for number, key in enumerate(dict.fromkeys(typed), start=1)]
    return check_keys([*named, *(read_keys(file) if file else [])])


def _check(settings: ServeSettings, engine: EngineConfig) -> None:
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise UserError("HTTPS needs both --ssl-certfile and --ssl-keyfile")
    for path in filter(None, (settings.ssl_certfile, settings.ssl_keyfile)):
        if not path.is_file():
            raise UserError(f"no file {path}: HTTPS needs a certificate and its key in PEM format")
    if settings.out_dir is not None:
        check_writable(settings.out_dir)
    check_engine(engine)
    check_model(engine.model, is_offline=engine.offline)


@contextmanager
def _loaded_solver(engine: EngineConfig, cluster: ClusterPlan | None, settings: ServeSettings) -> Iterator[AnySolver]:
    """Loads the model on an engine of this process, or on engines under Ray until the first is ready."""
    if cluster is None:
        with loaded(engine, _say_loading) as solver:
            yield solver
        return
    with needs_in_cluster(cluster, engine, _say_loading) as needs:
        _say_loading(f"{engine.model} on {cluster.num_engines} engines")
        make = solver_maker(engine, needs)
        with (
            EnginePool(make, cluster.num_engines, needs, jobs_per_engine=settings.max_running) as pool,
            closing(ReplicaSolver(engine.model, pool)) as remote,
        ):
            pool.wait(1)
            yield remote


def _say_loading(what: str) -> None:
    say(f"loading {what} …")


@contextmanager
def _request_log() -> Iterator[None]:
    """Writes request lines to stdout where that is no terminal; warnings of uvicorn go to stderr."""
    lines = logging.getLogger("gambit.serve.requests")
    if sys.stdout.isatty():
        yield
        return
    handler = logging.StreamHandler(sys.stdout)
    lines.addHandler(handler)
    lines.setLevel(logging.INFO)
    lines.propagate = False
    try:
        yield
    finally:
        lines.removeHandler(handler)
