"""From a finished search to what a client gets: the winners' texts, why they ended, what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gambit.answers import AnswerKind
from gambit.cluster.serving import AnySearch, AnySolver
from gambit.results.result import SearchResult
from gambit.results.vote import Ballot, VoteEntry
from gambit.serve.requests import SearchAsk
from gambit.text.boundary import THINK_END, THINK_START
from gambit.tree import Trace, TraceTree
from gambit.types import EndReason, StopReason

CUT_SHORT = (StopReason.BUDGET_TOKENS, StopReason.BUDGET_SECONDS, StopReason.INTERRUPTED, StopReason.FAILED)
NO_ANSWER = "no answer could be read from any trace: this is the text of the one with the best score"
NO_END = "no trace came to its end in time: this is the text of the one with the best score so far"
NO_TEXT = "the winning trace gave its answer inside its thinking and said nothing after it"


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """One of the answers: what its trace thought, and what it said then."""

    reasoning: str | None
    content: str
    finish_reason: str  # stop or length
    trace: int | None
    answer: str | None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """As the event log counts: every generated token, whichever trace it belongs to."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int

    def to_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """Everything that the formats of the API are made of."""

    choices: tuple[AnswerChoice, ...]
    usage: TokenUsage
    gambit: Mapping[str, object]
    result: SearchResult


def answer_of(
    search_id: str, ask: SearchAsk, pending: AnySearch, result: SearchResult, solver: AnySolver
) -> SearchAnswer:
    """The best-voted answers; where none can be read, the text of the trace with the best score."""
    tree, warnings = pending.record.tree, [*ask.warnings, *pending.notes]
    picked = _winners(result.votes[: ask.fields.n], pending.record.ballots())
    if not picked:
        picked, note = _best_scored(tree)
        warnings.append(note)
    elif len(picked) < ask.fields.n:
        warnings.append(f"n = {ask.fields.n}: the traces gave {len(picked)} different answers")
    is_cut = result.stop_reason in CUT_SHORT
    choices = [_choice(ask, pending, solver, trace, answer, is_cut=is_cut) for trace, answer in picked]
    if any(answer is not None and choice.trace is not None and not _said(solver, tree, choice.trace, pending.thinks)[1]
           for choice, (_, answer) in zip(choices, picked, strict=True)):  # fmt: skip
        warnings.append(NO_TEXT)
    said = sum(_num_said(solver, tree, choice.trace, pending.thinks) for choice in choices if choice.trace is not None)
    generated = result.tokens.generated
    usage = TokenUsage(len(pending.record.started.prompt_tokens), generated, max(generated - said, 0))
    return SearchAnswer(tuple(choices), usage, _gambit(search_id, result, warnings), result)


def _winners(entries: Sequence[VoteEntry], ballots: Sequence[Ballot]) -> list[tuple[int | None, str | None]]:
    """For each answer the trace that weighs most, the first of equals."""
    found: list[tuple[int | None, str | None]] = []
    for entry in entries:
        voters = [ballot for ballot in ballots if ballot.answer in entry.forms]
        best = max(voters, key=lambda ballot: (ballot.weight, -ballot.trace), default=None)
        found.append((None if best is None else best.trace, entry.answer))
    return found


def _best_scored(tree: TraceTree) -> tuple[list[tuple[int | None, str | None]], str]:
    """Completed traces before others; a trace without a score comes last."""
    spoken = [trace for trace in tree.traces if trace.num_tokens]
    best = max(spoken, key=lambda trace: _standing(tree, trace), default=None)
    if best is None:
        return [(None, None)], NO_END
    return [(best.id, None)], NO_ANSWER if best.end_reason is not None else NO_END


def _standing(tree: TraceTree, trace: Trace) -> tuple[bool, bool, float, int]:
    score = tree.score_of(trace)
    return trace.end_reason is EndReason.STOP, trace.end_reason is not None, -1.0 if score is None else score, -trace.id


def _choice(
    ask: SearchAsk, pending: AnySearch, solver: AnySolver, trace: int | None, answer: str | None, *, is_cut: bool
) -> AnswerChoice:
    if trace is None:
        return AnswerChoice(None, "", "length", None, answer)
    tree = pending.record.tree
    reasoning, content = _said(solver, tree, trace, pending.thinks)
    if not content and answer is not None:
        content = f"\\boxed{{{answer}}}" if ask.config.answer is AnswerKind.BOXED else answer
    content, is_stopped = _cut_at(content, ask.fields.stop)
    is_whole = is_stopped or (tree.traces[trace].end_reason is EndReason.STOP and not is_cut)
    return AnswerChoice(reasoning, content, "stop" if is_whole else "length", trace, answer)


def _said(solver: AnySolver, tree: TraceTree, trace: int, thinks: bool) -> tuple[str | None, str]:
    """What a trace thought, without tags, and what it said after that."""
    text = solver.text_of(tree.tokens_of(trace))
    before, tag, after = text.partition(THINK_END)
    if not tag and not thinks:
        return None, text.strip()
    return before.strip().removeprefix(THINK_START).strip(), after.strip()


def _num_said(solver: AnySolver, tree: TraceTree, trace: int, thinks: bool) -> int:
    """Tokens after the thinking."""
    tokens = tree.tokens_of(trace)
    end = solver.think_end
    if end is not None and end in tokens:
        return len(tokens) - tokens.index(end) - 1
    return 0 if thinks else len(tokens)


def _cut_at(content: str, stops: Sequence[str]) -> tuple[str, bool]:
    places = [place for place in (content.find(stop) for stop in stops) if place >= 0]
    return (content[: min(places)], True) if places else (content, False)


def _gambit(search_id: str, result: SearchResult, warnings: Sequence[str]) -> dict[str, object]:
    """What no field of OpenAI's tells."""
    votes = [{"answer": entry.answer, "weight": entry.weight, "traces": entry.traces, "roots": entry.roots}
             for entry in result.votes]  # fmt: skip
    return {
        "search_id": search_id,
        "answer": result.answer,
        "votes": votes,
        "margin": result.margin,
        "abstained": result.num_abstained,
        "policy": result.policy,
        "seed": result.seed,
        "counts": dataclasses.asdict(result.counts),
        "tokens": dataclasses.asdict(result.tokens),
        "sharing": dataclasses.asdict(result.sharing),
        "seconds": dataclasses.asdict(result.seconds),
        "stop_reason": str(result.stop_reason),
        "warnings": list(dict.fromkeys([*warnings, *result.warnings])),
    }
