"""Whose scores count in the loop: a verifier's for as long as there is one, then the engine's own."""

import dataclasses
import math
import threading
import time

import pytest

from gambit import events as ev
from gambit.errors import EngineError
from gambit.policies.base import Requirements, ScoreUse, Start, Wake
from gambit.results.vote import Consensus
from gambit.search.loop import Search, SearchBatch
from gambit.search.scores import VerifierUse
from gambit.types import (
    EndReason,
    OnPressure,
    PressureAction,
    SearchStep,
    StopReason,
    ThoughtScore,
    TraceEnd,
    TraceKey,
)
from gambit.verifiers.base import Question, VerifierThread
from support.scripted import DyingVerifier, FunctionVerifier, HeldVerifier, PuppetEngine, admit
from support.searching import absorb, make_search, make_settings, run_one, run_searches

SETTINGS = {"capacity": 3, "swap_size": 1, "check_interval": 2, "warmup_tokens": 1}
SCORES = {0: 0.9, 1: 0.5, 2: 0.2, 3: 0.8, 4: 0.7}  # the verifier's, by trace; the engine thinks the opposite


def thoughts(length, *traces):
    return tuple(ThoughtScore(trace, 1 - SCORES[trace], length) for trace in traces)


def ends(*traces, length):
    return tuple(TraceEnd(trace, EndReason.STOP, (7,) * (length - 1) + (1,)) for trace in traces)


def story():
    """Thoughts end at the second and fourth token; in the tournaments after them the worst trace loses its place."""
    return [
        SearchStep(admitted=admit(0, 1, 2), num_generated=3),
        SearchStep(num_generated=3, scored=thoughts(2, 0, 1, 2)),
        SearchStep(admitted=admit(3, reused=2), num_generated=3),  # for 2
        SearchStep(num_generated=3, scored=thoughts(4, 0, 1, 3)),
        SearchStep(admitted=admit(4, reused=4), num_generated=3),  # for 1
        SearchStep(num_generated=3, finished=ends(0, 3, 4, length=6)),
    ]


def short_story():
    """One thought, and answers before any tournament."""
    return [
        SearchStep(admitted=admit(0, 1, 2), num_generated=3),
        SearchStep(num_generated=3, scored=thoughts(2, 0, 1, 2)),
        SearchStep(num_generated=3, finished=ends(0, 1, length=3)),
        SearchStep(num_generated=1, finished=ends(2, length=4)),
    ]


def driven(search):
    """To its stop; its vote is still to be taken."""
    search.begin()
    while not search.is_stopped:
        batch = search._engine.step()
        absorb(search, batch)
    return search


@pytest.fixture
def verifier():
    """Makes the use of a verifier, and ends its thread."""
    threads = []

    def use(reader, **options):
        threads.append(VerifierThread(lambda: reader))
        return VerifierUse(threads[-1], Question((), (1, 2, 3)), lambda tokens: "x" * len(tokens), **options)

    yield use
    for thread in threads:
        thread.close()


def by_trace(reading):
    return SCORES[reading.key.trace]


def of(kind, watched):
    return [event for event in watched.events if isinstance(event, kind)]


def test_a_tournament_goes_by_the_verifier_and_the_engine_is_told(verifier):
    engine = PuppetEngine(story())
    watched = run_one(engine, make_settings(**SETTINGS), verifier=verifier(FunctionVerifier(by_trace)))
    assert not of(ev.Scored, watched), "the engine's own scores are kept back"
    pruned, branched = of(ev.Pruned, watched)[0], of(ev.Branched, watched)[0]
    assert (pruned.trace, pruned.score, branched.parent) == (2, 0.2, 0)
    first, second, *_ = engine.scores_set
    assert first == {TraceKey(1, 0): 0.9, TraceKey(1, 1): 0.5, TraceKey(1, 2): 0.2}
    assert second == pytest.approx({TraceKey(1, 0): 0.9, TraceKey(1, 1): 0.5, TraceKey(1, 3): (0.9 + 0.8) / 2})
    verified = of(ev.Verified, watched)
    assert [event.step for event in verified[:2]] == [2, 4]
    assert verified[0].traces == (0, 1, 2) and verified[0].ended_steps == (2, 2, 2)
    assert verified[0].engine_scores == pytest.approx((0.1, 0.5, 0.8))


def test_a_child_begins_with_what_both_make_of_its_parent(verifier):
    engine = PuppetEngine(story())
    run_one(engine, make_settings(**SETTINGS), verifier=verifier(FunctionVerifier(by_trace)))
    child = engine.submitted[3]
    assert (child.parent, child.inherited, child.eviction_score) == (TraceKey(1, 0), 2, 0.9)
    assert (child.score.count, child.score.total) == (1, pytest.approx(0.1)), "the engine goes on with its own scores"


def test_without_a_verifier_a_child_has_no_rank():
    engine = PuppetEngine(story())
    watched = run_one(engine, make_settings(**SETTINGS, budget_tokens=8))
    child = engine.submitted[3]
    assert (child.parent, child.eviction_score, child.score.count) == (TraceKey(1, 2), None, 1)
    assert not engine.scores_set and not of(ev.Verified, watched) and of(ev.Scored, watched)[0].step == 2


def test_the_vote_has_the_scores_of_the_answers(verifier):
    reader = FunctionVerifier(by_trace)
    settings = make_settings(**{**SETTINGS, "check_interval": 99})
    watched = run_one(PuppetEngine(short_story()), settings, verifier=verifier(reader))
    stopped, verified, totals, voted = watched.events[-4:]
    assert isinstance(stopped, ev.Stopped) and isinstance(verified, ev.Verified) and isinstance(voted, ev.Voted)
    assert verified.step == 4 and sorted(zip(verified.traces, verified.num_tokens, strict=True)) == [
        (0, 2), (1, 2), (2, 2), (2, 3),
    ]  # fmt: skip
    assert (totals.step, totals.thoughts, totals.tokens, totals.lost) == (4, 4, 5, None)


def test_an_optional_verifier_that_is_lost_gives_way_to_the_engines_scores(verifier):
    steps = story()
    steps[4] = dataclasses.replace(steps[4], scored=thoughts(5, 3))
    engine = PuppetEngine(steps)
    use = verifier(DyingVerifier(by_trace, lives=3), is_optional=True)
    watched = run_one(engine, make_settings(**SETTINGS), verifier=use)
    result = watched.search.result
    assert result.stop_reason is StopReason.COMPLETED and "out of breath" in result.verifier.lost
    second = of(ev.Verified, watched)[1]
    assert second.scores == second.engine_scores == pytest.approx((0.1, 0.5, 0.2))
    assert engine.scores_set[1] == pytest.approx({TraceKey(1, 0): 0.5, TraceKey(1, 1): 0.5, TraceKey(1, 3): 0.55})
    (scored,) = of(ev.Scored, watched)
    assert (scored.step, scored.traces, scored.num_tokens) == (5, (3,), (5,)) and scored.scores == pytest.approx((0.2,))
    assert engine.scores_set[2] == pytest.approx({TraceKey(1, 3): (0.9 + 0.2 + 0.2) / 3}), "told as soon as it is known"


def test_children_of_a_search_without_its_verifier_begin_with_the_engines_scores(verifier):
    steps = story()
    steps[4] = dataclasses.replace(steps[4], scored=thoughts(5, 3, 4))
    steps[5:] = [SearchStep(num_generated=3, scored=thoughts(6, 0)), SearchStep(admitted=admit(5, reused=6))]
    engine = PuppetEngine(steps)
    use = verifier(DyingVerifier(by_trace, lives=3), is_optional=True)
    run_one(engine, make_settings(**SETTINGS, budget_tokens=20), verifier=use)
    child = engine.submitted[5]
    own = {0: (0.1, 0.1, 0.1), 3: (0.1, 0.2, 0.2), 4: (0.1, 0.2, 0.3)}[child.parent.trace]
    assert child.inherited == 6 and (child.score.count, child.score.total) == (3, pytest.approx(sum(own)))


def test_a_verifier_lost_at_the_vote_fails_the_search_and_leaves_a_log_with_an_end(verifier):
    reader = DyingVerifier(by_trace, lives=3)  # the thoughts, and none of the answers
    settings = make_settings(**{**SETTINGS, "check_interval": 99})
    watched = make_search(PuppetEngine(short_story()), settings, verifier=verifier(reader))
    search = driven(watched.search)
    result = search.conclude()
    assert isinstance(search.failure, EngineError) and "out of breath" in result.error
    assert result.stop_reason is StopReason.COMPLETED and isinstance(watched.events[-1], ev.Voted)


def test_a_search_that_has_failed_does_not_wait_for_scores(verifier):
    reader = HeldVerifier(by_trace)
    watched = make_search(PuppetEngine(short_story()), make_settings(check_interval=99), verifier=verifier(reader))
    search = watched.search
    search.begin()
    search.fail(RuntimeError("a callback of the caller's"))
    result = search.conclude()
    reader.go.set()
    assert result.error == "RuntimeError: a callback of the caller's" and not of(ev.Verified, watched)
    assert isinstance(watched.events[-2], ev.VerifierTotals) and not reader.seen


def test_a_hurried_vote_waits_for_no_score(verifier):
    reader = HeldVerifier(by_trace)
    settings = make_settings(**{**SETTINGS, "check_interval": 99})
    watched = make_search(PuppetEngine(short_story()), settings, verifier=verifier(reader))
    result = driven(watched.search).conclude(is_hurried=True)
    reader.go.set()
    assert result.verifier.thoughts == 0 and not of(ev.Verified, watched)


def test_a_look_at_the_vote_collects_the_scores_it_weighs_by(verifier):
    """Self-consistency with votes by score: nobody asks for scores before a trace completes."""
    settings = make_settings("sc", capacity=3, check_interval=3, consensus=Consensus(0.9, 2))
    watched = run_one(
        PuppetEngine(short_story()),
        settings,
        verifier=verifier(FunctionVerifier(by_trace)),
        answer_of=lambda tokens: "same",
    )
    result = watched.search.result
    assert result.stop_reason is StopReason.CONSENSUS and result.votes[0].weight == pytest.approx(1.4)
    assert [event.step for event in of(ev.Verified, watched)] == [3]


class Sleeping:
    """Starts three traces and decides nothing after that."""

    def __init__(self, requirements, wake=Wake()):  # noqa: B008
        self.requirements, self.wake = requirements, wake

    def initial_state(self):
        return False

    def decide(self, state, view):
        return True, [] if state else [Start(3, OnPressure(PressureAction.GHOST))]

    def __call__(self, policy):
        return self


@pytest.mark.parametrize(("use", "steps"), [(ScoreUse.ALWAYS, [2, 4]), (ScoreUse.NEVER, [4])])
def test_scores_are_recorded_at_every_interval_also_where_the_policy_sleeps(verifier, use, steps):
    settings = make_settings(capacity=3, check_interval=2)
    reader = verifier(FunctionVerifier(by_trace))
    watched = run_one(PuppetEngine(short_story()), settings, verifier=reader, wrap=Sleeping(Requirements(scores=use)))
    assert [event.step for event in of(ev.Verified, watched)] == steps, "and for the vote"


@pytest.mark.parametrize(
    ("wake", "steps"),
    [
        (Wake(on_boundary=True), [2, 4]),
        (Wake(on_completion=True), [4]),
        (Wake(every_steps=3), [3, 4]),
        (Wake(every_steps=3, on_completion=True), [3, 4]),
    ],
)
def test_a_policy_that_looks_at_scores_in_rounds_does_not_wait_for_them_at_a_completion(verifier, wake, steps):
    policy = Sleeping(Requirements(scores=ScoreUse.ROUNDS), wake)
    settings = make_settings(capacity=3, check_interval=99)
    watched = run_one(PuppetEngine(short_story()), settings, verifier=verifier(FunctionVerifier(by_trace)), wrap=policy)
    assert [event.step for event in of(ev.Verified, watched)] == steps


def test_nobody_waits_for_scores_that_the_vote_does_not_weigh(verifier):
    settings = make_settings("sc", capacity=3, check_interval=99, consensus=Consensus(0.9, 2))
    use = verifier(FunctionVerifier(by_trace))
    watched = run_one(
        PuppetEngine(short_story()), settings, verifier=use, vote="majority", answer_of=lambda tokens: "same"
    )
    stopped = watched.events.index(of(ev.Stopped, watched)[0])
    assert all(watched.events.index(event) > stopped for event in of(ev.Verified, watched))


def test_the_engine_must_have_been_told_of_the_verifier(verifier):
    use = verifier(FunctionVerifier(by_trace))
    it = make_search(PuppetEngine([]), make_settings(**SETTINGS)).search
    with pytest.raises(AssertionError, match=r"^the engine would evict by its own scores$"):
        Search(it._engine, it.policy, it._settings, it._spec, it.record.started, it._callbacks, use)


def test_waiting_for_the_verifier_is_no_work_of_the_searchs_own(verifier):
    watched = run_one(PuppetEngine(story()), make_settings(**SETTINGS), verifier=verifier(FunctionVerifier(by_trace)))
    sample = of(ev.Sample, watched)[-1]
    assert 0 <= sample.seconds_search < sample.seconds_total < math.inf


# -- between rounds of traces ----------------------------------------------------------------------------------


def two_rounds():
    """Two traces that end, then two more; an answer each."""
    return [
        SearchStep(admitted=admit(0, 1), num_generated=2),
        SearchStep(num_generated=2, finished=ends(0, 1, length=2)),
        SearchStep(admitted=admit(2, 3), num_generated=2),
        SearchStep(num_generated=2, finished=ends(2, 3, length=2)),
    ]


ROUNDS = {"capacity": 4, "first_traces": 2, "consensus": Consensus(0.9, 2), "is_probability": True}


def in_rounds(use, steps=None, number=1, **options):
    return make_search(PuppetEngine(steps or two_rounds()), make_settings("sc", **ROUNDS, **options), verifier=use,
                       number=number, answer_of=lambda tokens: "same")  # fmt: skip


def test_between_rounds_a_search_waits_while_others_go_on(verifier):
    """The vote decides whether there is another round, and its scores are still to come."""
    reader = HeldVerifier(by_trace)
    search = in_rounds(verifier(reader)).search
    search.begin()
    for _ in range(2):
        batch = search._engine.step()
        absorb(search, batch)
    assert search.is_waiting and not search.is_stopped
    for _ in range(3):  # engine steps of other searches
        absorb(search, dataclasses.replace(batch, searches={}))
    assert search.is_waiting and len(search._engine.submitted) == 2
    reader.go.set()
    search.pool.scores._awaited[-1].score.result(60)
    absorb(search, dataclasses.replace(batch, searches={}))
    assert not search.is_waiting and len(search._engine.submitted) == 4, "1.4 of 1.9 is no nine tenths"


def test_where_all_wait_the_engine_is_not_asked_for_steps(verifier):
    reader = HeldVerifier(by_trace)
    search = in_rounds(verifier(reader)).search
    batch = SearchBatch(search._engine)
    batch.add(search)
    while not search.is_waiting:
        batch.step()
    before = search._engine.at
    threading.Timer(0.05, reader.go.set).start()
    batch.step()
    assert not search.is_waiting and search._engine.at == before, "it has waited instead"
    while batch.running:
        batch.step()
    assert search.conclude().counts.completed == 4


@pytest.mark.parametrize("share", [0.7, 0.9])
def test_how_fast_a_verifier_is_changes_nothing(verifier, share):
    def result(pause):
        reader = HeldVerifier(by_trace, lambda: time.sleep(pause))
        settings = make_settings("sc", **{**ROUNDS, "consensus": Consensus(share, 2)})
        watched = run_one(PuppetEngine(two_rounds()), settings, verifier=verifier(reader),
                          answer_of=lambda tokens: "same")  # fmt: skip
        return watched.search.result.votes, watched.search.result.stop_reason

    assert result(0.0) == result(0.03)
    assert result(0.0)[0][0].traces == (2 if share == 0.7 else 4), "1.4 of 1.9, or 2.4 of 2.9"


def test_a_verifier_lost_between_rounds_fails_the_search(verifier):
    watched = in_rounds(verifier(DyingVerifier(by_trace, lives=1)))
    with pytest.raises(EngineError, match="out of breath"):
        list(run_searches(watched.search._engine, [watched.search]))
    assert watched.search.failure is not None and isinstance(watched.events[-1], ev.Voted)


def test_a_time_budget_ends_the_wait(verifier):
    reader = HeldVerifier(by_trace)
    watched = in_rounds(verifier(reader), budget_seconds=0.2)
    [search] = run_searches(watched.search._engine, [watched.search])
    reader.go.set()
    assert search.result.stop_reason is StopReason.BUDGET_SECONDS and search.result.counts.completed == 2


def test_of_traces_that_only_vote_nothing_but_the_ends_is_read(verifier):
    reader, all_read = FunctionVerifier(by_trace), FunctionVerifier(by_trace)
    results = [
        run_one(PuppetEngine(short_story()), make_settings("sc", capacity=3), verifier=verifier(each, only_ends=only))
        for each, only in ((reader, True), (all_read, False))
    ]
    assert [len(reading.thoughts) for reading in reader.seen] == [1, 1, 2], "the third says something after its thought"
    assert len(all_read.seen) == 4
    ours, theirs = (watched.search.result for watched in results)
    assert ours.votes == theirs.votes and ours.verifier.thoughts == 3
    at_end = {reading.key.trace: reading for reading in all_read.seen}
    for reading in reader.seen:
        assert at_end[reading.key.trace] == reading, "the same text, cut alike"


def test_a_trace_that_ends_with_a_thought_is_read_too(verifier):
    steps = [
        SearchStep(admitted=admit(0, 1, 2), num_generated=3),
        SearchStep(num_generated=3, scored=thoughts(2, 0, 1, 2), finished=ends(0, 1, 2, length=3)),
    ]
    reader = FunctionVerifier(by_trace)
    watched = run_one(PuppetEngine(steps), make_settings("sc", capacity=3), verifier=verifier(reader, only_ends=True))
    assert len(reader.seen) == 3 and watched.search.result.votes[0].weight == pytest.approx(1.6)


def test_the_wait_for_a_verifier_is_in_its_account(verifier):
    use = verifier(HeldVerifier(by_trace, lambda: time.sleep(0.01)))
    watched = run_one(PuppetEngine(story()), make_settings(**SETTINGS), verifier=use)
    (totals,) = of(ev.VerifierTotals, watched)
    scores = watched.search.pool.scores
    assert totals.seconds_waited == scores.seconds_waited == watched.search.result.verifier.seconds_waited > 0
    assert 0 <= totals.seconds_for_vote < totals.seconds_waited, "tournaments have waited too"


def test_a_policy_sees_the_late_score_of_a_trace_that_is_complete(verifier):
    seen = []

    class Watching(Sleeping):
        def decide(self, state, view):
            seen.append((view.step, {trace.id: trace.score for trace in view.finished}))
            return super().decide(state, view)

    policy = Watching(Requirements(scores=ScoreUse.ROUNDS), Wake(every_steps=3))
    settings = make_settings(capacity=3, check_interval=99)
    run_one(PuppetEngine(short_story()), settings, verifier=verifier(FunctionVerifier(by_trace)), wrap=policy)
    assert (3, {0: 0.9, 1: 0.5}) in seen
