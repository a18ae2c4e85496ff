"""A stack's part in one search: what its parts say about each thought at its moment, and the chance made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from gambit.config.trust import read_trust
from gambit.events import Json
from gambit.scorers.base import ScorerInfo
from gambit.scorers.readers.base import ReaderInfo
from gambit.scorers.stack import AGREEMENT, CLOSENESS, CONFIDENCE, STATE, SUPPORT, VERIFIER, StackInfo, logit_of
from gambit.scorers.stack_pool import PoolFeatures, mean_confidences
from gambit.tree import TraceState, TraceTree
from gambit.types import Aggregation, ThoughtScore


@dataclass(frozen=True, slots=True)
class StackUse:
    """A stack, as far as a search needs it."""

    info: StackInfo
    state: ScorerInfo | None  # of its state scorer
    verifier_aggregation: Aggregation = Aggregation.LAST
    embedding_size: int = 0  # of the vectors by which it compares states


def stack_info(name: str, info: StackInfo) -> ReaderInfo:
    """A stack as the judge of a search: one probability for all that a trace has said and done."""
    return ReaderInfo(
        name, format="stack", runs_on="search", device="cpu", trust=read_trust(cast("Json", info.trust), name)
    )


@dataclass(frozen=True, slots=True)
class StackFeatures:
    """What all parts but the verifier say about a trace at the end of a thought, or at its own end."""

    values: Mapping[str, float]
    is_complete: bool  # then it counts in the vote alone
    agreement: Callable[[], float] | None = None  # compares answers, which may take a while

    def known(self) -> Mapping[str, float]:
        return self.values if self.agreement is None else {**self.values, AGREEMENT: self.agreement()}


class _Thought(NamedTuple):
    num_tokens: int
    score: float
    confidence: float


@dataclass(slots=True)
class _Line:
    """A trace's thoughts, inherited ones included, and the verifier's logits of them as they came."""

    thoughts: list[_Thought] = field(default_factory=list)
    logits: list[tuple[int, float]] = field(default_factory=list)

    def cut(self, num_tokens: int) -> _Line:
        return _Line([each for each in self.thoughts if each.num_tokens <= num_tokens],
                     [each for each in self.logits if each[0] <= num_tokens])  # fmt: skip


class Stacking:
    """Follows the traces of one search. Features are taken when a thought ends; a verifier's score may come later."""

    def __init__(self, use: StackUse, tree: TraceTree, is_same: Callable[[str, str], bool]) -> None:
        self._use = use
        self._parts = use.info.parts
        self._tree = tree
        self._pool = PoolFeatures(is_same)
        self._lines: dict[int, _Line] = {}

    # -- what happens ------------------------------------------------------------------------------------------

    def branch(self, child: int, parent: int, inherited: int) -> None:
        self._lines[child] = self._line(parent).cut(inherited)
        self._join(parent)
        self._pool.branch(child, parent, inherited)

    def note(self, scored: Sequence[ThoughtScore]) -> list[StackFeatures]:
        """Thoughts that ended at one moment; of each what is known then."""
        for thought in scored:
            self._line(thought.trace).thoughts.append(
                _Thought(thought.num_tokens, thought.score, thought.confidence or 0.0)
            )
            self._join(thought.trace)
            vector = None if thought.embedding is None else np.array(thought.embedding, np.float32)
            self._pool.thought(thought.trace, thought.num_tokens, vector)
        self._pool.keep(self._is_there)
        return [self._features(thought.trace, is_complete=False) for thought in scored]

    def end(self, traces: Sequence[int]) -> list[StackFeatures]:
        """Traces that came to their end at one moment; the tree has their answers."""
        for trace in traces:
            self._join(trace)
            self._pool.end(trace, self._tree.traces[trace].answer)
        return [self._features(trace, is_complete=True) for trace in traces]

    def _join(self, trace: int) -> None:
        self._pool.join(trace, self._tree.traces[trace].root)

    def _line(self, trace: int) -> _Line:
        return self._lines.setdefault(trace, _Line())

    def _is_there(self, trace: int) -> bool:
        found = self._tree.traces[trace]
        return found.is_active or found.state is TraceState.FINISHED

    # -- what it makes of it -----------------------------------------------------------------------------------

    def chance(self, trace: int, num_tokens: int, features: StackFeatures, read: float | None) -> float | None:
        """Of ending right. `read`: the verifier's probability; without one, by the fit that leaves the verifier out."""
        known, is_complete = features.known(), features.is_complete
        if VERIFIER not in self._parts:
            return self._use.info.lines.chance(known, is_complete=is_complete)
        if read is None:
            lines = self._use.info.without.get(VERIFIER)
            return None if lines is None else lines.chance(known, is_complete=is_complete)
        logits = self._line(trace).logits
        logits.append((num_tokens, logit_of(read)))
        is_mean = self._use.verifier_aggregation is Aggregation.MEAN
        logit = float(np.mean([each for _, each in logits])) if is_mean else logits[-1][1]
        return self._use.info.lines.chance({**known, VERIFIER: logit}, is_complete=is_complete)

    def _features(self, trace: int, *, is_complete: bool) -> StackFeatures:
        known = {
            STATE: self._state, CONFIDENCE: self._confidence, CLOSENESS: self._pool.closeness,
            SUPPORT: self._pool.support,
        }  # fmt: skip
        values = {name: known[name](trace) for name in self._parts if name in known}
        agreement = self._pool.agreement_later(trace) if AGREEMENT in self._parts else None
        return StackFeatures(values, is_complete, agreement)

    def _state(self, trace: int) -> float:
        """As `gambit.training.stack.features` has it; 0 for a trace without a thought."""
        info, scores = self._use.state, [each.score for each in self._line(trace).thoughts]
        assert info is not None, "a stack with a state scorer says which"
        score = 0.0 if not scores else scores[-1] if info.aggregation is Aggregation.LAST else float(np.mean(scores))
        return logit_of(score) if info.is_probability else score

    def _confidence(self, trace: int) -> float:
        thoughts = self._line(trace).thoughts
        if not thoughts:
            return 0.0
        return float(mean_confidences([t.confidence for t in thoughts], [t.num_tokens for t in thoughts])[-1])
