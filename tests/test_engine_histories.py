"""A scorer that remembers thoughts, inside every engine: each score is that of one pass over the whole trace."""

import functools
import random
from dataclasses import replace

import pytest
import torch

from engine_setups import ENGINES, HAS_VLLM, PROMPT, RULE, finish, run, spec
from gambit import events as ev
from gambit.engines.base import SearchSpec
from gambit.errors import EngineError
from gambit.prompts import boundaries
from gambit.scorers.base import ScorerInfo
from gambit.scorers.sequence import SequenceNetwork, SequenceScorer, SequenceShape, sequence_info
from gambit.types import OnPressure, PressureAction, RunningScore, StatePosition, TraceKey
from searching import make_settings, run_one
from tiny import tiny_model

LITTLE_ROOM = {"kv_budget_tokens": 32 * 8, "block_tokens": 8}
EVERYWHERE = replace(RULE, think_end=None)  # thoughts are found to the end of a trace


@functools.cache
def sequence_scorer(position=StatePosition.BOUNDARY, max_steps=1024):
    """Random, with attention that is sharp enough for the history to matter."""
    shape = SequenceShape(32, width=16, layers=2, heads=2, max_steps=max_steps)
    torch.manual_seed(4)
    network = SequenceNetwork(shape)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
    info = ScorerInfo("sequence", state_position=position, hidden_size=32)
    return SequenceScorer(sequence_info(shape, info), network.eval().requires_grad_(False))


@pytest.fixture(params=ENGINES)
def start(request):
    """Starts an engine; when the test is over, every search is closed and no slot may be left in use."""
    if request.param.startswith("vllm") and not HAS_VLLM:
        pytest.skip("vLLM is not installed: scripts/install.sh brings its CPU build where there is one")
    started = []

    def begin(*args, **options):
        started.append(ENGINES[request.param](*args, **options))
        return started[-1]

    yield begin
    for engine in started:
        used = slots_used(engine)
        engine.close()
        assert used() == 0


def slots_used(engine):
    if engine.info.name == "local":
        return lambda: engine._pool.histories.num_used
    core = engine._core._core._client.engine_core

    def used():
        while core.batch_queue:  # with asynchronous scheduling a step may be under way that nobody has asked for
            core.step_fn()
        core.scheduler._histories.forget()
        return core.scheduler._histories.num_used

    return used


@functools.cache
def expected_scores(scorer, tokens):
    """Length at each boundary -> the score, from one pass of transformers and one of the network."""
    with torch.inference_mode():
        states = tiny_model().model(input_ids=torch.tensor([[*PROMPT, *tokens]])).last_hidden_state[0]
        shift = 0 if scorer.info.state_position is StatePosition.BOUNDARY else -1
        ends = boundaries(EVERYWHERE, tokens)[0]
        at = [len(PROMPT) + end + shift for end in ends]
        scores = scorer.network(states[at][None])[0].sigmoid().tolist()
    return {end + 1: score for end, score in zip(ends, scores, strict=True)}


def check_scores(scorer, scored, tokens):
    """`scored`: trace -> {length: score}. Gives how far off a scorer without memory would be at most."""
    apart = []
    for trace, scores in scored.items():
        expected = expected_scores(scorer, tuple(tokens[trace]))
        ends = list(expected)
        if ends and ends[-1] == len(tokens[trace]) and ends[-1] not in scores:
            assert scorer.info.state_position is StatePosition.BOUNDARY
            ends.pop()  # its last token was never fed
        assert list(scores) == ends, trace
        assert all(abs(expected[end] - scores[end]) < 1e-4 for end in ends), trace
        apart += [abs(expected[end] - expected[ends[0]]) for end in ends]
    return max(apart)


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
    tree, scored = watched.search.record.tree, {}
    for event in watched.events:
        if isinstance(event, ev.Created):
            scored[event.trace] = {}
        elif isinstance(event, ev.Branched):
            scored[event.trace] = dict(scored[event.parent])
        elif isinstance(event, ev.Scored):
            for trace, score, length in zip(event.traces, event.scores, event.num_tokens, strict=True):
                scored[trace][length] = score
    tokens = {trace.id: tree.tokens_of(trace.id) for trace in tree.traces}
    assert check_scores(scorer, scored, tokens) > 1e-2
    lost = [e for e in watched.events if isinstance(e, ev.Evicted | ev.Queued)]
    assert len(lost) > 3
    if policy == "gambit":
        ghosts = {e.trace for e in lost}
        assert [t for t in tree.traces if t.parent in ghosts], "no ghost became a parent"


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
