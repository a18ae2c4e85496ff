"""Puts the server together: desk, endpoints, page and the door in front of them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.routing import Router

from gambit.cluster.serving import AnySolver
from gambit.config.options import SearchConfig
from gambit.serve.api import Api
from gambit.serve.desk import SearchDesk
from gambit.serve.front import Front
from gambit.serve.metrics import ServerMetrics
from gambit.serve.model_ids import ModelIds
from gambit.serve.page import LivePage
from gambit.serve.requests import AskReader
from gambit.serve.responses import ResponseStore
from gambit.serve.settings import ServeSettings

MOST_TRACES_AT_A_TIME = 1024  # where the engine names no limit of its own


@dataclass(frozen=True, slots=True)
class ServedApp:
    """The ASGI application, and the desk behind it."""

    front: Front
    desk: SearchDesk


def make_app(solver: AnySolver, settings: ServeSettings, base: SearchConfig) -> ServedApp:
    """To be called on the event loop that will run it."""
    metrics = ServerMetrics()
    max_traces = settings.max_traces or solver.most_traces or MOST_TRACES_AT_A_TIME
    desk = SearchDesk(solver, settings, metrics, max_traces)
    ids = ModelIds.of(settings.served_names, int(time.time()))
    metrics.watch(desk, settings.served_names[0])
    reader = AskReader(ids, base, max_traces, solver.capacity_of)
    api = Api(desk, reader, ids, settings, ResponseStore(settings.response_seconds, settings.max_responses))
    page = LivePage(desk, reader, ids, settings)
    router = Router([*api.routes(), *page.routes()], redirect_slashes=False)
    return ServedApp(Front(router, settings, metrics), desk)
