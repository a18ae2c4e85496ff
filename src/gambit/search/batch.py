"""Several searches on one engine: they join, advance together and leave, each by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gambit.engines.base import Engine
from gambit.search.loop import Search
from gambit.types import SearchStep, StopReason


class SearchBatch:
    """The running searches of one engine. What goes wrong in one of them ends that one; an engine that fails ends all.

    Whatever gives a search back has stopped it: its vote is the caller's to take (`Search.conclude`).
    """

    def __init__(self, engine: Engine) -> None:
        self.running: dict[int, Search] = {}
        self._engine = engine

    @property
    def has_room(self) -> bool:
        """Whether one more search would have a trace to run: traces that wait for others are better not begun."""
        most = self._engine.info.most_traces
        return most is None or sum(search.record.tree.num_live for search in self.running.values()) < most

    def add(self, search: Search) -> list[Search]:
        """Begin a search; gives it back where it ended while it began (an exhausted budget, a policy that fails)."""
        self.running[search.number] = search
        try:
            search.begin()
        except Exception as error:
            search.fail(error)
        return self._take_stopped()

    def step(self) -> list[Search]:
        """One engine step; gives the searches that it ended.

        Where none of them has anything to run until its verifier has read, they wait for that instead.
        """
        if all(search.is_waiting for search in self.running.values()):
            return self._wait()
        batch = self._engine.step()
        for search in self.running.values():
            try:
                search.absorb(batch.searches.get(search.number, SearchStep()), batch)
            except Exception as error:
                search.fail(error)
        return self._take_stopped()

    def _wait(self) -> list[Search]:
        for search in self.running.values():
            try:
                search.wait()
            except Exception as error:
                search.fail(error)
        return self._take_stopped()

    def stop(
        self, searches: Iterable[Search], reason: StopReason = StopReason.INTERRUPTED, error: str | None = None
    ) -> list[Search]:
        """End running searches between two steps."""
        for search in list(searches):
            try:
                search.stop(reason, error)
            except Exception as failure:
                search.fail(failure)
        return self._take_stopped()

    def stop_all(self, reason: StopReason, error: str | None = None) -> list[Search]:
        return self.stop(self.running.values(), reason, error)

    def _take_stopped(self) -> list[Search]:
        stopped = [search for search in self.running.values() if search.is_stopped]
        for search in stopped:
            del self.running[search.number]
        return stopped


def run_searches(
    engine: Engine,
    searches: Iterable[Search],
    *,
    concurrency: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Search]:
    """Drive searches in this thread, up to `concurrency` in one batch with room, and give each back with its result.

    Whatever ends the iteration early, every begun search gets its vote and the end of its log.
    """
    coming, batch = iter(searches), SearchBatch(engine)
    reason, failure = StopReason.INTERRUPTED, None
    try:
        while True:
            yield from _concluded(_fill_up(batch, coming, concurrency))
            if not batch.running or should_stop():
                break
            yield from _concluded(batch.step())
    except Exception as error:
        reason, failure = StopReason.FAILED, str(error)
        raise
    finally:
        left = list(_concluded(batch.stop_all(reason, failure)))
    yield from left


def _fill_up(batch: SearchBatch, coming: Iterator[Search], concurrency: int) -> Iterator[Search]:
    while len(batch.running) < concurrency and batch.has_room:
        search = next(coming, None)
        if search is None:
            return
        yield from batch.add(search)


def _concluded(stopped: Iterable[Search]) -> Iterator[Search]:
    """With their votes; a search that failed by itself raises, for whoever drives it here owns its callbacks."""
    for search in stopped:
        search.conclude()
        if search.failure is not None:
            raise search.failure
        yield search
