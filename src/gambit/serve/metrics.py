"""Counters of a server in Prometheus' text format, named as vLLM names its own."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gambit.serve.desk import SearchDesk, ServedSearch

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class SecondsHistogram:
    """How long something took, in buckets."""

    def __init__(self, name: str, about: str) -> None:
        self._name = name
        self._about = about
        self._counts = [0] * (len(SECONDS) + 1)
        self._total = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._total += seconds

    def lines(self) -> Iterator[str]:
        yield from _head(self._name, "histogram", self._about)
        below = 0
        for bound, count in zip([*SECONDS, None], self._counts, strict=True):
            below += count
            yield f'{self._name}_bucket{{le="{"+Inf" if bound is None else bound}"}} {below}'
        yield f"{self._name}_sum {self._total}"
        yield f"{self._name}_count {below}"


class ServerMetrics:
    """What happened so far; the event loop alone writes to it."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()  # by route and status
        self.ended: Counter[tuple[str, str]] = Counter()  # by policy and what became of them
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.request_seconds = SecondsHistogram("gambit:e2e_request_latency_seconds", "From arrival to the answer.")
        self.queue_seconds = SecondsHistogram("gambit:request_queue_time_seconds", "From arrival to the engine.")
        self.first_seconds = SecondsHistogram(
            "gambit:time_to_first_thought_seconds", "From arrival to the first words."
        )

    def search_ended(self, search: ServedSearch) -> None:
        self.ended[search.ask.config.policy, str(search.status)] += 1
        self.queue_seconds.add(search.queue_seconds)
        if search.answer is not None and search.ended is not None:
            self.request_seconds.add(search.ended - search.arrived)
            self.prompt_tokens += search.answer.usage.prompt_tokens
            self.generated_tokens += search.answer.usage.completion_tokens

    def text(self, desk: SearchDesk, model: str) -> str:
        lines = [
            *_gauge("gambit:num_requests_running", "Searches on the engine.", len(desk.queue.running)),
            *_gauge("gambit:num_requests_waiting", "Searches in the queue.", desk.queue.num_waiting),
            *_gauge("gambit:num_traces_admitted", "Places of the running searches' pools.", desk.queue.num_traces),
            *_gauge("gambit:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", desk.kv_usage()),
            *_gauge("gambit:engine_healthy", "1 while the engine works.", int(desk.engine_failure is None)),
            *_gauge("gambit:num_engines_ready", "Engines that searches can go to.", desk.num_engines),
            *_counter("gambit:prompt_tokens_total", "Tokens of prompts.", [("", self.prompt_tokens)]),
            *_counter("gambit:generation_tokens_total", "Generated tokens.", [("", self.generated_tokens)]),
            *_counter(
                "gambit:searches_total", "Searches by what became of them.", _by_two(self.ended, "policy", "status")
            ),
            *_counter("gambit:http_responses_total", "Answers by status.", _by_two(self.responses, "path", "status")),
            *_gauge("gambit:info", "The served model.", 1, f'{{model="{_escaped(model)}"}}'),
        ]
        for histogram in (self.request_seconds, self.queue_seconds, self.first_seconds):
            lines += histogram.lines()
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def _gauge(name: str, about: str, value: float, labels: str = "") -> list[str]:
    return [*_head(name, "gauge", about), f"{name}{labels} {value}"]


def _counter(name: str, about: str, values: Iterable[tuple[str, float]]) -> list[str]:
    return [*_head(name, "counter", about), *(f"{name}{labels} {value}" for labels, value in values)]


def _by_two(counts: Counter[tuple[str, str]] | Counter[tuple[str, int]], *names: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for values, count in sorted(counts.items(), key=str):
        labels = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in zip(names, values, strict=True))
        found.append((f"{{{labels}}}", count))
    return found


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
