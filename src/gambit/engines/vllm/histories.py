"""For scorers with histories: which slots of the workers' thought memory belong to which request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gambit.engines.vllm.messages import TraceTask
from gambit.scorers.memory import Histories, PastRows

_CLOSED = "closed search "


def closing_id(search: int) -> str:
    """The id that the front aborts to say that a search is closed: only requests and aborts reach the scheduler."""
    return f"{_CLOSED}{search}"


@dataclass(frozen=True, slots=True)
class ThoughtRows:
    """Sent to the workers with a step: the rows that may end a thought in it, and what to score them with."""

    requests: list[str]
    past: PastRows


class RequestHistories:
    """Histories by request.

    The front may branch a trace that has ended here as long as it has not read of its end. So a history is kept until
    the front releases it by aborting the request, which it also does for one that ended by itself.
    """

    def __init__(self, max_past: int) -> None:
        self._histories: Histories[str] = Histories()
        self._max_past = max_past
        self._released: list[str] = []
        self._kept: dict[int, list[str]] = {}  # searches that keep histories until they are closed
        self._is_kept: set[str] = set()

    @property
    def num_used(self) -> int:
        return self._histories.num_used

    def begin(self, request: str, task: TraceTask) -> None:
        # A trace of the self-check has a score without a thought.
        self._histories.begin(request, task.history_of, 0 if task.is_check else task.running_score.count)
        if (announced := task.announced) is not None and announced.keeps_histories:
            self._kept[task.search] = []
        if task.search in self._kept:
            self._kept[task.search].append(request)
            self._is_kept.add(request)

    def release(self, ids: Iterable[str]) -> None:
        """Takes effect with the next step: an abort overtakes branches that were sent before it."""
        for name in ids:
            if name.startswith(_CLOSED):
                kept = self._kept.pop(int(name.removeprefix(_CLOSED)), [])
                self._is_kept.difference_update(kept)
                self._released += kept
            elif name not in self._is_kept:
                self._released.append(name)

    def forget_released(self) -> None:
        """Before a step is scheduled: branches that were sent before the release have arrived by then."""
        for request in self._released:
            self._histories.end(request)
        self._released.clear()

    def propose(self, requests: Sequence[str]) -> ThoughtRows:
        """A slot for each row that may end a thought. Whether it does is known when the step is over."""
        return ThoughtRows(list(requests), self._histories.propose(requests, self._max_past))

    def settle(self, rows: ThoughtRows, scored: Collection[str]) -> None:
        """After a step: a thought that ended joins its trace's history, the other slots are free again.

        A step that was scheduled in between has not seen the new thought, and need not: two tokens in a row do not
        both end a thought.
        """
        own = rows.past.own
        kept = [row for row, request in enumerate(rows.requests) if request in scored and request in self._histories]
        self._histories.append([rows.requests[row] for row in kept], own[kept])
        self._histories.give_back(np.delete(own, kept))
        if missing := set(scored).difference(rows.requests):
            raise RuntimeError(f"thoughts of {sorted(missing)} were scored without a slot")
