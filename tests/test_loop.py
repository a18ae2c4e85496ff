"""The loop: ends, budgets, failures, interruptions, ghosts as parents, and the log on disk."""

import itertools
import json
import math
import time

import pytest

from gambit.core import events as ev
from gambit.core.errors import EngineError, UserError
from gambit.core.types import (
    Admission,
    EndReason,
    Eviction,
    OnPressure,
    PressureAction,
    SearchStep,
    StopReason,
    ThoughtScore,
    TraceEnd,
)
from gambit.results.record import fold
from gambit.results.replay import replay
from gambit.results.vote import Consensus
from gambit.search import limits, loop
from gambit.search.batch import run_searches
from gambit.search.policies.base import Branch, Prune, Start, Stop, Wake
from puppet import PuppetEngine, admit
from scripted import ScriptedEngine
from searching import make_search, make_settings, run_one


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
    assert during and max(during) <= loop.CHECK_SECONDS and final == math.inf


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
        watched.search.record.tree.check_ended()
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
    record.tree.check_ended()
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

    def decide(self, state, view):
        return state + 1, self._rounds[state] if state < len(self._rounds) else ()


def test_new_traces_of_a_round_go_to_the_engine_together_and_before_their_parents_end():
    rule = OnPressure(PressureAction.QUEUE)
    engine = Noting(finish_chance=0.0, thought_chance=0.0)
    engine.told = []
    watched = make_search(engine, make_settings(capacity=9, max_new_tokens=20))
    branches = [Branch(parent, 4, rule) for parent in (0, 1, 2)]
    watched.search._policy_state, watched.search._policy = (
        0,
        Acting(
            [Start(3, rule), Start(1, rule)],
            [Prune(3, "weak"), branches[0], branches[1], Prune(2, "weak"), branches[0], Prune(0, "weak"), branches[1]],
            [Branch(4, 4, rule), Stop()],
        ),
    )
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
