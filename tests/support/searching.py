"""Builders for searches in tests: settings, headers, one call from an engine to a finished search."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from hypothesis import strategies as st

import gambit
from gambit import events as ev
from gambit.config.options import BranchPoint
from gambit.config.presets import SearchSettings
from gambit.config.trust import THOUGHTS, Doubt
from gambit.engines.base import Engine, SearchSpec
from gambit.policies.base import TraceView, requirements_of
from gambit.results.vote import Consensus
from gambit.search.choice import load_policy, options_model
from gambit.search.loop import Search, SearchBatch
from gambit.search.pool import Callbacks
from gambit.search.scores import VerifierUse
from gambit.text.boundary import BoundaryRule
from gambit.tree import Trace, TraceState, TraceTree
from gambit.types import Aggregation, PoolSettings, Sampling, StepBatch, StopReason

NO_RULE = BoundaryRule(1, frozenset(), frozenset(), frozenset(), None)

# Every policy with options that make something happen in traces of a few dozen tokens.
POLICY_OPTIONS = {
    "best-of-n": [{}],
    "deepconf": [{"warmup_traces": 3, "window_tokens": 4, "percentile": 50}, {"warmup_traces": 2}],
    "gambit": [{}, {"parents": "random"}, {"views": "coupled"}],
    "gambit-authors": [{}, {"parents": "random"}],
    "sc": [{}],
    "single": [{}],
    "slim-sc": [
        {"delay_tokens": 0, "threshold_percentile": 70},
        {"delay_tokens": 6, "variant": "random", "threshold": 0.9},
        {"delay_tokens": 6, "split": "markers", "min_thought_tokens": 3, "threshold": 0.5},
    ],
    "step": [{}, {"pruned_vote": True}],
}


def make_settings(policy: str = "gambit", **changes: object) -> SearchSettings:
    pool: dict[str, object] = {"islands": 1, "swap_size": 2, "check_interval": 5, "warmup_tokens": 6}
    names = (field.name for field in dataclasses.fields(PoolSettings))
    pool |= {name: changes.pop(name) for name in names if name in changes}
    options: dict[str, object] = {
        "capacity": 8, "pool": PoolSettings(**pool), "hard_floor": None,
        "child_temperature": 1.0, "branch_point": BranchPoint.LAST_TOKEN, "ghost_parents": False,
        "max_new_tokens": 60, "sampling": Sampling(temperature=1.0, top_p=1.0, top_k=0),
        "budget_tokens": None, "budget_seconds": None, "budget_traces": None, **changes,
    }  # fmt: skip
    options.setdefault("num_traces", options["capacity"])
    return SearchSettings(policy=policy, **options)


def make_header(settings: SearchSettings, vote: str = "score") -> ev.RunStarted:
    return ev.RunStarted(
        format=ev.LOG_FORMAT, problem_id="p", question="?", policy=settings.policy, vote=vote,
        aggregation=Aggregation.MEAN, seed=settings.sampling.seed, capacity=settings.capacity,
        num_traces=settings.num_traces, prompt_tokens=(1,), settings=settings.to_json(), environment={},
    )  # fmt: skip


@dataclass
class Watched:
    """A search with all its events; `check` runs after every event."""

    search: Search
    events: list[ev.Event] = field(default_factory=list)


def make_search(
    engine: Engine,
    settings: SearchSettings,
    *,
    number: int = 1,
    prompt: tuple[int, ...] = (1, 2, 3),
    rule: BoundaryRule = NO_RULE,
    stop_ids: frozenset[int] = frozenset(),
    answer_of: Callable[..., str | None] = lambda tokens: str(tokens[-1] % 3),
    check: Callable[[Search, ev.Event], None] = lambda search, event: None,
    vote: str = "score",
    wrap: Callable[..., object] = lambda policy: policy,
    decode: Callable[..., str] = lambda tokens: "".join(" Wait" if token % 5 == 0 else " so" for token in tokens),
    equivalent_until: Callable[[float], Callable[[str, str], bool]] = lambda deadline: str.__eq__,
    verifier: VerifierUse | None = None,
) -> Watched:
    def on_event(event: ev.Event) -> None:
        watched.events.append(event)
        check(watched.search, event)

    policy = wrap(load_policy(settings.policy).from_settings(settings))
    callbacks = Callbacks(answer_of, equivalent_until, on_event, decode)
    requirements = requirements_of(policy)
    spec = SearchSpec(
        number,
        prompt,
        rule,
        stop_ids,
        confidence_window=requirements.confidence_window,
        embedding_size=requirements.embedding_size,
        keeps_histories=settings.ghost_parents,
        has_verifier=verifier is not None,
    )
    watched = Watched(Search(engine, policy, settings, spec, make_header(settings, vote), callbacks, verifier))
    return watched


def run_searches(
    engine: Engine,
    searches: Iterable[Search],
    *,
    concurrency: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Search]:
    """Drives searches in this thread, up to `concurrency` in one batch with room, and yields each with its result.

    Whatever ends the iteration early, every begun search gets its vote and the end of its log.
    """
    coming, batch = iter(searches), SearchBatch(engine)
    reason, failure = StopReason.INTERRUPTED, None
    try:
        while True:
            while len(batch.running) < concurrency and batch.has_room and (search := next(coming, None)) is not None:
                yield from _concluded(batch.add(search))
            if not batch.running or should_stop():
                break
            yield from _concluded(batch.step())
    except Exception as error:
        reason, failure = StopReason.FAILED, str(error)
        raise
    finally:
        left = list(_concluded(batch.stop_all(reason, failure)))
    yield from left


def _concluded(stopped: Iterable[Search]) -> Iterator[Search]:
    """Concludes each search; re-raises its own failure."""
    for search in stopped:
        search.conclude()
        if search.failure is not None:
            raise search.failure
        yield search


def check_tree(tree: TraceTree) -> None:
    """Asserts what must hold between any two events (docs/how-it-works.md)."""
    assert tree.num_active <= tree.capacity, f"{tree.num_active} active traces, capacity {tree.capacity}"
    assert sum(map(tree.count, TraceState)) == len(tree.traces), "a trace is in two states or in none"
    for trace in tree.traces:
        assert trace.id in tree._in_state[trace.state]
        assert trace.is_live or trace.ended_step is not None, f"trace {trace.id} ended without a step"
        if trace.parent is None:
            assert (trace.inherited, trace.depth, trace.root) == (0, 0, trace.id)
        else:
            _check_child(trace, tree.traces[trace.parent])


def _check_child(child: Trace, parent: Trace) -> None:
    assert parent.id < child.id and child.root == parent.root and child.depth == parent.depth + 1
    assert child.island == parent.island, f"trace {child.id} left the island of its parent"
    if not parent.is_live:
        assert child.inherited <= parent.num_tokens, f"child {child.id} inherits tokens that {parent.id} never had"


def check_ended(tree: TraceTree) -> None:
    """Asserts what must hold at the end of a search."""
    check_tree(tree)
    assert tree.num_live == 0, f"{tree.num_live} traces neither ended nor were cancelled"


def run_one(engine: Engine, settings: SearchSettings, **options: object) -> Watched:
    watched = make_search(engine, settings, **options)
    list(run_searches(engine, [watched.search]))
    return watched


def check_victims(events: list[ev.Event], *, unscored_first: bool = False) -> list[int]:
    """Who lost its memory. Each is recomputed from the log by independent code: scored before unscored (or after),
    lowest mean first, youngest on a tie."""
    scores: dict[int, list[float]] = defaultdict(list)
    running: set[int] = set()
    victims: list[int] = []
    for event in events:
        match event:
            case ev.Branched(trace=child, parent=parent):
                scores[child] = list(scores[parent])
            case ev.Admitted(trace=trace):
                running.add(trace)
            case ev.Scored(traces=traces, scores=values):
                for trace, value in zip(traces, values, strict=True):
                    scores[trace].append(value)
            case ev.Evicted(trace=trace, reason="pressure") | ev.Pruned(trace=trace, reason="pressure"):
                means = {t: sum(scores[t]) / len(scores[t]) for t in running if scores[t]}
                unscored = running - set(means)
                if unscored and (unscored_first or not means):
                    assert trace == max(unscored)
                else:
                    lowest = min(means, key=lambda t: (means[t], -t))
                    assert trace == lowest or abs(means[trace] - means[lowest]) < 1e-6
                running.discard(trace)
                victims.append(trace)
            case (
                ev.Evicted(trace=trace) | ev.Pruned(trace=trace) | ev.Finished(trace=trace) | ev.Cancelled(trace=trace)
            ):
                running.discard(trace)
    return victims


schedules = st.fixed_dictionaries({
    "seed": st.integers(0, 10**6),
    "thought_chance": st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    "finish_chance": st.sampled_from([0.0, 0.02, 0.1, 0.4]),
    "kv_tokens": st.sampled_from([60, 120, 300, 1 << 30]),
    "admit_chance": st.sampled_from([1.0, 0.6]),
})  # fmt: skip

options = st.fixed_dictionaries({
    "policy": st.just("gambit"),
    "capacity": st.integers(1, 12),
    "check_interval": st.integers(1, 9),
    "warmup_tokens": st.integers(0, 12),
    "max_new_tokens": st.integers(1, 50),
    "hard_floor": st.sampled_from([None, 0.3, 0.6]),
    "branch_point": st.sampled_from(list(BranchPoint)),
    "ghost_parents": st.booleans(),
    "num_traces": st.integers(1, 14),
    "budget_tokens": st.sampled_from([None, 1, 50, 200]),
    "budget_traces": st.sampled_from([None, 1, 3]),
    "islands": st.sampled_from([1, 1, 2, 5]),
})  # fmt: skip

CONSENSUS = [None, Consensus(None, 1), Consensus(0.7, 2)]
FIXED = [name for name in POLICY_OPTIONS if not name.startswith("gambit")]
with_policy = st.sampled_from(
    [(name, options_model(load_policy(name))(**given)) for name, ways in POLICY_OPTIONS.items() for given in ways]
)


@st.composite
def choices(draw):
    """Settings of any policy."""
    policy, policy_options = draw(with_policy)
    consensus = draw(st.sampled_from(CONSENSUS))
    return {**draw(options), "policy": policy, "policy_options": policy_options, "consensus": consensus}


all_options = choices()


def make(choice, swap):
    most = min(choice["capacity"], choice["num_traces"]) if choice["policy"] == "gambit" else 1
    islands = min(choice["islands"], most)
    return make_settings(**{**choice, "swap_size": min(swap, choice["capacity"]), "islands": islands})


PACKAGE = str(Path(gambit.__file__).parent)


@contextmanager
def counted():
    """Calls of Python functions of the package, and lines it runs: a loop over the pool shows in the lines."""
    counts = Counter()

    def trace(frame, kind, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        counts[kind] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counts
    finally:
        sys.settrace(before)


def plain(events):
    """A log without what differs between two runs, the events of one step in an order of their own."""
    found = []
    for event in events:
        record = json.loads(ev.to_json(event))
        if record["event"] in ("RunStarted", "Sample", "Waited"):
            continue
        if record["event"] == "Scored":
            rows = zip(record["traces"], record["scores"], record["num_tokens"], strict=True)
            found += [(record["step"], "Scored", json.dumps(row)) for row in rows]
        else:
            found.append((record.get("step", 1 << 40), record["event"], json.dumps(record)))
    return sorted(found)


SPREAD = (0.5,) * len(THOUGHTS)


def finished_view(trace: int, answer: str | None, score: float | None = None, **known: object) -> TraceView:
    """A trace that came to its own end, as a policy sees it."""
    return TraceView(trace, TraceState.FINISHED, score, 1, 10, 10, 10, True, answer=answer, **known)


def fallback(from_auc: float, islands: int, swap_size: int, warmup_tokens: int) -> tuple[float, PoolSettings]:
    """A pool that a doubting search may turn to, with the least AUC that it suits."""
    return from_auc, PoolSettings(islands, swap_size, 0, warmup_tokens)


POOLS = (fallback(0.6, 4, 4, 4), fallback(0.0, 8, 8, 6))


def doubt_of(spread=SPREAD, auc=0.9, pools=POOLS):
    return Doubt(auc, spread, is_probability=True, pools=pools)


def absorb(search: Search, batch: StepBatch) -> None:
    """Gives a search one engine step, as if others ran beside it."""
    search.is_waiting = False
    loop = SearchBatch(SimpleNamespace(step=lambda: batch))
    loop.running[search.number] = search
    loop.step()
