"""Rows of training data from one search: best traces, pairs of siblings, labelled thoughts, groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from gambit.events import Json
from gambit.export.lineages import Complete, Cut, SearchTraces, continuations
from gambit.text.tokenizers import Tokenizer

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
