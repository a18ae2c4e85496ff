"""Rows of training data from the complete traces of one search: best ones, siblings, labelled thoughts, groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from gambit import events as ev
from gambit.events import Json
from gambit.results.record import SearchRecord, fold
from gambit.text.tokenizers import Tokenizer
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


Sample: TypeAlias = dict[str, Json]


class Purpose(StrEnum):
    """The kind of training that the rows are made for."""

    SFT = "sft"
    DPO = "dpo"
    PRM = "prm"
    GRPO = "grpo"


@dataclass(frozen=True, slots=True)
class Solved:
    """A search with its complete traces, best score first, and the text of tokens."""

    search: SearchTraces
    complete: Sequence[Complete]
    tokenizer: Tokenizer

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.search.record.started.prompt_tokens

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included, since templates and ends are made of them."""
        return self.tokenizer.batch_decode([tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False)[0]


def best_traces(solved: Solved) -> Iterator[Sample]:
    """Yields the best right trace, if there is one."""
    best = next((each for each in solved.complete if each.is_right), None)
    if best is not None:
        yield {
            "prompt": solved.text(solved.prompt),
            "completion": solved.text(best.tokens),
            "answer": best.trace.answer,
            "trace": best.trace.id,
            "score": best.score,
        }


def sibling_pairs(solved: Solved) -> Iterator[Sample]:
    """Yields a pair for each branch point whose continuations differ in how often they end right.

    Chosen is the best right trace of the most right continuation, rejected the best wrong one of the least right.
    """
    for (owner, at), sides in sorted(continuations(solved.complete).items()):
        ranked = sorted(sides, key=lambda side: (share_right(sides[side]), -side))
        worst, best = ranked[0], ranked[-1]
        if share_right(sides[worst]) == share_right(sides[best]):
            continue
        chosen = next(each for each in sides[best] if each.is_right)
        rejected = next(each for each in sides[worst] if not each.is_right)
        yield {
            "prompt": solved.text((*solved.prompt, *chosen.tokens[:at])),
            "chosen": solved.text(chosen.tokens[at:]),
            "rejected": solved.text(rejected.tokens[at:]),
            "branch_point": at,
            "parent": None if owner < 0 else owner,
            "traces": [chosen.trace.id, rejected.trace.id],
            "shares_right": [share_right(sides[best]), share_right(sides[worst])],
        }


def share_right(traces: Sequence[Complete]) -> float:
    return sum(each.is_right for each in traces) / len(traces)


def labelled_thoughts(solved: Solved) -> Iterator[Sample]:
    """Yields each complete trace, thought by thought; a thought is good if some trace that contains it ends right."""
    reached: Counter[Cut] = Counter()
    right: Counter[Cut] = Counter()
    for each in solved.complete:
        for cut in solved.search.cuts(each):
            reached[cut] += 1
            right[cut] += each.is_right
    for each in solved.complete:
        cuts = solved.search.cuts(each)
        begins = [0, *(length for _, length in cuts[:-1])]
        values = [right[cut] / reached[cut] for cut in cuts]
        yield {
            "prompt": solved.text(solved.prompt),
            "completions": [solved.text(each.tokens[begin:end]) for begin, (_, end) in zip(begins, cuts, strict=True)],
            "labels": [value > 0 for value in values],
            "values": list[Json](values),
            "trace": each.trace.id,
        }


def group_of_traces(solved: Solved) -> Iterator[Sample]:
    """Yields one row: the complete traces with their rewards, and the ancestors that hold their first tokens."""
    tree = solved.search.record.tree
    outcome = {each.trace.id: each for each in solved.complete}
    needed = {part.owner for each in solved.complete for part in each.lineage}
    traces: list[Json] = [
        {
            "trace": trace.id,
            "parent": trace.parent,
            "inherited": trace.inherited,
            "tokens": list[Json](trace.own_tokens),
            "reward": float(outcome[trace.id].is_right) if trace.id in outcome else None,
            "score": outcome[trace.id].score if trace.id in outcome else None,
        }
        for trace in tree.traces
        if trace.id in needed
    ]
    if traces:
        prompt = list[Json](solved.prompt)
        yield {"prompt": solved.text(solved.prompt), "prompt_tokens": prompt, "traces": traces}


SAMPLES: Mapping[Purpose, Callable[[Solved], Iterator[Sample]]] = {
    Purpose.SFT: best_traces,
    Purpose.DPO: sibling_pairs,
    Purpose.PRM: labelled_thoughts,
    Purpose.GRPO: group_of_traces,
}
