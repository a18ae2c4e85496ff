"""Every invariant of the method, over random schedules of scores, completions, evictions, waiting and budgets."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from gambit import events as ev
from gambit.results.record import fold
from gambit.tree import TraceState
from gambit.types import StopReason
from support.scripted import ScriptedEngine
from support.searching import (
    FIXED,
    all_options,
    check_ended,
    check_tree,
    make,
    options,
    run_one,
    schedules,
)


@settings(max_examples=300)
@given(schedules, all_options, st.integers(1, 6))
def test_invariants_hold_after_every_event_and_at_the_end(schedule, choice, swap):
    engine = ScriptedEngine(**schedule)
    wanted = make(choice, swap)
    watched = run_one(engine, wanted, check=lambda search, event: check_tree(search.record.tree))
    tree, result = watched.search.record.tree, watched.search.result
    check_ended(tree)
    ends = (TraceState.FINISHED, TraceState.PRUNED, TraceState.GHOST, TraceState.CANCELLED)
    assert sum(tree.count(state) for state in ends) == len(tree.traces)
    counts = result.counts
    active_at_stop = counts.cancelled + counts.ghosts
    assert counts.roots + counts.branched == counts.pruned + counts.completed + active_at_stop
    if wanted.policy == "step" or (wanted.policy == "gambit" and wanted.pool.islands == 1):
        assert engine.num_preempted == 0
    if wanted.policy in FIXED:
        assert counts.roots <= wanted.num_traces and not counts.branched and not counts.evicted
    if wanted.policy == "slim-sc":
        assert counts.pruned < counts.roots  # one is always left
    assert counts.discarded <= counts.completed and (wanted.policy == "deepconf" or not counts.discarded)
    assert not len(engine.tracks)
    assert not engine.running and not engine.waiting


@settings(max_examples=200)
@given(schedules, all_options, st.integers(1, 6))
def test_tokens_are_what_the_engine_emitted_and_the_ledger_adds_up(schedule, choice, swap):
    engine = ScriptedEngine(**schedule)
    watched = run_one(engine, make(choice, swap))
    tree, result = watched.search.record.tree, watched.search.result
    emitted = {key.trace: tuple(tokens) for key, tokens in engine.emitted.items()}
    for trace in tree.traces:
        assert trace.own_tokens == emitted.get(trace.id, ())  # a ghost, a pruned or a finished trace says nothing more
        assert len(tree.tokens_of(trace.id)) == trace.num_tokens
        if trace.parent is not None:
            assert tree.tokens_of(trace.id)[: trace.inherited] == tree.tokens_of(trace.parent)[: trace.inherited]
    assert result.tokens.generated == sum(map(len, emitted.values())) == watched.search.meter.num_generated
    admitted = [trace for trace in tree.traces if trace.num_admissions]
    inherited = sum(trace.inherited for trace in admitted)
    first_recomputed = sum(trace.inherited - trace.reused for trace in admitted)
    lengths = sum(trace.num_tokens for trace in admitted)
    assert result.tokens.generated + result.tokens.reused + first_recomputed == lengths
    assert result.tokens.reused + first_recomputed == inherited


@settings(max_examples=200)
@given(schedules, all_options, st.integers(1, 6))
def test_budgets_are_kept_and_named(schedule, choice, swap):
    wanted = make(choice, swap)
    result = run_one(ScriptedEngine(**schedule), wanted).search.result
    if wanted.budget_tokens is not None:
        assert result.tokens.generated <= wanted.budget_tokens
    if result.stop_reason is StopReason.BUDGET_TRACES:
        assert result.counts.completed >= wanted.budget_traces
    if result.stop_reason is StopReason.COMPLETED:
        assert result.counts.completed >= wanted.num_traces
    if result.stop_reason is StopReason.EXHAUSTED:
        assert result.counts.cancelled == 0


@settings(max_examples=200)
@given(schedules, options, st.integers(1, 6))
def test_a_full_round_leaves_the_pool_at_capacity(schedule, choice, swap):
    """Case 2: the tree view is as large after the round as before it; every pair gains, and none is both."""
    wanted = make({**choice, "policy": "gambit", "islands": 1}, swap)
    rounds: dict[int, list[ev.Event]] = {}
    branched_at: dict[int, float] = {}  # child -> its parent's score at that moment

    def watch(search, event):
        if isinstance(event, ev.Branched):
            branched_at[event.trace] = search.record.tree.score_of(search.record.tree.traces[event.trace]) or 0.0
        if isinstance(event, ev.Branched) or (isinstance(event, ev.Pruned) and event.reason == "tournament"):
            rounds.setdefault(event.step, []).append(event)
            if isinstance(event, ev.Branched) and any(isinstance(e, ev.Pruned) for e in rounds[event.step]):
                pruned, branched = split(rounds[event.step])
                missing = len(pruned) - len(branched)
                assert search.record.tree.num_active == wanted.capacity - missing

    def split(round_):
        return [e for e in round_ if isinstance(e, ev.Pruned)], [e for e in round_ if isinstance(e, ev.Branched)]

    run_one(ScriptedEngine(**schedule), wanted, check=watch)
    for step, round_ in rounds.items():
        pruned, branched = split(round_)
        assert step % wanted.pool.check_interval == 0
        assert len({e.parent for e in branched}) == len(branched), "one child per parent and round"
        if pruned:
            assert len(pruned) == len(branched) <= wanted.pool.swap_size
            assert not {e.trace for e in pruned} & {e.parent for e in branched}
            for victim, child in zip(pruned, branched, strict=True):
                assert branched_at[child.trace] > (victim.score or 0.0)


@settings(max_examples=150)
@given(schedules, all_options, st.integers(1, 6))
def test_replaying_the_log_gives_the_same_tree_and_answer(schedule, choice, swap):
    watched = run_one(ScriptedEngine(**schedule), make(choice, swap))
    lines = [ev.to_json(event) for event in watched.events]
    record = fold(map(ev.from_json, lines))
    live = watched.search
    assert record.tree.traces == live.record.tree.traces
    replayed = record.result(record.vote(lambda a, b: a == b))
    assert replayed == dataclasses.replace(live.result, error=None)
    assert record.voted.answer == replayed.answer


@settings(max_examples=100)
@given(schedules, options, st.integers(1, 6))
def test_victims_of_pressure_are_the_lowest_scoring_of_their_moment(schedule, choice, swap):
    """Recomputed from the log by independent code: scored before unscored, lowest mean first, youngest on a tie."""
    schedule = {**schedule, "kv_tokens": min(schedule["kv_tokens"], 120)}
    watched = run_one(ScriptedEngine(**schedule), make({**choice, "policy": "gambit", "islands": 1}, swap))
    scores: dict[int, list[float]] = {}
    running: set[int] = set()
    for event in watched.events:
        match event:
            case ev.Branched(trace=child, parent=parent):
                scores[child] = list(scores.get(parent, []))
            case ev.Admitted(trace=trace):
                running.add(trace)
            case ev.Scored(traces=traces, scores=values):
                for trace, value in zip(traces, values, strict=True):
                    scores.setdefault(trace, []).append(value)
            case ev.Evicted(trace=trace, reason="pressure"):
                means = {t: sum(scores[t]) / len(scores[t]) for t in running if scores.get(t)}
                expected = min(means, key=lambda t: (round(means[t], 9), -t)) if means else max(running)
                assert trace == expected or abs(means[trace] - means[expected]) < 1e-9
                running.discard(trace)
            case (
                ev.Evicted(trace=trace) | ev.Pruned(trace=trace) | ev.Finished(trace=trace) | ev.Cancelled(trace=trace)
            ):
                running.discard(trace)
