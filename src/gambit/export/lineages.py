"""The complete traces of a search with their outcomes, and what their lineages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gambit import events as ev
from gambit.results.record import SearchRecord, fold
from gambit.tree import Trace, TraceState

Cut = tuple[int, int]  # a trace, and a length at which one of its own thoughts ended


@dataclass(frozen=True, slots=True)
class Stretch:
    """The tokens of a lineage that one of its traces generated itself, as lengths of the whole."""

    owner: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Complete:
    """A trace that came to its end with an answer."""

    trace: Trace
    is_right: bool
    score: float
    lineage: tuple[Stretch, ...]  # from its root on
    tokens: tuple[int, ...]


class SearchTraces:
    """A search, read from its log."""

    def __init__(self, log: Path) -> None:
        self._cuts: defaultdict[int, set[int]] = defaultdict(set)
        self.record: SearchRecord = fold(ev.read_log(log), log, self._note)

    def _note(self, event: ev.Event) -> None:
        if isinstance(event, ev.Scored | ev.Verified):
            for trace, length in zip(event.traces, event.num_tokens, strict=True):
                self._cuts[trace].add(length)

    def complete(self, is_right: Callable[[str], bool]) -> list[Complete]:
        """Returns the traces with an answer, best score first."""
        tree = self.record.tree
        found = [
            Complete(
                trace,
                is_right(trace.answer),
                tree.score_of(trace) or 0.0,
                tuple(self._segments(trace)),
                tree.tokens_of(trace.id),
            )
            for trace in tree.in_state(TraceState.FINISHED)
            if trace.answer is not None
        ]
        return sorted(found, key=lambda each: (-each.score, each.trace.id))

    def _segments(self, trace: Trace) -> Iterator[Stretch]:
        traces = [self.record.tree.traces[each] for each in self.record.tree.lineage(trace.id)]
        ends = [*(min(child.inherited, trace.num_tokens) for child in traces[1:]), trace.num_tokens]
        for each, end in zip(traces, ends, strict=True):
            yield Stretch(each.id, each.inherited, end)

    def cuts(self, complete: Complete) -> list[Cut]:
        """Returns the ends of its thoughts, inherited ones included, and its own end."""
        inside = [
            (part.owner, cut)
            for part in complete.lineage
            for cut in sorted(self._cuts[part.owner])
            if part.begin < cut <= part.end and cut < len(complete.tokens)
        ]
        return [*inside, (complete.trace.id, len(complete.tokens))]


def continuations(complete: Iterable[Complete]) -> dict[Cut, dict[int, list[Complete]]]:
    """Returns, by branch point, the complete traces behind each of its continuations.

    A branch point is a trace and a length at which others left it, or (-1, 0) for the prompt, which roots continue. A
    continuation has the id of the trace that begins there, or of the trace that was left and went on itself.
    """
    complete = list(complete)
    points: defaultdict[int, set[int]] = defaultdict(set)
    for each in complete:
        for part in each.lineage[:-1]:
            points[part.owner].add(part.end)
    found: defaultdict[Cut, defaultdict[int, list[Complete]]] = defaultdict(lambda: defaultdict(list))
    for each in complete:
        found[-1, 0][each.lineage[0].owner].append(each)
        for number, part in enumerate(each.lineage):
            for at in points[part.owner]:
                if at < part.end:
                    found[part.owner, at][part.owner].append(each)
                elif at == part.end and number + 1 < len(each.lineage):
                    found[part.owner, at][each.lineage[number + 1].owner].append(each)
    return {point: dict(sides) for point, sides in found.items()}
