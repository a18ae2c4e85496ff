"""How many times over the decode steps of a search read the prefixes that its traces share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gambit.tree import Trace, TraceTree

Steps: TypeAlias = list[tuple[int, int]]  # apart and in order, each from a first step to one past the last


@dataclass(frozen=True, slots=True)
class SearchSharing:
    """Tokens whose keys and values the decode steps of a search read, summed over steps: the cost of attention."""

    total_tokens: int = 0  # each trace reads its whole path: prompt, inherited tokens, its own so far
    unique_tokens: int = 0  # what several paths of a step have in common is read once
    factor: float = 1.0  # total / unique, the most that reading once can save; 1: nothing is shared


NOTHING_READ = SearchSharing()


class _Stint(NamedTuple):
    """Steps without a gap in which a trace decodes one token each."""

    first_step: int
    num_steps: int
    num_said: int  # own tokens before the first of them

    @property
    def own_tokens(self) -> int:
        """Read in these steps: all that it had said before each."""
        return self.num_steps * self.num_said + self.num_steps * (self.num_steps - 1) // 2


class _Branch(NamedTuple):
    """Traces that have the first `length` tokens of a stretch in common, and the steps in which any of them decodes."""

    length: int
    steps: Steps


def sharing_of(tree: TraceTree, prompt_tokens: int) -> SearchSharing:
    """Of an ended search, as if on one engine.

    A trace is taken to decode one token in every step from its admission on, until it has said what the log gives it;
    time as a ghost or in the queue is left out. The step that admits a trace counts like any other.
    """
    total = unique = 0
    branches: list[list[_Branch]] = [[] for _ in tree.traces]  # by the trace whose own tokens they begin with
    from_prompt: list[_Branch] = []
    for trace in reversed(tree.traces):  # children come after their parents
        stints = list(_stints(trace))
        own = sum(stint.own_tokens for stint in stints)
        total += own + (prompt_tokens + trace.inherited) * sum(stint.num_steps for stint in stints)
        steps = _joined((stint.first_step, stint.first_step + stint.num_steps) for stint in stints)
        read, steps = _read_again(branches[trace.id], steps)
        unique += own + read
        holder = _holder_of_last_inherited(tree, trace)
        if holder is None:
            from_prompt.append(_Branch(prompt_tokens, steps))
        else:
            branches[holder.id].append(_Branch(trace.inherited - holder.inherited, steps))
    unique += _read_again(from_prompt, [])[0]
    return SearchSharing(total, unique, total / unique if unique else 1.0)


def _stints(trace: Trace) -> Iterator[_Stint]:
    said = 0
    for step, until in zip(trace.admitted_steps, (*trace.queued_tokens, trace.num_own_tokens), strict=False):
        if until > said:  # not so where it was never told what a trace had said: the log or the engine broke off
            yield _Stint(step, until - said, said)
            said = until


def _holder_of_last_inherited(tree: TraceTree, trace: Trace) -> Trace | None:
    """Whose own token is the last that a trace inherited; None: it has the prompt alone.

    Not always its parent: a child may leave where its parent began, or before.
    """
    holder = trace
    while holder.parent is not None:
        holder = tree.traces[holder.parent]
        if holder.inherited < trace.inherited:
            return holder
    return None


def _read_again(branches: Iterable[_Branch], covered: Steps) -> tuple[int, Steps]:
    """Tokens of a stretch that branches read in steps that are not covered, and all the steps in which it is read.

    The longest branch of a step reads what the others do. A trace that decodes is as long as any of its branches.
    """
    read = 0
    for branch in sorted(branches, reverse=True):
        together = _joined((*covered, *branch.steps))
        read += branch.length * (_num_steps(together) - _num_steps(covered))
        covered = together
    return read, covered


def _num_steps(steps: Steps) -> int:
    return sum(end - begin for begin, end in steps)


def _joined(steps: Iterable[tuple[int, int]]) -> Steps:
    joined: Steps = []
    for begin, end in sorted(steps):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined
