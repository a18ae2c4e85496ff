"""What the scheduler knows of histories: whose thoughts lie in which slots, until the front lets go; no tensor here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gambit.engines.vllm.messages import Order
from gambit.scorers.memory import Histories, PastRows

_CLOSED = "closed search "


def closing_id(search: int) -> str:
    """Aborting it, the front says that it has closed a search that keeps histories: vLLM has no other way in."""
    return f"{_CLOSED}{search}"


@dataclass(frozen=True, slots=True)
class ThoughtOrders:
    """Sent to the workers with a step: the rows that may end a thought in it, and what to score them with."""

    requests: list[str]
    past: PastRows


class RequestHistories:
    """Histories by request.

    The front may branch a trace that has ended here, as long as it has not read of its end. So nothing is forgotten
    before the front lets go, which it does by aborting the request, also one that has ended by itself.
    """

    def __init__(self, max_past: int) -> None:
        self._histories: Histories[str] = Histories()
        self._max_past = max_past
        self._let_go: list[str] = []
        self._kept: dict[int, list[str]] = {}  # searches that keep histories until they are closed
        self._is_kept: set[str] = set()

    @property
    def num_used(self) -> int:
        return self._histories.num_used

    def begin(self, request: str, order: Order) -> None:
        # A trace of the self-check has a score that nobody gave it.
        self._histories.begin(request, order.history_of, 0 if order.is_check else order.running_score.count)
        if (announced := order.announced) is not None and announced.keeps_histories:
            self._kept[order.search] = []
        if order.search in self._kept:
            self._kept[order.search].append(request)
            self._is_kept.add(request)

    def let_go(self, ids: Iterable[str]) -> None:
        """Takes effect with the next step: vLLM hears of an abort ahead of branches that were sent before it."""
        for name in ids:
            if name.startswith(_CLOSED):
                kept = self._kept.pop(int(name.removeprefix(_CLOSED)), [])
                self._is_kept.difference_update(kept)
                self._let_go += kept
            elif name not in self._is_kept:
                self._let_go.append(name)

    def forget(self) -> None:
        """Before a step is scheduled; whatever the front had sent before it let go has arrived by then."""
        for request in self._let_go:
            self._histories.end(request)
        self._let_go.clear()

    def orders(self, requests: Sequence[str]) -> ThoughtOrders:
        """A slot for each row that may end a thought. Whether it does is known when the step is over."""
        return ThoughtOrders(list(requests), self._histories.propose(requests, self._max_past))

    def settle(self, orders: ThoughtOrders, scored: Collection[str]) -> None:
        """After a step: a thought that ended joins its trace's history, the other slots are free again.

        A step that was scheduled in between has not seen the new thought. It needs not: no two tokens in a row end
        a thought.
        """
        own = orders.past.own
        kept = [row for row, request in enumerate(orders.requests) if request in scored and request in self._histories]
        self._histories.append([orders.requests[row] for row in kept], own[kept])
        self._histories.give_back(np.delete(own, kept))
        if missing := set(scored).difference(orders.requests):
            raise RuntimeError(f"thoughts of {sorted(missing)} were scored without a slot")
