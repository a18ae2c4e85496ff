"""Engines under Ray as they go: a line for each, or one for many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.text import Text

from gambit.cli.live import LiveScreen
from gambit.cluster.engines import EnginePool, EngineSlot

MOST_LINES = 8  # one an engine
T = TypeVar("T")


class PoolScreen(LiveScreen):
    """How many problems are done, and what each engine does."""

    stopping_words = "stopping: results so far are kept; Ctrl-C again aborts at once"
    refresh_per_second = 4

    def __init__(self, console: Console, *, is_live: bool, total: int) -> None:
        super().__init__(console, is_live=is_live)
        self._total = total
        self._num_done = 0
        self._slots: Sequence[EngineSlot] = ()

    def watch(self, pool: EnginePool[Any]) -> None:
        self._slots = pool.slots
        self._loading = ""

    def counted(self, results: Iterable[T]) -> Iterator[T]:
        for result in results:
            self._num_done += 1
            yield result

    def render(self) -> RenderableType:
        lines = [self._loading or f"{self._num_done}/{self._total} problems"]
        lines += [self.stopping_words] if self._is_stopping else []
        lines += [f"  {line}" for line in engine_lines(self._slots)]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def engine_lines(slots: Sequence[EngineSlot]) -> list[str]:
    """One an engine where they are few, else one for all."""
    if len(slots) <= MOST_LINES:
        return [_engine_line(slot) for slot in slots]
    states = [str(slot.state) for slot in slots]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    rates = sorted(slot.tokens_per_second for slot in slots)
    middle, total, deaths = rates[len(rates) // 2], sum(rates), sum(slot.num_deaths for slot in slots)
    return [f"{len(slots)} engines: {counted}", f"{middle:,.0f} tokens/s each, {total:,.0f} in all{_deaths(deaths)}"]


def _engine_line(slot: EngineSlot) -> str:
    speed = f"{slot.tokens_per_second:,.0f} tokens/s, {slot.num_done} done" if slot.pid else str(slot.state)
    return f"engine {slot.number}{slot.place}: {speed}{_deaths(slot.num_deaths)}"


def _deaths(count: int) -> str:
    return f", {count} death{'s' if count > 1 else ''}" if count else ""
