"""Branches on vLLM: blocks are copied instead of computed where the parent is there to copy from."""

import pytest
import torch

from gambit.errors import EngineError
from gambit.types import OnPressure, PressureAction, TraceKey
from support.engine_setups import GREEDY, HAS_VLLM, finish, open_search, run, spec, start_own_vllm, tokens_of, worker_of

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: scripts/install.sh brings its CPU build"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
PARENT = TraceKey(1, 0)
BLOCK = 32


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def started(request):
    engine = start_own_vllm(**({"async_scheduling": True} if request.param else {}))
    yield engine
    engine.close()


@pytest.fixture
def engine(started):
    open_search(started, stops=())
    yield started
    started.close_search(1)


def plans_of(engine, monkeypatch):
    """What the worker is told of each step: tokens per request, and copies."""
    from gambit.engines.vllm.messages import WorkerStep, attached

    plans = []
    worker = worker_of(engine)
    real = worker.execute_model

    def watched(output, *args, **kwargs):
        if output.num_scheduled_tokens:
            assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens
            plans.append((list(output.num_scheduled_tokens.values()), attached(output, WorkerStep).copies))
        return real(output, *args, **kwargs)

    monkeypatch.setattr(worker, "execute_model", watched)
    return plans


def admissions(steps):
    return {a.trace: a.recomputed for step in steps for a in step.admitted}


@pytest.mark.parametrize("length", [1, 7, BLOCK - 6, BLOCK - 5, BLOCK - 4, 2 * BLOCK])
def test_a_branch_of_a_running_trace_computes_one_token_in_a_plain_step(engine, monkeypatch, length):
    engine.submit([spec(0, sampling=GREEDY, tokens=100), spec(1, tokens=100)])
    run(engine, length + 2)
    plans = plans_of(engine, monkeypatch)
    engine.submit([spec(i, sampling=GREEDY, tokens=100, inherited=length, parent=PARENT) for i in (2, 3)])
    steps = finish(engine)
    assert admissions(steps) == {2: 1, 3: 1}
    assert all(set(counts) == {1} for counts, _ in plans)
    copied = [copies for _, copies in plans if copies]
    if copied:  # none where what is missing is one token anyway
        (pairs,) = copied
        assert len({target for _, target in pairs}) == len(pairs)
    said = tokens_of(steps)
    assert said[2] == said[3] == said[0]


def test_where_the_parent_is_gone_the_rest_of_a_block_is_computed_again(engine, monkeypatch):
    engine.submit([spec(0, sampling=GREEDY, tokens=100), spec(1, tokens=100)])
    run(engine, 40)
    plans = plans_of(engine, monkeypatch)
    engine.submit([spec(2, sampling=GREEDY, tokens=100, inherited=40, parent=PARENT)])
    engine.stop([PARENT])
    steps = finish(engine)
    assert 1 < admissions(steps)[2] < BLOCK
    assert not any(copies for _, copies in plans)


def test_a_branch_of_one_that_has_only_just_come_waits_for_nothing(engine, monkeypatch):
    """Its parent is admitted in the same step: there is nothing to copy yet."""
    first = tuple(range(5, 25))
    engine.submit([spec(0, sampling=GREEDY, tokens=60, inherited=20, prefix=first)])
    plans = plans_of(engine, monkeypatch)
    engine.submit([spec(1, sampling=GREEDY, tokens=60, inherited=20, parent=PARENT)])
    said = tokens_of(finish(engine))
    assert said[0] == said[1]
    assert not any(copies for _, copies in plans)


def test_a_branch_that_copied_its_prefix_comes_back_from_the_queue():
    """vLLM waits for all tokens in flight of an evicted request: none may be counted that was never computed."""
    engine = start_own_vllm(kv_budget_tokens=448, async_scheduling=True)
    queue = OnPressure(PressureAction.QUEUE)
    open_search(engine, stops=())
    engine.submit([spec(i, sampling=GREEDY, tokens=110, on_pressure=queue) for i in range(6)])
    run(engine, 40)
    engine.submit([spec(6, sampling=GREEDY, tokens=110, on_pressure=queue, inherited=39, parent=TraceKey(1, 0))])
    steps = finish(engine, most=3000)
    engine.close()
    assert 6 in {lost.trace for step in steps for lost in step.evicted}
    assert len(set(tokens_of(steps).values())) == 1 and len(tokens_of(steps)) == 7


def test_without_short_cuts_nothing_is_copied(monkeypatch):
    engine = start_own_vllm(short_cuts=False)
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=100)])
    run(engine, 40)
    plans = plans_of(engine, monkeypatch)
    engine.submit([spec(1, sampling=GREEDY, tokens=100, inherited=40, parent=PARENT)])
    steps = finish(engine)
    engine.close()
    assert 1 < admissions(steps)[1] < BLOCK and not any(copies for _, copies in plans)
    assert tokens_of(steps)[1] == tokens_of(steps)[0]


def test_wrong_copies_are_refused_at_the_start(monkeypatch):
    from gambit.engines.vllm.compat.worker import GambitWorker

    monkeypatch.setattr(GambitWorker, "_copy_blocks", lambda self, copies: None)
    with pytest.raises(EngineError, match="greedy branches go on like"):
        start_own_vllm(self_check=True)


@pytest.mark.parametrize("shape", [(6, 2, 4, 3), (2, 6, 4, 3), (12, 2, 2, 3), (2, 12, 2, 3), (6, 4, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_are_found_wherever_a_backend_has_them(shape, dtype):
    from gambit.engines.vllm.compat.model_runner import by_block

    cache = torch.zeros(shape, dtype=dtype)
    blocks = by_block(cache, 6)
    assert len(blocks) == 6 and blocks.data_ptr() == cache.data_ptr() and blocks.numel() == cache.numel()
    blocks[3] = 1
    outer = 0 if shape[0] != 2 else 1
    size = shape[outer] // 6
    changed = cache.view(torch.uint8 if dtype.itemsize == 1 else dtype).movedim(outer, 0) != 0
    assert changed[3 * size : 4 * size].all() and changed.sum() == blocks[3].numel()


def test_a_cache_that_has_no_blocks_is_refused():
    from gambit.engines.vllm.compat.model_runner import by_block

    with pytest.raises(RuntimeError, match="not in 6 blocks"):
        by_block(torch.zeros(5, 5, 6), 6)
