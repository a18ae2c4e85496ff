"""The data of the tree page as columns, small enough for thousands of traces."""

import base64
import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add

from gambit.answers import Equivalent
from gambit.results.result import STOP_WORDS, SearchResult
from gambit.results.vote import Ballot, VoteEntry, has_answer
from gambit.tree import Trace, TraceState
from gambit.types import StopReason
from gambit.view.history import History
from gambit.view.text import TokenText, model_name

STATES = tuple(TraceState)
NONE = -1
SCORE_DIGITS = 4
CUT_SHORT = "The log ends before the search did: traces without an end have no text, and the vote is the one so far."


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The head of the page."""

    problem: str
    question: str
    prompt: str
    answer: str | None
    margin: float
    abstained: int
    aggregation: str
    capacity: int
    kv_capacity: int
    last_step: int
    is_decoded: bool
    notices: list[str]
    facts: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class VoteRow:
    """One answer with the traces behind it."""

    answer: str
    weight: float
    traces: list[int]
    roots: list[int]
    islands: list[int]


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """One entry per trace in each list; a step that did not come is -1."""

    parent: list[int]
    island: list[int]
    state: list[int]  # index into `PageData.states`
    created: list[int]
    ended: list[int]  # its last token
    left: list[int]  # its place in the pool; later than `ended` for a ghost
    inherited: list[int]  # tokens
    own: list[int]  # tokens
    reused: list[int]
    recomputed: list[int]
    seen: list[int]  # thoughts inherited
    thoughts: list[int]  # thoughts of its own
    waits: list[list[int]]  # begin, end, begin, end, …
    reason: list[str]
    answer: list[str | None]
    weight: list[float]  # in the vote
    cut: list[int]  # bytes of text inherited
    text: list[int]  # length of its own text in the page's text store


@dataclass(frozen=True, slots=True)
class ThoughtColumns:
    """All thoughts, trace by trace; whole numbers as steps from the one before, each trace starting from 0."""

    step: list[int]
    score: list[float]
    tokens: list[int]
    bytes: list[int]  # where it ends in the trace's whole text


@dataclass(frozen=True, slots=True)
class PoolColumns:
    """The pool wherever it changed."""

    step: list[int]
    running: list[int]
    waiting: list[int]
    ghosts: list[int]
    completed: list[int]


@dataclass(frozen=True, slots=True)
class KvColumns:
    """The engine's cache at the samples."""

    step: list[int]
    used: list[int]


@dataclass(frozen=True, slots=True)
class PageData:
    """Everything the page shows but the traces' texts."""

    states: list[str]
    run: RunFacts
    votes: list[VoteRow]
    traces: TraceColumns
    thoughts: ThoughtColumns
    pool: PoolColumns
    kv: KvColumns


def build(
    history: History, text: TokenText, equivalent: Equivalent, problems: Sequence[str] = ()
) -> tuple[PageData, str]:
    """Returns the page's data and its text store: each trace's own text, deflated, base64, one behind the other.

    `problems` are notices for readers of the page about what could not be read; then `text` is token numbers.
    """
    record = history.record
    vote = record.vote(equivalent)
    texts = _Texts(record.tree.traces, text)
    stored = [_packed(texts.own(trace)) for trace in record.tree.traces]
    result = record.result(vote)
    doubts = [f"In doubt: {warning}." for warning in result.vote_warnings]
    notices = [*problems, *(doubts if record.stopped else [CUT_SHORT])]
    prompt = text.join(record.started.prompt_tokens).decode(errors="replace")
    data = PageData(
        states=[str(state) for state in STATES],
        run=RunFacts(
            problem=record.started.problem_id,
            question=_question(record.started.question),
            prompt=prompt,
            answer=vote.answer,
            margin=vote.margin,
            abstained=vote.num_abstained,
            aggregation=record.started.aggregation,
            capacity=record.started.capacity,
            kv_capacity=max((sample.kv_capacity_tokens for sample in history.samples), default=0),
            last_step=history.last_step,
            is_decoded=not problems,
            notices=notices,
            facts=_facts(history, result),
        ),
        votes=_votes(vote.entries, record.ballots()),
        traces=_trace_columns(history, texts, [len(one) for one in stored]),
        thoughts=_thought_columns(history, texts),
        pool=pool_columns(history),
        kv=KvColumns([s.step for s in history.samples], [s.kv_used_tokens for s in history.samples]),
    )
    return data, "".join(stored)


class _Texts:
    """The places of tokens in the text of a trace, inherited tokens included, in bytes."""

    def __init__(self, traces: Sequence[Trace], text: TokenText) -> None:
        self._traces = traces
        self._text = text
        self._offsets = [text.offsets(trace.own_tokens) for trace in traces]
        self.cuts: list[int] = []
        for trace in traces:
            self.cuts.append(0 if trace.parent is None else self.offset(trace.parent, trace.inherited))

    def own(self, trace: Trace) -> bytes:
        return self._text.join(trace.own_tokens)

    def offset(self, trace_id: int, num_tokens: int) -> int:
        """Returns the bytes of the first `num_tokens` tokens, as far as the log of a killed run has them."""
        trace = self._traces[trace_id]
        while num_tokens < trace.inherited and trace.parent is not None:
            trace = self._traces[trace.parent]
        own = self._offsets[trace.id]
        return int(self.cuts[trace.id] + own[min(num_tokens - trace.inherited, len(own) - 1)])


def _packed(text: bytes) -> str:
    return base64.b64encode(zlib.compress(text, 6)).decode()


def _question(question: str) -> str:
    """Returns the turns of a conversation, which is logged as JSON, and any other question as it is."""
    try:
        messages = json.loads(question)
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    except (ValueError, TypeError, KeyError):
        return question


def _trace_columns(history: History, texts: _Texts, sizes: list[int]) -> TraceColumns:
    pairs = list(zip(history.record.tree.traces, history.traces, strict=True))
    weight_of = {ballot.trace: ballot.weight for ballot in history.record.ballots()}

    def column(value: Callable[[Trace], int]) -> list[int]:
        return [value(trace) for trace, _ in pairs]

    return TraceColumns(
        parent=column(lambda t: NONE if t.parent is None else t.parent),
        island=column(lambda t: t.island),
        state=column(lambda t: STATES.index(t.state)),
        created=column(lambda t: t.created_step),
        ended=column(lambda t: NONE if t.ended_step is None else t.ended_step),
        left=[NONE if h.left_step is None else h.left_step for _, h in pairs],
        inherited=column(lambda t: t.inherited),
        own=column(lambda t: len(t.own_tokens)),
        reused=column(lambda t: t.reused),
        recomputed=column(lambda t: t.recomputed),
        seen=[t.score.count - len(h.thought_scores) for t, h in pairs],
        thoughts=[len(h.thought_scores) for _, h in pairs],
        waits=[[NONE if step is None else step for wait in h.waits for step in wait] for _, h in pairs],
        reason=[h.reason for _, h in pairs],
        answer=[t.answer for t, _ in pairs],
        weight=[_rounded(weight_of.get(t.id, 0.0)) for t, _ in pairs],
        cut=texts.cuts,
        text=sizes,
    )


def _thought_columns(history: History, texts: _Texts) -> ThoughtColumns:
    columns = ThoughtColumns([], [], [], [])
    for trace, h in zip(history.record.tree.traces, history.traces, strict=True):
        columns.step.extend(_deltas(h.thought_steps))
        columns.score.extend(map(_rounded, h.thought_scores))
        columns.tokens.extend(_deltas(h.thought_tokens))
        columns.bytes.extend(_deltas([texts.offset(trace.id, length) for length in h.thought_tokens]))
    return columns


def _deltas(values: Sequence[int]) -> Iterable[int]:
    return (after - before for before, after in itertools.pairwise([0, *values]))


def _rounded(value: float) -> float:
    return float(f"{value:.{SCORE_DIGITS}g}")


def pool_columns(history: History) -> PoolColumns:
    """Returns the pool wherever it changed. It is made from whole lives, since only these show who really waited."""
    changes: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])  # step -> running, waiting, ghosts, completed
    after = history.last_step + 1

    def count(column: int, begin: int, end: int | None) -> None:
        changes[begin][column] += 1
        changes[after if end is None else end][column] -= 1

    for trace, past in zip(history.record.tree.traces, history.traces, strict=True):
        count(0, trace.created_step, trace.ended_step)
        for begin, end in past.waits:
            count(0, after if end is None else end, begin)  # not running meanwhile
            count(1, begin, end)
        if trace.was_evicted and trace.ended_step is not None:
            count(2, trace.ended_step, past.left_step)
        if trace.state is TraceState.FINISHED and trace.ended_step is not None:
            count(3, trace.ended_step, None)
    steps = [0, *(step for step in sorted(changes) if 0 < step < after and any(changes[step]))]
    sizes = itertools.accumulate((changes[step] for step in steps), lambda size, change: [*map(add, size, change)])
    return PoolColumns(steps, *map(list, zip(*sizes, strict=True)))


def _votes(entries: Sequence[VoteEntry], ballots: Sequence[Ballot]) -> list[VoteRow]:
    rows = [VoteRow(entry.answer, _rounded(entry.weight), [], [], []) for entry in entries]
    row_of = {form: row for entry, row in zip(entries, rows, strict=True) for form in entry.forms}
    for ballot in filter(has_answer, ballots):
        row = row_of[str(ballot.answer)]
        row.traces.append(ballot.trace)
        for found, seen in ((ballot.root, row.roots), (ballot.island, row.islands)):
            if found not in seen:
                seen.append(found)
    return rows


def _facts(history: History, result: SearchResult) -> list[tuple[str, str]]:
    started, counts, sharing = history.record.started, result.counts, result.sharing
    engine = started.environment.get("engine")
    engine = engine if isinstance(engine, dict) else {}
    model = model_name(str(engine.get("model", "not named in the log")))
    stop = STOP_WORDS[result.stop_reason] if result.stop_reason is not StopReason.FAILED else "before its end"
    return [
        ("policy", f"{started.policy}, capacity {started.capacity}, seed {started.seed}, vote by {started.vote}"),
        *([] if result.pool is None else [("pool", str(result.pool))]),
        ("model", f"{model} on {engine.get('name')}, {engine.get('device')}"),
        ("scorer", str(started.environment.get("scorer", "not named in the log"))),
        ("traces", f"{counts.roots:,} roots + {counts.branched:,} branched: "
                   + ", ".join(f"{number:,} {name}" for name, number in counts.by_end.items() if number)
                   + f"; planned: at least {started.num_traces:,}"),
        ("tokens", str(result.tokens)),
        ("sharing", f"{sharing.factor:.2f}: decode steps read {sharing.total_tokens:,} tokens, "
                    f"{sharing.unique_tokens:,} with each shared prefix once"),
        ("seconds", str(result.seconds)),
        ("stopped", stop),
    ]  # fmt: skip
