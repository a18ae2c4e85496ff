"""A scorer that remembers thoughts, inside every engine: each score is that of one pass over the whole trace."""

import functools
import random
from dataclasses import replace

import pytest

from gambit import events as ev
from gambit.engines.base import SearchSpec
from gambit.errors import EngineError
from gambit.policies.deepconf import DeepConfOptions
from gambit.types import OnPressure, PressureAction, RunningScore, StatePosition, TraceKey
from support.engine_setups import (
    ENGINES,
    EVERYWHERE,
    PROMPT,
    check_scores,
    check_search,
    expected_scores,
    finish,
    run,
    sequence_scorer,
    spec,
    starting,
)
from support.searching import make_settings, run_one

LITTLE_ROOM = {"kv_budget_tokens": 32 * 8, "block_tokens": 8}


@pytest.fixture(params=ENGINES)
def start(request):
    """Starts an engine; when the test is over, every search is closed and no slot may be left in use."""
    with starting(request.param) as (begin, started):
        yield begin
        counts = [slots_used(engine) for engine in started]
    assert [used(is_idle=True) for used in counts] == [0] * len(counts)


def slots_used(engine):
    if engine.info.name == "local":
        return lambda *, is_idle=False: engine._pool.histories.num_used
    core = engine._core._client.engine_core

    def used(*, is_idle=False):
        while is_idle and core.batch_queue:  # asynchronous scheduling leaves a step behind that nobody asked for
            core.step_fn()
        core.scheduler._traces.histories.forget_released()
        return core.scheduler._traces.histories.num_used

    return used


class Family:
    """Random branches and prunes, with a record of every trace's scores (the inherited ones too) and tokens."""

    def __init__(self, engine, seed, **options):
        self.engine, self.options = engine, options
        self.random = random.Random(seed)
        self.scored: dict[int, dict[int, float]] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.born: dict[int, int] = {}
        engine.open(SearchSpec(1, PROMPT, EVERYWHERE, frozenset()))

    def root(self):
        self._submit({}, 0)

    def branch(self):
        """From any point of a trace that runs, its last token most of the time."""
        grown = {t: p.num_tokens for t, p in self.engine.progress(1).items() if p.num_tokens > self.born[t]}
        if not grown:
            return None
        parent = self.random.choice(sorted(grown))
        inherited = grown[parent] if self.random.random() < 0.7 else self.random.randint(1, grown[parent])
        scored = {length: score for length, score in self.scored[parent].items() if length <= inherited}
        self._submit(scored, inherited, parent=TraceKey(1, parent))
        return parent

    def stop(self, trace):
        self.tokens |= {key.trace: said for key, said in self.engine.stop([TraceKey(1, trace)]).items()}

    def _submit(self, scored, inherited, **more):
        trace = len(self.born)
        self.born[trace], self.scored[trace] = inherited, dict(scored)
        score = functools.reduce(RunningScore.add, scored.values(), RunningScore())
        self.engine.submit([spec(trace, inherited=inherited, score=score, **self.options, **more)])

    def step(self):
        (step,) = run(self.engine, 1)
        for thought in step.scored:
            assert thought.num_tokens not in self.scored[thought.trace]
            self.scored[thought.trace][thought.num_tokens] = thought.score
        for ended in (*step.finished, *step.evicted):
            if ended.tokens:
                self.tokens[ended.trace] = ended.tokens
        return step

    def live(self, rounds):
        """At every round a birth, often a death, sometimes that of the very parent while its child still waits."""
        for _ in range(rounds):
            self.step()
            parent = self.branch()
            alive = sorted(self.engine.progress(1))
            if parent is not None and self.random.random() < 0.3:
                self.stop(parent)
            elif len(alive) > 8:
                self.stop(self.random.choice(alive))
        while self.engine.progress(1):
            self.step()


@pytest.mark.parametrize(("position", "max_steps"), [("boundary", 1024), ("before", 1024), ("boundary", 3)])
def test_every_score_is_that_of_a_pass_over_the_whole_trace(start, position, max_steps):
    scorer = sequence_scorer(StatePosition(position), max_steps)
    family = Family(start(scorer), seed=1, tokens=60)
    family.root()
    family.root()
    family.live(45)
    assert check_scores(scorer, family.scored, family.tokens) > 1e-2
    assert sum(map(len, family.scored.values())) > 100 and max(map(len, family.scored.values())) > 8


def test_slots_are_shared_by_a_branch_and_free_when_the_last_that_holds_them_goes(start):
    engine = start(sequence_scorer())
    used, in_flight = slots_used(engine), start.lag
    family = Family(engine, seed=3, tokens=60)
    family.root()
    for _ in range(30):
        family.step()
    num_thoughts = len(family.scored[0])
    assert num_thoughts >= 3 and used() - num_thoughts <= in_flight
    assert (family.branch(), family.branch()) == (0, 0)
    family.stop(0)
    family.step()
    inherited = max(len(family.scored[1]), len(family.scored[2]))
    assert 2 < inherited <= used() <= num_thoughts + 2 + 2 * in_flight, "what both inherited is there once"
    family.stop(1)
    while family.engine.progress(1):
        family.step()
    assert used(is_idle=True) == 0, "also a trace that ended by itself gives back what it held"


@pytest.mark.parametrize("action", PressureAction)
def test_what_memory_pressure_does_to_traces_changes_no_score(start, action):
    scorer = sequence_scorer()
    engine = start(scorer, **LITTLE_ROOM)
    family = Family(engine, seed=2, tokens=90, on_pressure=OnPressure(action))
    for _ in range(10):
        family.root()
    lost = []
    for _ in range(40):
        lost += family.step().evicted
        if action is not PressureAction.QUEUE:
            family.branch()
    while engine.progress(1):
        lost += family.step().evicted
    assert {e.action for e in lost} == {action} and len(lost) > 3
    assert check_scores(scorer, family.scored, family.tokens) > 1e-2


@pytest.mark.parametrize("policy", ["gambit", "sc"])
def test_a_whole_search_in_little_room_with_ghosts_for_parents(start, policy):
    scorer = sequence_scorer()
    engine = start(scorer, **LITTLE_ROOM)
    settings = make_settings(
        policy=policy, capacity=12, swap_size=3, warmup_tokens=8, ghost_parents=True, max_new_tokens=70,
        num_traces=40 if policy == "gambit" else 12, budget_tokens=2500,
    )  # fmt: skip
    watched = run_one(engine, settings, prompt=PROMPT, rule=EVERYWHERE, stop_ids=frozenset({0}))
    assert check_search(scorer, watched) > 1e-2
    lost = [e for e in watched.events if isinstance(e, ev.Evicted | ev.Queued)]
    assert len(lost) > 3
    if policy == "gambit":
        ghosts = {e.trace for e in lost}
        assert [t for t in watched.search.record.tree.traces if t.parent in ghosts], "no ghost became a parent"


def test_a_child_of_a_trace_that_ended_names_it_while_it_is_kept(start):
    scorer = sequence_scorer()
    engine = start(scorer)
    engine.open(SearchSpec(1, PROMPT, EVERYWHERE, frozenset(), keeps_histories=True))
    engine.submit([spec(0, tokens=40)])
    steps = finish(engine)
    (said,) = (done.tokens for step in steps for done in step.finished)
    scores = [t.score for step in steps for t in step.scored]
    assert len(scores) > 3
    score = functools.reduce(RunningScore.add, scores[:3], RunningScore())
    inherited = [t.num_tokens for step in steps for t in step.scored][2]
    child = spec(1, tokens=60, inherited=inherited, prefix=said[:inherited], score=score)
    for wrong in (child, replace(child, history_of=TraceKey(1, 7))):
        with pytest.raises(EngineError, match="continues after 3 scored thoughts"):
            engine.submit([wrong])
    engine.submit([replace(child, history_of=TraceKey(1, 0))])
    steps = finish(engine)
    scored = {1: {t.num_tokens: t.score for step in steps for t in step.scored}}
    (tokens,) = (done.tokens for step in steps for done in step.finished)
    expected = expected_scores(scorer, tokens)
    assert len(scored[1]) > 2
    assert all(abs(expected[length] - score) < 1e-4 for length, score in scored[1].items())


def test_traces_that_their_stop_rules_end_give_back_what_they_held(start):
    scorer = sequence_scorer()
    engine = start(scorer)
    options = DeepConfOptions(warmup_traces=4, window_tokens=5, percentile=90)
    settings = make_settings("deepconf", capacity=12, max_new_tokens=60, policy_options=options)
    watched = run_one(engine, settings, prompt=PROMPT, rule=EVERYWHERE, stop_ids=frozenset({0}))
    stopped = [e for e in watched.events if isinstance(e, ev.Pruned)]
    assert len(stopped) >= 3 and {e.reason for e in stopped} == {"confidence"}
    check_search(scorer, watched)
