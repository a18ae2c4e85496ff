"""The answer to a client: the texts of the winning traces, why they ended, and what they cost."""

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
    """One of the answers, with the thinking of its trace and the text after it."""

    reasoning: str | None
    content: str
    finish_reason: str  # stop or length
    trace: int | None
    answer: str | None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts as in the event log: every generated token of every trace."""

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
    """The answers of a search, in no format yet."""

    choices: tuple[AnswerChoice, ...]
    usage: TokenUsage
    gambit: Mapping[str, object]  # the field of that name
    result: SearchResult


def answer_of(ask: SearchAsk, pending: AnySearch, result: SearchResult, solver: AnySolver) -> SearchAnswer:
    """Returns the best-voted answers, or the text of the trace with the best score where no answer can be read."""
    tree, warnings = pending.record.tree, [*ask.warnings, *pending.notes]
    picked = _winners(result.votes[: ask.fields.n], pending.record.ballots())
    if not picked:
        picked, note = _best_scored(tree)
        warnings.append(note)
    elif len(picked) < ask.fields.n:
        warnings.append(f"n = {ask.fields.n}: the traces gave {len(picked)} different answers")
    texts = {trace: _texts(solver, tree, trace, pending.thinks) for trace, _ in picked if trace is not None}
    is_cut = result.stop_reason in CUT_SHORT
    choices = [_choice(ask, tree, texts, trace, answer, is_cut=is_cut) for trace, answer in picked]
    if any(trace is not None and answer is not None and not texts[trace][1] for trace, answer in picked):
        warnings.append(NO_TEXT)
    num_after = sum(_num_after_thinking(solver, tree, trace, pending.thinks) for trace in texts)
    generated = result.tokens.generated
    usage = TokenUsage(len(pending.record.started.prompt_tokens), generated, max(generated - num_after, 0))
    return SearchAnswer(tuple(choices), usage, _search_fields(result, warnings), result)


def _winners(entries: Sequence[VoteEntry], ballots: Sequence[Ballot]) -> list[tuple[int | None, str | None]]:
    """Returns each answer with its trace of most weight, the first among equals."""
    found: list[tuple[int | None, str | None]] = []
    for entry in entries:
        voters = [ballot for ballot in ballots if ballot.answer in entry.forms]
        best = max(voters, key=lambda ballot: (ballot.weight, -ballot.trace), default=None)
        found.append((None if best is None else best.trace, entry.answer))
    return found


def _best_scored(tree: TraceTree) -> tuple[list[tuple[int | None, str | None]], str]:
    """Returns the trace with the best score, completed ones first, and a warning."""
    spoken = [trace for trace in tree.traces if trace.num_tokens]
    best = max(spoken, key=lambda trace: _standing(tree, trace), default=None)
    if best is None:
        return [(None, None)], NO_END
    return [(best.id, None)], NO_ANSWER if best.end_reason is not None else NO_END


def _standing(tree: TraceTree, trace: Trace) -> tuple[bool, bool, float, int]:
    score = tree.score_of(trace)
    return trace.end_reason is EndReason.STOP, trace.end_reason is not None, -1.0 if score is None else score, -trace.id


def _choice(
    ask: SearchAsk,
    tree: TraceTree,
    texts: Mapping[int, tuple[str | None, str]],
    trace: int | None,
    answer: str | None,
    *,
    is_cut: bool,
) -> AnswerChoice:
    if trace is None:
        return AnswerChoice(None, "", "length", None, answer)
    reasoning, content = texts[trace]
    if not content and answer is not None:
        content = f"\\boxed{{{answer}}}" if ask.config.answer is AnswerKind.BOXED else answer
    content, is_stopped = _cut_at(content, ask.fields.stop)
    is_whole = is_stopped or (tree.traces[trace].end_reason is EndReason.STOP and not is_cut)
    return AnswerChoice(reasoning, content, "stop" if is_whole else "length", trace, answer)


def _texts(solver: AnySolver, tree: TraceTree, trace: int, thinks: bool) -> tuple[str | None, str]:
    """Returns a trace's thinking, without its tags, and the text after it."""
    text = solver.text_of(tree.tokens_of(trace))
    before, tag, after = text.partition(THINK_END)
    if not tag and not thinks:
        return None, text.strip()
    return before.strip().removeprefix(THINK_START).strip(), after.strip()


def _num_after_thinking(solver: AnySolver, tree: TraceTree, trace: int, thinks: bool) -> int:
    tokens = tree.tokens_of(trace)
    end = solver.think_end
    if end is not None and end in tokens:
        return len(tokens) - tokens.index(end) - 1
    return 0 if thinks else len(tokens)


def _cut_at(content: str, stops: Sequence[str]) -> tuple[str, bool]:
    places = [place for place in (content.find(stop) for stop in stops) if place >= 0]
    return (content[: min(places)], True) if places else (content, False)


def _search_fields(result: SearchResult, warnings: Sequence[str]) -> dict[str, object]:
    """Returns the results of the search for which OpenAI's formats have no fields."""
    votes = [
        {"answer": entry.answer, "weight": entry.weight, "traces": entry.traces, "roots": entry.roots}
        for entry in result.votes
    ]
    return {
        "search_id": result.problem_id,
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
