"""Forced answers, thinking budgets and loops, on the scripted engine."""

import itertools
import random
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gambit
from gambit import events as ev
from gambit.answers import AnswerKind
from gambit.config.options import SearchConfig
from gambit.policies.base import Force
from gambit.results.record import fold, replay_log
from gambit.search.limits import LOOP_REPEATS, LOOP_TOKENS, LOOP_WINDOW, loop_period
from gambit.solver import Solver
from gambit.solver.spread import SpreadSolver
from gambit.text.prompts import ends_of
from gambit.text.tokenizers import load_tokenizer
from gambit.tree import TraceState
from gambit.types import EndReason, Forcing, StopReason
from support.scripted import ScriptedEngine
from support.searching import all_options, check_ended, check_tree, make, make_settings, run_one, schedules
from support.tiny import CHAT_TEMPLATE, word_tokenizer

ANSWER, END = (1 << 30, (1 << 30) + 1), (1 << 30,)
AUTO = Forcing(ANSWER, END, answer_tokens=3, is_auto=True)


def forced(watched):
    return [event for event in watched.events if isinstance(event, ev.Forced)]


def check_replay(watched):
    """The log alone gives the same result, and what it says of forced traces is consistent."""
    again = fold([ev.from_json(ev.to_json(event)) for event in watched.events])
    check_ended(again.tree)
    assert again.tree.traces == watched.search.record.tree.traces
    for event in forced(watched):
        child, parent = again.tree.traces[event.trace], again.tree.traces[event.parent]
        assert parent.state is TraceState.PRUNED and parent.num_tokens == child.inherited
        if child.state is not TraceState.GHOST or child.own_tokens:
            assert child.own_tokens[: child.num_given] == event.given


# -- near limits -------------------------------------------------------------------------------------------------


def test_a_trace_near_its_limit_is_made_to_answer_and_votes():
    engine = ScriptedEngine(seed=1, finish_chance=0)
    watched = run_one(engine, make_settings("sc", max_new_tokens=40, forcing=AUTO))
    result, events = watched.search.result, forced(watched)
    assert len(events) == result.cuts.forced == 8 and {event.reason for event in events} == {"length"}
    assert result.counts.completed == 8 and result.counts.pruned == result.counts.branched == 0
    tree = watched.search.record.tree
    finished = [tree.traces[event.trace] for event in events]
    assert all(trace.inherited == 35 and trace.own_tokens[:2] == ANSWER for trace in finished)
    assert all(trace.num_tokens == 40 and trace.end_reason is EndReason.LENGTH for trace in finished)
    assert {vote.answer for vote in result.votes} == {str(trace.own_tokens[-1] % 3) for trace in finished}
    assert result.tokens.generated == watched.search.meter.num_generated == 8 * 38
    check_replay(watched)


def test_without_forcing_nothing_is_different_and_off_is_without_it():
    logs = []
    for forcing in (None, Forcing(ANSWER, END, is_auto=False)):
        watched = run_one(ScriptedEngine(seed=2), make_settings(max_new_tokens=40, forcing=forcing))
        logs.append([e for e in watched.events if not isinstance(e, ev.RunStarted | ev.Sample | ev.Waited)])
    assert logs[0] == logs[1]


@pytest.mark.parametrize("policy", ["sc", "gambit"])
def test_near_the_token_budget_all_answer_and_none_begins(policy):
    answered = {}
    for forcing in (None, AUTO):
        options = {"budget_tokens": 200, "num_traces": 16, "max_new_tokens": 500, "forcing": forcing}
        watched = run_one(ScriptedEngine(seed=3, finish_chance=0), make_settings(policy, **options))
        result = watched.search.result
        assert result.tokens.generated <= 200 and result.stop_reason is StopReason.BUDGET_TOKENS
        answered[forcing] = result.counts.completed
    assert answered == {None: 0, AUTO: 8}
    assert {event.reason for event in forced(watched)} == {"budget_tokens"}
    closing = min(event.step for event in forced(watched))
    assert not [e for e in watched.events if isinstance(e, ev.Created | ev.Branched) and e.step >= closing]
    check_replay(watched)


def test_near_the_time_budget_all_answer(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("gambit.search.limits.time.monotonic", lambda: next(clock) / 1000)
    options = {"budget_seconds": 3.0, "max_new_tokens": 10**6, "forcing": AUTO}
    watched = run_one(ScriptedEngine(seed=3, finish_chance=0), make_settings("sc", **options))
    assert {event.reason for event in forced(watched)} == {"budget_seconds"}
    assert watched.search.result.counts.completed == 8


def test_a_waiting_trace_ends_where_the_search_closes():
    engine = ScriptedEngine(seed=3, finish_chance=0, kv_tokens=60)
    watched = run_one(engine, make_settings("sc", budget_tokens=100, max_new_tokens=500, forcing=AUTO))
    result = watched.search.result
    assert result.counts.completed == len(forced(watched)) > 0 and result.counts.cancelled == 0
    assert result.counts.pruned == 8 - result.counts.completed > 0
    check_replay(watched)


def test_a_policy_may_force_an_answer():
    @dataclass
    class Impatient:
        policy: object

        def __getattr__(self, name):
            return getattr(self.policy, name)

        def decide(self, state, view):
            state, decisions = self.policy.decide(state, view)
            late = [trace.id for trace in view.traces if trace.num_tokens >= 10]
            return state, [*decisions, *(Force(trace, "impatience", (5, 6), max_tokens=4) for trace in late)]

    watched = run_one(ScriptedEngine(seed=4, finish_chance=0), make_settings(), wrap=Impatient)
    assert {(event.reason, event.given) for event in forced(watched)} == {("impatience", (5, 6))}
    assert watched.search.record.tree.traces[forced(watched)[0].trace].num_own_tokens == 6
    check_replay(watched)


# -- thinking budgets --------------------------------------------------------------------------------------------


def test_no_trace_thinks_longer_than_its_budget_inherited_tokens_counted():
    forcing = Forcing(ANSWER, END, thinking_tokens=20)
    engine = ScriptedEngine(seed=5, finish_chance=0, thought_chance=0.4)
    watched = run_one(engine, make_settings(max_new_tokens=50, forcing=forcing))
    tree, events = watched.search.record.tree, forced(watched)
    assert any(isinstance(event, ev.Branched) for event in watched.events)
    assert events and {(event.reason, event.inherited, event.given) for event in events} == {("thinking", 20, END)}
    for trace in tree.traces:
        assert trace.boundary_tokens <= 20  # no thought after it has a score
        assert trace.num_given or trace.num_tokens <= 20
        assert trace.state is not TraceState.FINISHED or trace.num_tokens == 50
    check_replay(watched)


# -- loops -------------------------------------------------------------------------------------------------------


@given(st.integers(1, LOOP_WINDOW // LOOP_REPEATS), st.integers(0, 10**6), st.integers(0, 500))
def test_a_passage_that_is_repeated_often_enough_is_found(period, seed, before):
    rng = random.Random(seed)
    passage = [rng.randrange(10**6) for _ in range(period)]
    times = max(LOOP_REPEATS, -(-LOOP_TOKENS // period))
    start = [rng.randrange(10**6) for _ in range(before)]
    found = loop_period(start + passage * times)
    assert found is not None and period % found == 0
    assert loop_period(start + passage * (LOOP_REPEATS - 1)) in (None, found)
    assert loop_period([*start, *passage * times, -1]) is None


@given(st.lists(st.integers(0, 3), max_size=600))
def test_a_loop_is_what_a_slow_search_finds(tokens):
    def is_loop(period):
        length = max(LOOP_REPEATS * period, LOOP_TOKENS)
        tail = tokens[-length:]
        return len(tail) == length and all(a == b for a, b in zip(tail, tail[period:], strict=False))

    assert loop_period(tokens) == next((p for p in range(1, LOOP_WINDOW // LOOP_REPEATS + 1) if is_loop(p)), None)


class LoopingEngine(ScriptedEngine):
    """Odd traces repeat ten tokens for ever."""

    def step(self):
        batch = super().step()
        for key, trace in self.running.items():
            if key.trace % 2 and not trace.spec.given:
                trace.tokens[-1] = len(trace.tokens) % 10
        return batch


@pytest.mark.parametrize("forcing", [None, AUTO])
def test_a_trace_in_a_loop_ends_or_answers_and_is_counted(forcing):
    engine = LoopingEngine(seed=6, finish_chance=0)
    watched = run_one(engine, make_settings("sc", capacity=4, num_traces=6, max_new_tokens=400, forcing=forcing))
    result, tree = watched.search.result, watched.search.record.tree
    looped = [trace for trace in tree.traces if trace.end_reason is EndReason.LOOP]
    if forcing is None:
        assert [trace.id for trace in looped] == [1, 3, 5] and all(trace.ended_step % 64 == 0 for trace in looped)
        assert not forced(watched)
    else:
        assert not looped and sum(event.reason == "loop" for event in forced(watched)) == 3
    assert result.cuts.looped == 3 and result.counts.completed == 6
    check_replay(watched)


# -- always ------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(schedules, all_options, st.integers(1, 6), st.booleans(), st.sampled_from([None, 3, 15]))
def test_invariants_hold_whatever_is_forced(schedule, choice, swap, is_auto, thinking):
    wanted = make({**choice, "forcing": Forcing(ANSWER, END, 3, is_auto, thinking)}, swap)
    watched = run_one(ScriptedEngine(**schedule), wanted, check=lambda search, event: check_tree(search.record.tree))
    tree, result = watched.search.record.tree, watched.search.result
    counts = result.counts
    ended = counts.pruned + counts.completed + counts.cancelled + counts.ghosts
    assert counts.roots + counts.branched == ended
    assert result.tokens.generated == watched.search.meter.num_generated
    if wanted.budget_tokens is not None:
        assert result.tokens.generated <= wanted.budget_tokens
    if thinking is not None and thinking < wanted.max_new_tokens - 1:
        assert all(trace.num_given or trace.num_tokens <= thinking for trace in tree.traces)
    check_replay(watched)


# -- with a model ------------------------------------------------------------------------------------------------

PUZZLE = "a = 17; b = 61; c = a * b; d = c - a; e = d * b; f = e + c; f?"


@pytest.mark.contract
def test_a_model_writes_the_answer_that_it_was_forced_to_and_parts_do_it_as_the_whole(tmp_path):
    config = SearchConfig(policy="sc", capacity=8, thinking_tokens=24, force_answers="auto", seed=3)
    with Solver("pawn") as alone, Solver("pawn") as other:
        result = alone.solve(PUZZLE, config, out_dir=tmp_path / "run")
        spread = SpreadSolver([alone, other]).solve(PUZZLE, config, out_dir=tmp_path / "spread")
    assert result.cuts.forced == 8 and result.counts.completed == 8 and not result.num_abstained
    assert (spread.votes, spread.cuts, spread.tokens) == (result.votes, result.cuts, result.tokens)
    for folder in ("run", "spread"):
        again = replay_log(tmp_path / folder / "events.jsonl", str.__eq__)
        assert again.finding is None and again.result.votes == result.votes and again.result.cuts == result.cuts


@pytest.mark.contract
def test_a_model_without_a_think_block_has_no_thinking_budget(tiny_folder):
    config = SearchConfig(capacity=1, max_new_tokens=20, thinking_tokens=5, enable_thinking=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Solver(str(tiny_folder), device="cpu") as solver:
            solver._parts.engine.tokenizer.chat_template = CHAT_TEMPLATE
            result = solver.solve("1+1", config)
    assert any("thinking_tokens has no effect" in note for note in result.warnings) and not result.cuts.forced


def test_an_answer_begins_as_its_kind_and_the_vocabulary_allow():
    pawn = load_tokenizer(str(Path(gambit.__file__).parent / "pawn" / "model"))
    answer, end = ends_of(pawn, AnswerKind.BOXED, thinks=True)
    assert pawn.decode(answer) == "</think>\n\\boxed{" and pawn.decode(end) == "</think>"
    assert pawn.decode(ends_of(pawn, AnswerKind.CHOICE, thinks=False)[0]) == "\n"
    words = word_tokenizer()
    assert words.decode(ends_of(words, AnswerKind.BOXED, thinks=True)[0]) == "</think>\n\nThe final answer is \\boxed{"
    answer, end = ends_of(words, AnswerKind.CHOICE, thinks=False)
    assert words.decode(answer) == "\n\nThe answer is (" and end == ()
