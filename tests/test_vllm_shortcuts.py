"""Short cuts in vLLM's scheduler: with and without them every step leaves the same requests, blocks and hashes."""

from contextlib import contextmanager

import pytest

from engine_setups import HAS_VLLM, open_search, spec, start_own_vllm
from gambit.types import EndReason, OnPressure, PressureAction, TraceKey

pytestmark = [
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: scripts/install.sh brings its CPU build"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
ROOM = 32 * 12  # enough for two traces, tight for eight
STORIES = [("ghost", 2), ("queue", 8), ("prune", 8)]  # what happens to a victim, how many traces


@contextmanager
def started(short_cuts, **options):
    engine = start_own_vllm(short_cuts=short_cuts, **options)
    try:
        yield engine, engine._core._core._client.engine_core.scheduler
    finally:
        engine.close()


def books_of(scheduler):
    """Everything that vLLM notes of a request while it decodes."""
    cached = scheduler.kv_cache_manager.coordinator.single_type_managers[0].num_cached_block
    return {
        name: (
            list(request.all_token_ids), list(request.output_token_ids), list(request.block_hashes), request.status,
            request.num_computed_tokens, request.num_output_placeholders, cached.get(name),
            getattr(request, "num_in_flight_tokens", None), scheduler.kv_cache_manager.get_block_ids(name),
        )
        for name, request in scheduler.requests.items()
    }  # fmt: skip


def story(engine, scheduler, action, count, most=400):
    """Searches whose traces end by length and at stop tokens, are stopped, branched from, and lose their room."""
    open_search(engine, 1, stops=())
    open_search(engine, 2, stops={0, 9})
    rule = OnPressure(PressureAction(action))
    engine.submit([spec(i, tokens=60 + 9 * i, on_pressure=rule) for i in range(count)])
    engine.submit([spec(i, search=2, tokens=90, on_pressure=rule) for i in range(count // 2)])
    told = []
    while engine.progress(1) or engine.progress(2):
        told.append((engine.step().searches, books_of(scheduler)))
        alive = engine.progress(1)
        if len(told) == 38 and 3 in alive:
            engine.stop([TraceKey(1, 3)])
        if len(told) == 42 and 1 in alive:
            half = alive[1].num_tokens - 3
            engine.submit([spec(20, tokens=120, on_pressure=rule, parent=TraceKey(1, 1), inherited=half)])
        assert len(told) < most
    engine.close_search(1)
    engine.close_search(2)
    return told


@pytest.mark.parametrize("is_async", [False, True])
def test_every_step_leaves_the_same_books(is_async):
    told = []
    for short_cuts in (False, True):
        with started(short_cuts, kv_budget_tokens=ROOM, async_scheduling=is_async) as (engine, scheduler):
            assert (scheduler._short_cuts is not None) == short_cuts
            told.append([story(engine, scheduler, *told_of) for told_of in STORIES])
    for (action, count), *both in zip(STORIES, *told, strict=True):
        for plain, short in zip(*both, strict=True):
            assert plain == short
        steps = [step for searches, _ in both[0] for step in searches.values()]
        assert len(steps) > 60
        lost = {evicted.action.value for step in steps for evicted in step.evicted}
        assert lost == ({action} if count > 2 else set())
        assert {end.reason for step in steps for end in step.finished} >= {EndReason.STOP, EndReason.LENGTH}


def test_most_tokens_take_the_short_way_and_allocations_too(monkeypatch):
    with started(short_cuts=True) as (engine, scheduler):
        taken = []
        take, coordinator = scheduler._short_cuts.take, scheduler.kv_cache_manager.coordinator

        def watched(scheduled, output):
            tokens, unusual = take(scheduled, output)
            taken.append((len(tokens), len(unusual.num_scheduled_tokens)))
            return tokens, unusual

        asked = []
        real = coordinator.get_num_blocks_to_allocate
        monkeypatch.setattr(scheduler._short_cuts, "take", watched)
        monkeypatch.setattr(coordinator, "get_num_blocks_to_allocate", lambda *a, **k: asked.append(1) or real(*a, **k))
        open_search(engine, stops=())
        engine.submit([spec(i, tokens=96) for i in range(4)])
        while engine.progress(1):
            engine.step()
    tokens, unusual = map(sum, zip(*taken, strict=True))
    assert tokens == 4 * 96
    assert unusual <= 4 * (1 + 2 * 4 + 1)  # the first token, two of each block, the last token
    assert len(asked) <= 4 * (2 + 2 * 4)


def test_an_untested_version_goes_vllms_own_way(monkeypatch):
    from gambit.engines.vllm import adapter

    monkeypatch.setattr(adapter, "VERSION", "0.31.7")
    with pytest.warns(UserWarning, match="has not been tried"):
        engine = start_own_vllm()
    scheduler = engine._core._core._client.engine_core.scheduler
    assert scheduler._short_cuts is None
    engine.close()
