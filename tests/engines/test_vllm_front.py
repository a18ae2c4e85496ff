"""The front of the vLLM engine without vLLM: tokens reach their traces, and a quiet step costs nothing per trace."""

import random

import pytest

from gambit.engines.base import EngineInfo, SearchSpec
from gambit.engines.vllm.engine import VllmEngine
from gambit.engines.vllm.messages import StepReport
from gambit.types import OnPressure, PressureAction, Sampling, TraceKey, TraceSpec
from support.searching import NO_RULE, counted

INFO = EngineInfo("vllm", "none", "cpu", "float32", 1, 1 << 20, 1 << 20, 16)
GHOST = OnPressure(PressureAction.GHOST)


class PlayedCore:
    """Says what it is told to."""

    def __init__(self):
        self.running, self.reports = [], []

    def add(self, task, request_id, tokens, max_tokens, stop_ids):
        self.running.append(request_id)

    def send(self, message): ...

    def abort(self, request_ids):
        self.running = [request for request in self.running if request not in request_ids]

    def step(self):
        return self.reports.pop(0)

    def close(self): ...


def started(capacity):
    core = PlayedCore()
    engine = VllmEngine(core, INFO, None)
    engine.open(SearchSpec(1, (1, 2), NO_RULE, frozenset()))
    engine.submit([TraceSpec(TraceKey(1, trace), Sampling(), 1 << 20, GHOST) for trace in range(capacity)])
    return engine, core


def speak(core, tokens, **events):
    core.reports.append(StepReport(rows=list(core.running), tokens=tokens, num_running=len(tokens), **events))


def test_a_step_in_which_nothing_happens_costs_the_same_whatever_the_pool():
    work = {}
    for capacity in (4, 512):
        engine, core = started(capacity)
        speak(core, [7] * capacity)
        engine.step()
        speak(core, [8] * capacity)
        with counted() as counts:
            (step,) = engine.step().searches.values()
        assert step.num_generated == capacity
        work[capacity] = counts
    assert work[4] == work[512]


@pytest.mark.parametrize("seed", range(5))
def test_every_token_reaches_its_trace_whatever_comes_and_goes(seed):
    """Against the plainest bookkeeping there is; reports may still name traces that were stopped a moment ago."""
    draw = random.Random(seed)
    engine, core = started(6)
    said = {trace: [] for trace in range(6)}
    names = {str(trace + 1): trace for trace in range(6)}  # requests are numbered as they come
    late = None  # a request that speaks once more after its end
    for step in range(300):
        rows = core.running + ([late] if late else [])
        draw.shuffle(rows) if step % 50 == 0 else None
        tokens = [draw.randrange(1 << 17) for _ in rows]
        core.reports.append(StepReport(rows=rows, tokens=tokens, num_running=len(rows)))
        for request, token in zip(rows, tokens, strict=True):
            if names[request] in said:
                said[names[request]].append(token)
        result = engine.step().searches[1]
        assert result.num_generated == len(rows) - (late is not None)
        late = None
        chance = draw.random()
        if chance < 0.05 and len(said) > 1:
            victim = draw.choice(sorted(said))
            request = next(name for name, trace in names.items() if trace == victim)
            assert engine.stop([TraceKey(1, victim)]) == {TraceKey(1, victim): tuple(said.pop(victim))}
            late = request if draw.random() < 0.5 else None
        elif chance < 0.1:
            parent, child = draw.choice(sorted(said)), len(names)
            inherited = draw.randrange(len(said[parent]) + 1)
            key = TraceKey(1, parent)
            engine.submit([TraceSpec(TraceKey(1, child), Sampling(), 1 << 20, GHOST, inherited, key)])
            said[child], names[str(child + 1)] = said[parent][:inherited], child
        elif chance < 0.15:
            assert {i: p.num_tokens for i, p in engine.progress(1).items()} == {i: len(t) for i, t in said.items()}
    stopped = engine.stop([TraceKey(1, trace) for trace in said])
    assert {key.trace: tokens for key, tokens in stopped.items()} == {i: tuple(t) for i, t in said.items()}
    assert len(names) > 8
