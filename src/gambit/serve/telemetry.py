"""A span of OpenTelemetry for every request, where its library is installed; it is set up from outside, as usual."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


class RequestSpan:
    """One request as a span, child of the one that the client names in `traceparent`."""

    def __init__(self, name: str, headers: Mapping[str, str]) -> None:
        self._span: Any = None
        try:
            trace = importlib.import_module("opentelemetry.trace")
            propagate = importlib.import_module("opentelemetry.propagate")
        except ImportError:
            return
        tracer = trace.get_tracer("gambit.serve")
        self._span = tracer.start_span(name, context=propagate.extract(headers), kind=trace.SpanKind.SERVER)

    def end(self, attributes: Mapping[str, object]) -> None:
        if self._span is None:
            return
        for name, value in attributes.items():
            if isinstance(value, str | int | float | bool):
                self._span.set_attribute(name, value)
        self._span.end()
