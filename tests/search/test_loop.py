"""The loop: ends, budgets, failures, interruptions, ghosts as parents, and the log on disk."""

import dataclasses
import itertools
import json
import math
import time

import pytest

from gambit import events as ev
from gambit.config.presets import SearchPart
from gambit.errors import EngineError, UserError
from gambit.policies.base import Branch, Discard, Evict, Prune, SplitIslands, Start, Stop, Wake
from gambit.results.record import fold, replay
from gambit.results.vote import Consensus
from gambit.search import limits
from gambit.search.limits import CHECK_SECONDS
from gambit.types import (
    Admission,
    EndReason,
    Eviction,
    OnPressure,
    PoolSettings,
    PressureAction,
    Sampling,
    SearchStep,
    StepSeconds,
    StopReason,
    StopRule,
    ThoughtScore,
    TraceEnd,
    TraceKey,
)
from support.scripted import PuppetEngine, ScriptedEngine, admit
from support.searching import absorb, check_ended, make_search, make_settings, run_one, run_searches


def endless(**options):
    return ScriptedEngine(finish_chance=0.0, **options)


def test_it_ends_when_the_planned_traces_are_complete():
    result = run_one(ScriptedEngine(seed=3), make_settings(capacity=8)).search.result
    assert result.stop_reason is StopReason.COMPLETED and result.counts.completed >= 8


def test_it_ends_when_nothing_runs_any_more():
    engine = ScriptedEngine(seed=1, thought_chance=0.0)  # nobody is ever ranked, so nobody branches
    result = run_one(engine, make_settings(capacity=4, num_traces=9, warmup_tokens=1000)).search.result
    assert result.stop_reason is StopReason.EXHAUSTED and result.counts.completed == 4


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ({"budget_tokens": 100}, StopReason.BUDGET_TOKENS),
        ({"budget_traces": 2}, StopReason.BUDGET_TRACES),
        ({"budget_seconds": 1e-9}, StopReason.BUDGET_SECONDS),
    ],
)
def test_a_budget_ends_it_with_the_best_vote_so_far_and_its_name(budget, reason):
    engine = ScriptedEngine(seed=2, finish_chance=0.06)
    result = run_one(engine, make_settings(capacity=8, max_new_tokens=500, **budget)).search.result
    assert result.stop_reason is reason
    assert result.tokens.generated <= budget.get("budget_tokens", 10**9)
    if result.counts.completed:
        assert result.answer is not None


def test_the_searchs_own_seconds_add_up(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # one second between any two looks
    events = run_one(ScriptedEngine(seed=3), make_settings(capacity=4)).events
    seconds = [event.seconds_search for event in events if isinstance(event, ev.Sample)]
    assert seconds == sorted(seconds) and seconds[-1] >= len(seconds) - 1 > 2


def test_a_time_budget_covers_the_vote():
    deadlines = []

    def equivalent_until(deadline):
        deadlines.append(deadline)
        return str.__eq__

    engine, began = ScriptedEngine(seed=2, finish_chance=0.06), time.monotonic()
    run_one(engine, make_settings(budget_seconds=1000.0), equivalent_until=equivalent_until)
    run_one(engine, make_settings(), number=2, equivalent_until=equivalent_until)
    limited, unlimited = deadlines
    assert began + 1000.0 <= limited <= time.monotonic() + 1000.0 and unlimited == math.inf


def test_a_part_of_a_time_budget_is_kept_for_the_vote():
    assert limits.until_vote(10.0) == 9.0 and limits.until_vote(1000.0) == 995.0


def test_a_look_at_the_vote_holds_up_the_engine_for_a_moment_only():
    looks = []

    def equivalent_until(deadline):
        looks.append(deadline - time.monotonic())
        return str.__eq__

    settings = make_settings(capacity=4, num_traces=12, consensus=Consensus(1.0, 1))
    run_one(ScriptedEngine(seed=3), settings, equivalent_until=equivalent_until)
    *during, final = looks
    assert during and max(during) <= CHECK_SECONDS and final == math.inf


def test_self_consistency_keeps_the_pool_full_until_all_are_started():
    engine = ScriptedEngine(seed=4, finish_chance=0.2)
    watched = run_one(engine, make_settings("sc", capacity=3, num_traces=10))
    counts = watched.search.result.counts
    assert (counts.roots, counts.completed, counts.branched, counts.pruned) == (10, 10, 0, 0)
    assert max(s.running + s.waiting for s in watched.events if isinstance(s, ev.Sample)) == 3


def test_an_interruption_votes_and_closes_every_search():
    engine = endless()
    first = make_search(engine, make_settings(capacity=4, max_new_tokens=10**6), number=1)
    second = make_search(engine, make_settings(capacity=4, max_new_tokens=10**6), number=2)
    stops = iter([False] * 30 + [True] * 5)
    ended = list(run_searches(engine, [first.search, second.search], concurrency=2, should_stop=lambda: next(stops)))
    assert {s.result.stop_reason for s in ended} == {StopReason.INTERRUPTED}
    for watched in (first, second):
        assert isinstance(watched.events[-1], ev.Voted)
        check_ended(watched.search.record.tree)
    assert not engine.running


def test_a_consumer_that_goes_away_leaves_complete_logs():
    engine = ScriptedEngine(seed=5)
    searches = [make_search(engine, make_settings(capacity=4), number=n) for n in (1, 2, 3)]
    results = run_searches(engine, [w.search for w in searches], concurrency=3)
    next(results)
    results.close()
    for watched in searches:
        assert isinstance(watched.events[-1], ev.Voted)
    assert not engine.running and not engine.waiting


class BrokenEngine(ScriptedEngine):
    """Dies at its tenth step, and then cannot answer any more."""

    is_dead = False

    def step(self):
        if self.num_steps == 9:
            self.is_dead = True
            raise EngineError("the engine process died")
        return super().step()

    def stop(self, keys):
        if self.is_dead:
            raise EngineError("dead")
        return super().stop(keys)


def test_an_engine_that_dies_leaves_a_complete_log_and_raises():
    engine = BrokenEngine(finish_chance=0.0)
    watched = make_search(engine, make_settings(capacity=4))
    with pytest.raises(EngineError, match="process died"):
        list(run_searches(engine, [watched.search]))
    assert watched.search.result.stop_reason is StopReason.FAILED
    assert "process died" in watched.search.result.error
    record = fold(watched.events)
    check_ended(record.tree)
    assert record.stopped.reason is StopReason.FAILED


class Noting(ScriptedEngine):
    """Remembers what it was told, in its order."""

    def submit(self, specs):
        self.told.append(("submit", *(spec.key.trace for spec in specs)))
        super().submit(specs)

    def stop(self, keys):
        self.told.append(("stop", *(key.trace for key in keys)))
        return super().stop(keys)


class Acting:
    """Decides what it is given, round by round."""

    wake = Wake(every_steps=4)

    def __init__(self, *rounds):
        self._rounds = rounds

    def __call__(self, policy):
        return self

    def initial_state(self):
        return 0

    def decide(self, state, view):
        return state + 1, self._rounds[state] if state < len(self._rounds) else ()


def test_new_traces_of_a_round_go_to_the_engine_together_and_before_their_parents_end():
    rule = OnPressure(PressureAction.QUEUE)
    engine = Noting(finish_chance=0.0, thought_chance=0.0)
    engine.told = []
    branches = [Branch(parent, 4, rule) for parent in (0, 1, 2)]
    acting = Acting(
        [Start(3, rule), Start(1, rule)],
        [Prune(3, "weak"), branches[0], branches[1], Prune(2, "weak"), branches[0], Prune(0, "weak"), branches[1]],
        [Branch(4, 4, rule), Stop()],
    )
    watched = make_search(engine, make_settings(capacity=9, max_new_tokens=20), wrap=acting)
    list(run_searches(engine, [watched.search]))
    began, *rounds = engine.told
    assert began == ("submit", 0, 1, 2, 3)
    assert rounds == [("stop", 3), ("stop", 2), ("submit", 4, 5, 6), ("stop", 0), ("submit", 7), ("submit", 8),
                      ("stop", 1, 4, 5, 6, 7, 8)]  # fmt: skip
    kinds = [type(e) for e in watched.events if isinstance(e, ev.Branched | ev.Pruned)]
    assert kinds[:4] == [ev.Pruned, ev.Branched, ev.Branched, ev.Pruned], "the log has them as they were decided"


def test_a_ghost_may_be_a_parent_where_that_is_allowed():
    def thought(trace, score, length):
        return ThoughtScore(trace, score, length)

    steps = [
        SearchStep(admitted=admit(0, 1), num_generated=2),
        SearchStep(num_generated=2, scored=(thought(0, 0.9, 2), thought(1, 0.2, 2))),
        SearchStep(evicted=(Eviction(0, PressureAction.GHOST, 0.9, 2, (7, 8)),), num_generated=1),
        SearchStep(num_generated=1),
        SearchStep(
            admitted=(Admission(2, reused=0, recomputed=2, waited_steps=0),),
            num_generated=1,
            finished=(TraceEnd(2, EndReason.STOP, (7, 8, 9)),),
        ),
    ]
    settings = make_settings(capacity=2, swap_size=1, check_interval=4, warmup_tokens=2, ghost_parents=True)
    engine = PuppetEngine(steps)
    result = run_one(engine, settings).search.result
    assert (result.tokens.generated, result.tokens.reused, result.tokens.recomputed) == (2 + 4 + 1, 0, 2)
    child = engine.submitted[-1]
    assert (child.parent, child.prefix, child.inherited) == (None, (7, 8), 2)
    assert child.score.count == 1


def test_a_childs_temperature_is_multiplied_once():
    watched = run_one(ScriptedEngine(seed=3, finish_chance=0.01), make_settings(capacity=8, child_temperature=1.5))
    branched = [e for e in watched.events if isinstance(e, ev.Branched)]
    depths = {watched.search.record.tree.traces[e.trace].depth for e in branched}
    assert max(depths) > 1 and {e.temperature for e in branched} == {1.5}


def test_unanswered_traces_abstain_and_a_run_without_answers_has_none():
    result = run_one(ScriptedEngine(seed=3), make_settings(), answer_of=lambda tokens: None).search.result
    assert result.answer is None and result.votes == () and result.num_abstained == result.counts.completed > 0


@pytest.mark.parametrize("vote", ["majority", "score", "position"])
def test_every_kind_of_vote_weighs_as_it_says(vote):
    def thought(trace, score, length):
        return ThoughtScore(trace, score, length)

    steps = [
        SearchStep(admitted=admit(0, 1, 2), num_generated=3),
        SearchStep(num_generated=3, scored=(thought(0, 0.9, 2), thought(1, 0.3, 2), thought(2, 0.3, 2))),
        SearchStep(num_generated=3, scored=(thought(0, 0.1, 3), thought(1, 0.9, 3))),
        SearchStep(num_generated=3, finished=tuple(TraceEnd(i, EndReason.STOP, (0, 0, 0, i)) for i in range(3))),
    ]
    watched = run_one(
        PuppetEngine(steps), make_settings(capacity=3, check_interval=99), vote=vote,
        answer_of=lambda tokens: {0: "x", 1: "y", 2: "x"}[tokens[-1]],
    )  # fmt: skip
    weights = {entry.answer: entry.weight for entry in watched.search.result.votes}
    expected = {
        "majority": {"x": 2.0, "y": 1.0},
        "score": {"x": 0.5 + 0.3, "y": 0.6},
        "position": {"x": (0.9 + 0.2) / 3 + 0.3, "y": (0.3 + 1.8) / 3},
    }[vote]
    assert weights == pytest.approx(expected)


def written(tmp_path, **options):
    path = tmp_path / "events.jsonl"
    with ev.LogWriter(path) as log:
        watched = run_one(
            ScriptedEngine(seed=3), make_settings(**options), check=lambda search, event: log.write(event)
        )
    return path, watched


def test_a_log_on_disk_replays_to_the_same_result(tmp_path):
    path, watched = written(tmp_path)
    replayed = replay(path, lambda a, b: a == b)
    live = watched.search.result
    assert (replayed.answer, replayed.votes, replayed.counts, replayed.tokens, replayed.seconds) == (
        live.answer, live.votes, live.counts, live.tokens, live.seconds,
    )  # fmt: skip
    assert replayed.out_dir == str(tmp_path)


def test_a_log_stores_every_token_once(tmp_path):
    path, watched = written(tmp_path)
    stored = sum(len(json.loads(line).get("tokens", ())) for line in path.read_text().splitlines())
    assert stored == watched.search.result.tokens.generated


def test_a_log_cut_short_by_a_kill_is_read_up_to_there(tmp_path):
    path, _ = written(tmp_path)
    text = path.read_text()
    path.write_text(text[: int(len(text) * 0.6)])
    replayed = replay(path, lambda a, b: a == b)
    assert replayed.stop_reason is StopReason.FAILED


@pytest.mark.parametrize(
    "damage", ["not json\n", '{"event":"Nothing"}\n', '{"event":"Created","step":1}\n', '{"a":1}\n']
)
def test_a_damaged_log_is_named_with_its_line(tmp_path, damage):
    path, _ = written(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], damage + "\n", *lines[1:]]))
    with pytest.raises(UserError, match="line 2"):
        replay(path, lambda a, b: a == b)


def test_no_log_is_no_run(tmp_path):
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(UserError, match="empty"):
        replay(tmp_path / "events.jsonl", lambda a, b: a == b)


def test_a_log_of_another_format_is_refused(tmp_path):
    path, _ = written(tmp_path)
    path.write_text(path.read_text().replace('"format":2', '"format":99', 1))
    with pytest.raises(UserError, match="format 99"):
        replay(path, lambda a, b: a == b)


# -- when the policy is asked ------------------------------------------------------------------------------------------


class Asked:
    """Starts three traces, then decides what it is told to, and notes at which steps it was asked."""

    def __init__(self, wake, decisions=()):
        self.wake, self.steps, self.views = wake, [], []
        self._decisions = decisions

    def initial_state(self):
        return 0

    def decide(self, state, view):
        self.steps.append(view.step)
        self.views.append(view)
        rule = OnPressure(PressureAction.GHOST)
        return state + 1, [Start(3, rule)] if not state else self._decisions

    def __call__(self, policy):
        return self


def score(trace, length, value=0.5):
    return ThoughtScore(trace, value, length)


def asked_at(wake, *steps, decisions=(), **options):
    policy = Asked(wake, decisions)
    settings = make_settings(**{"capacity": 3, "check_interval": 99, "num_traces": 3, **options})
    steps = [SearchStep(admitted=admit(0, 1, 2), num_generated=3), *steps]
    watched = run_one(PuppetEngine(steps), settings, wrap=policy)
    return policy, watched


STEP = SearchStep(num_generated=3)
LAST = SearchStep(num_generated=3, finished=tuple(TraceEnd(i, EndReason.STOP, (i, i)) for i in range(3)))


def test_a_policy_is_asked_every_so_many_steps_in_which_something_was_said():
    policy, _ = asked_at(Wake(every_steps=2), STEP, SearchStep(), STEP, STEP, STEP, SearchStep(), LAST)
    assert policy.steps == [0, 2, 4], "a step without a token is no step, and the last one is the end"


def test_a_policy_is_asked_when_a_trace_completes_or_is_pruned_by_the_engine():
    gone = Eviction(0, PressureAction.PRUNE, 0.5, 3, (1, 2, 3))
    ghost = Eviction(1, PressureAction.GHOST, 0.5, 4, (1, 2, 3, 4))
    done = TraceEnd(2, EndReason.STOP, (1, 2, 3, 4, 5))
    steps = [STEP, SearchStep(evicted=(gone,), num_generated=2), SearchStep(evicted=(ghost,), num_generated=1),
             SearchStep(num_generated=1, finished=(done,))]  # fmt: skip
    assert asked_at(Wake(on_completion=True), *steps)[0].steps == [0, 3, 5]
    assert asked_at(Wake(on_boundary=True), *steps)[0].steps == [0]


def test_a_policy_is_asked_when_a_thought_ends():
    steps = [STEP, SearchStep(num_generated=3, scored=(score(1, 3),)), STEP, LAST]
    assert asked_at(Wake(on_boundary=True), *steps)[0].steps == [0, 3]
    assert asked_at(Wake(on_completion=True), *steps)[0].steps == [0, 5], "and when the last traces complete"


def test_once_enough_traces_are_complete_only_votes_are_left_to_decide():
    rule = OnPressure(PressureAction.GHOST)
    steps = [STEP, SearchStep(num_generated=3, finished=LAST.finished[:2])]
    decisions = [Discard(0, "late"), Prune(2, "weak"), Branch(2, 3, rule)]
    _, watched = asked_at(Wake(on_completion=True), *steps, decisions=decisions, num_traces=2)
    kinds = [type(event) for event in watched.events]
    assert ev.Discarded in kinds and not {ev.Pruned, ev.Branched} & set(kinds)
    (discarded,) = [event for event in watched.events if isinstance(event, ev.Discarded)]
    assert (discarded.step, discarded.trace, discarded.reason) == (3, 0, "late")
    assert watched.search.result.num_abstained == 0 and sum(vote.traces for vote in watched.search.result.votes) == 1


def test_a_policy_sees_the_pool_as_it_is():
    steps = [SearchStep(num_generated=3, scored=(score(1, 2, 0.75),)),
             SearchStep(num_generated=3, finished=(TraceEnd(0, EndReason.STOP, (1, 2, 3)),)), STEP,
             SearchStep(num_generated=2, finished=LAST.finished[1:])]  # fmt: skip
    policy, _ = asked_at(Wake(every_steps=4), *steps)
    view = policy.views[1]
    assert (view.step, view.num_created, [trace.id for trace in view.traces]) == (4, 3, [1, 2])
    assert [(trace.score, trace.num_scored, trace.num_tokens) for trace in view.traces] == [(0.75, 1, 4), (None, 0, 4)]
    assert [(done.id, done.answer, done.num_tokens) for done in view.finished] == [(0, "0", 3)]
    assert view.thoughts == ()


def test_a_policy_may_stop_the_search_and_what_it_began_before_that_still_counts():
    decisions = [Branch(0, 2, OnPressure(PressureAction.GHOST)), Stop()]
    _, watched = asked_at(Wake(every_steps=2), STEP, decisions=decisions, capacity=9)
    assert watched.search.result.stop_reason is StopReason.POLICY
    cancelled = [event for event in watched.events if isinstance(event, ev.Cancelled)]
    assert [(event.step, event.trace, len(event.tokens)) for event in cancelled] == [
        (2, 0, 2),
        (2, 1, 2),
        (2, 2, 2),
        (2, 3, 0),
    ]


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_samples_say_how_the_pool_and_the_seconds_are():
    engine = PuppetEngine(
        [
            SearchStep(admitted=admit(0, 1), num_generated=2),
            SearchStep(evicted=(Eviction(0, PressureAction.GHOST, None, 1, (1,)),), num_generated=1),
            SearchStep(admitted=admit(2), num_generated=2),
            SearchStep(num_generated=2, finished=(TraceEnd(1, EndReason.STOP, (1, 2, 3, 4)),)),
            SearchStep(num_generated=1, finished=(TraceEnd(2, EndReason.STOP, (1, 2)),)),
        ],
        seconds=StepSeconds(4.0, 2.0, 1.0),
    )
    settings = make_settings(capacity=3, check_interval=2, num_traces=2, warmup_tokens=99)
    watched = run_one(engine, settings)
    samples = [event for event in watched.events if isinstance(event, ev.Sample)]
    pools = [(each.step, each.running, each.waiting, each.ghosts, each.completed, each.generated) for each in samples]
    assert pools == [(0, 0, 3, 0, 0, 0), (2, 1, 1, 1, 0, 3), (4, 1, 0, 1, 1, 7), (5, 0, 0, 1, 2, 8)]
    assert [each.kv_used_tokens for each in samples] == [0, 4, 4, 0]
    assert [each.kv_capacity_tokens for each in samples] == [0, 1 << 20, 1 << 20, 1 << 20]
    assert [each.seconds_engine for each in samples] == [0.0, 8.0, 16.0, 20.0]
    assert [each.seconds_scoring for each in samples] == [0.0, 4.0, 8.0, 10.0]
    assert [each.seconds_scheduling for each in samples] == [0.0, 2.0, 4.0, 5.0]
    assert all(0 <= a.seconds_total <= b.seconds_total < 60 for a, b in itertools.pairwise(samples))


def test_a_policy_that_sleeps_has_samples_at_the_same_steps():
    _, watched = asked_at(Wake(), STEP, STEP, SearchStep(), STEP, LAST, check_interval=2)
    samples = [event.step for event in watched.events if isinstance(event, ev.Sample)]
    assert samples == [0, 2, 4, 5], "a step without a token brings none, and the end has its own"


def test_the_end_says_how_long_traces_have_waited():
    engine = PuppetEngine([SearchStep(admitted=admit(0), num_generated=1), *[SearchStep(num_generated=1)] * 2])
    watched = run_one(engine, make_settings(capacity=2, check_interval=99, budget_tokens=4))
    (waited,) = [event for event in watched.events if isinstance(event, ev.Waited)]
    assert waited.step == 3 and dict(zip(waited.traces, waited.steps, strict=True))[1] == 3
    place = watched.events.index(waited)
    assert isinstance(watched.events[place - 1], ev.Sample) and isinstance(watched.events[place + 1], ev.Stopped)
    assert watched.events[place + 1].step == 3


def test_new_traces_are_told_all_that_was_decided():
    rule, other = OnPressure(PressureAction.QUEUE), OnPressure(PressureAction.PRUNE)
    engine = PuppetEngine([SearchStep(admitted=admit(0, 1, 2), num_generated=3), STEP, STEP])
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=7, seed=3)
    settings = make_settings(
        capacity=9, islands=3, max_new_tokens=77, sampling=sampling, child_temperature=2.0, ghost_parents=True,
        budget_tokens=12,
    )  # fmt: skip
    stop_rule = StopRule(4, 1.5)
    acting = Acting(
        [Start(1, rule, island=0), Start(2, rule, stop_rule, island=1)],
        [Branch(2, 2, other), Evict(1, "floor"), Branch(1, 1, other)],
    )
    acting.wake = Wake(every_steps=2)
    watched = make_search(engine, settings, wrap=acting)
    list(run_searches(engine, [watched.search]))
    first, second, third, child, ghosts_child = engine.submitted
    assert [spec.key for spec in engine.submitted] == [TraceKey(1, i) for i in range(5)]
    assert [spec.island for spec in engine.submitted] == [0, 1, 1, 1, 1]
    assert [spec.noise_id for spec in engine.submitted] == [0, 1, 4, 7, 10], "by the place on their island"
    assert [spec.stop_rule for spec in engine.submitted] == [None, stop_rule, stop_rule, None, None]
    assert [spec.on_pressure for spec in engine.submitted] == [rule, rule, rule, other, other]
    assert {spec.max_new_tokens for spec in engine.submitted} == {77}
    assert first.sampling == second.sampling == third.sampling == sampling
    assert child.sampling == ghosts_child.sampling == dataclasses.replace(sampling, temperature=1.0)
    assert (child.parent, child.inherited, child.prefix, child.history_of) == (TraceKey(1, 2), 2, (), None)
    assert (ghosts_child.parent, ghosts_child.inherited, ghosts_child.prefix) == (None, 1, (0,))
    assert ghosts_child.history_of == TraceKey(1, 1)
    evicted = [event for event in watched.events if isinstance(event, ev.Evicted)]
    assert [(event.step, event.trace, event.reason, event.tokens) for event in evicted] == [(2, 1, "floor", (0, 0))]


# -- islands that are split, and searches in parts ---------------------------------------------------------------------


def test_a_split_puts_every_root_where_its_random_numbers_belong():
    rule = OnPressure(PressureAction.GHOST)
    engine = PuppetEngine([SearchStep(admitted=admit(0, 1, 2, 3), num_generated=4), *[STEP] * 4])
    engine.steps[2] = SearchStep(admitted=admit(4, reused=2), num_generated=4)
    settings = make_settings(capacity=9, num_traces=9, islands=2, budget_tokens=20)
    acting = Acting(
        [Start(3, rule, island=0), Start(1, rule, island=1)],
        [Branch(2, 2, rule), Prune(1, "weak")],
        [SplitIslands(PoolSettings(4, 3, 5, 7, "in doubt"))],
        [Start(1, rule, island=3), Branch(4, 4, rule)],
    )
    acting.wake = Wake(every_steps=2)
    watched = make_search(engine, settings, wrap=acting)
    list(run_searches(engine, [watched.search]))
    (split,) = [event for event in watched.events if isinstance(event, ev.IslandsSplit)]
    assert (split.step, split.islands, split.swap_size, split.warmup_tokens) == (4, 4, 3, 7) and split.why == "in doubt"
    assert split.island_of == (0, 2, 0, 1, 0), "roots by their random numbers 0, 2, 4 and 1, a child with its root"
    keys = [TraceKey(1, trace) for trace in (0, 2, 3, 4)]
    assert engine.regrouped == [dict(zip(keys, (0, 0, 1, 0), strict=True))], "those that live"
    assert [spec.noise_id for spec in engine.submitted] == [0, 2, 4, 1, 6, 11, 8], "nobody's a second time"
    assert [spec.island for spec in engine.submitted[5:]] == [3, 0], "asked again at once"


def part_of(engine, **options):
    pool = {"capacity": 2, "num_traces": 4, "islands": 2, "check_interval": 99}
    return make_search(engine, make_settings(**pool, part=SearchPart(range(1)), **options))


def test_a_part_of_a_search_has_no_vote_of_its_own():
    done = tuple(TraceEnd(i, EndReason.STOP, (i, i)) for i in (0,))
    steps = [SearchStep(admitted=admit(0), num_generated=1), SearchStep(num_generated=1, finished=done),
             SearchStep(admitted=admit(1), num_generated=1),
             SearchStep(num_generated=1, finished=(TraceEnd(1, EndReason.STOP, (1, 1)),))]  # fmt: skip
    watched = part_of(PuppetEngine(steps), consensus=Consensus(0.1, 1))
    list(run_searches(watched.search._engine, [watched.search]))
    result = watched.search.result
    assert result.stop_reason is StopReason.COMPLETED, "others vote too, so that nothing is settled here"
    assert result.answer is None and result.votes == () and not any(isinstance(e, ev.Voted) for e in watched.events)
    assert result.error is None


def test_whoever_follows_a_search_is_told_of_every_step_until_its_end():
    told = []
    engine = PuppetEngine([SearchStep(admitted=admit(0, 1, 2), num_generated=3), STEP, SearchStep(), LAST])
    watched = make_search(engine, make_settings(capacity=3, check_interval=99))
    watched.search._callbacks = dataclasses.replace(watched.search._callbacks, after_step=told.append)
    list(run_searches(engine, [watched.search]))
    assert told == [0, 1, 2, 2]


# -- failures ----------------------------------------------------------------------------------------------------------


class Mute(PuppetEngine):
    """Cannot say how far it has got."""

    def progress(self, search):
        if self.at:
            raise EngineError("no answer")
        return super().progress(search)


def begun(engine, **options):
    watched = make_search(engine, make_settings(**{"capacity": 2, "check_interval": 99, **options}))
    watched.search.begin()
    batch = engine.step()
    absorb(watched.search, batch)
    return watched


def test_a_failed_search_leaves_an_engine_that_does_not_answer():
    engine = Mute([SearchStep(admitted=admit(0, 1), num_generated=2)])
    watched = begun(engine)
    watched.search.fail(ValueError("first"))
    watched.search.fail(KeyError("second"))
    assert watched.search.is_stopped and str(watched.search.failure) == "first" and engine.closed[0] == 1
    cancelled = [event for event in watched.events if isinstance(event, ev.Cancelled)]
    assert [(event.trace, event.tokens) for event in cancelled] == [(0, ()), (1, ())]
    assert watched.search.conclude().stop_reason is StopReason.FAILED


def test_an_error_without_words_is_named():
    watched = begun(PuppetEngine([SearchStep(admitted=admit(0, 1), num_generated=2)]))
    watched.search.fail(ZeroDivisionError())
    assert watched.search.conclude().error == "ZeroDivisionError"


def test_a_search_that_is_stopped_by_its_caller_needs_an_engine_that_answers():
    watched = begun(Mute([SearchStep(admitted=admit(0, 1), num_generated=2)]))
    with pytest.raises(EngineError, match="no answer"):
        watched.search.stop(StopReason.INTERRUPTED)


def test_traces_that_the_engine_has_ended_are_not_stopped_again():
    engine = PuppetEngine([SearchStep(admitted=admit(0, 1), num_generated=2)])
    watched = begun(engine)
    del engine.lengths[0]
    watched.search.stop(StopReason.FAILED, "lost")
    assert engine.stopped == [1] and engine.closed == [1]
    assert watched.search.conclude().error == "lost"


def test_a_failure_after_the_end_changes_nothing_on_the_engine():
    watched = begun(PuppetEngine([SearchStep(admitted=admit(0, 1), num_generated=2)]))
    watched.search.stop(StopReason.INTERRUPTED)
    result = watched.search.conclude()
    voted = watched.events[-1]
    assert (result.stop_reason, result.error) == (StopReason.INTERRUPTED, None)
    assert (voted.answer, voted.margin, voted.votes) == (result.answer, result.margin, ())


def test_what_a_live_trace_has_said_is_asked_for_by_its_number_and_from_a_place_on():
    engine = ScriptedEngine(seed=3, finish_chance=0.0)
    watched = make_search(engine, make_settings(capacity=2), number=5)
    watched.search.begin()
    for _ in range(3):
        batch = engine.step()
        absorb(watched.search, batch)
    said = engine.emitted[TraceKey(5, 1)]
    assert list(watched.search.pool.tokens_of(1, 0)) == said and list(watched.search.pool.tokens_of(1, 2)) == said[2:]


def test_the_vote_in_the_log_is_the_result():
    watched = run_one(ScriptedEngine(seed=3), make_settings(capacity=4))
    voted, result = watched.events[-1], watched.search.result
    assert isinstance(voted, ev.Voted) and (voted.answer, voted.margin) == (result.answer, result.margin)
    assert voted.votes == tuple(dataclasses.asdict(entry) for entry in result.votes) and len(voted.votes) > 1


def test_a_callback_that_always_fails_ends_its_search_all_the_same():
    is_broken = False

    def check(search, event):
        if is_broken:
            raise OSError("no log")

    engine = PuppetEngine([SearchStep(admitted=admit(0, 1), num_generated=2)])
    watched = make_search(engine, make_settings(capacity=2, check_interval=99), check=check)
    watched.search.begin()
    is_broken = True
    watched.search.fail(ValueError("first"))
    assert watched.search.is_stopped and engine.closed == [1], "and nothing of it runs any more"


def test_a_search_has_no_result_before_its_vote():
    watched = make_search(ScriptedEngine(seed=3), make_settings(capacity=8))
    assert watched.search.result is None
    list(run_searches(watched.search._engine, [watched.search]))
    assert watched.search.result is not None
