"""The solver for asyncio: awaited results, streams of events, cancelled tasks."""

import asyncio
import math
import warnings

import pytest

from gambit import events as ev
from gambit.async_solver import AsyncSolver
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.results.record import fold

QUICK = SearchConfig(capacity=4, check_interval=4, warmup_tokens=2, max_new_tokens=24, temperature=1.0, top_k=0)
LONG = SearchConfig(capacity=4, num_traces=10_000, policy="sc", max_new_tokens=24, temperature=1.0, top_k=0)


@pytest.fixture(scope="module")
def solver(tiny_folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = asyncio.run(AsyncSolver(str(tiny_folder), device="cpu").start())
    yield loaded
    asyncio.run(loaded.close())


def facts(result):
    return result.answer, result.votes, result.tokens, result.counts, result.stop_reason


async def is_free(solver):
    """Whether a search that was called off has left the engine before one that came later has ended."""
    await solver.solve("a=1+1", QUICK)
    return not solver.solver._parts.host._tickets and solver.solver.engine.step().kv_used_tokens == 0


def test_tasks_get_what_a_plain_solver_gives(solver):
    async def body():
        return await asyncio.gather(*(solver.solve(f"a={i}+1", QUICK) for i in range(5)))

    alone = [facts(solver.solver.solve(f"a={i}+1", QUICK)) for i in range(5)]
    assert [facts(result) for result in asyncio.run(body())] == alone


def test_a_stream_gives_every_event_of_the_log_and_then_the_result(solver, tmp_path):
    async def body():
        stream = solver.stream("a=1+2", QUICK, out_dir=tmp_path / "run")
        return [event async for event in stream], stream.result

    events, result = asyncio.run(body())
    logged = list(ev.read_log(tmp_path / "run" / "events.jsonl"))
    assert list(map(ev.to_json, events)) == list(map(ev.to_json, logged))
    assert fold(events).tokens == result.tokens and result.answer == events[-1].answer


def test_a_cancelled_task_ends_its_search_and_its_log(solver, tmp_path):
    async def body():
        neighbour = asyncio.ensure_future(solver.solve("a=3+4", QUICK))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await solver.solve("a=1+2", LONG, out_dir=tmp_path / "run")
        return await neighbour, await is_free(solver)

    neighbour, is_idle = asyncio.run(body())
    assert is_idle and facts(neighbour) == facts(solver.solver.solve("a=3+4", QUICK))
    assert (tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1].startswith('{"event":"Voted"')


def test_the_vote_of_a_cancelled_task_compares_nothing(solver, monkeypatch):
    """Others wait for the thread that takes votes."""
    deadlines = []
    real = solver.solver._parts.grader.for_vote
    monkeypatch.setattr(
        solver.solver._parts.grader, "for_vote", lambda deadline: deadlines.append(deadline) or real(deadline)
    )

    async def body():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await solver.solve("a=1+2", LONG)
        assert await is_free(solver)

    asyncio.run(body())
    assert deadlines == [-math.inf, math.inf]


def test_leaving_a_stream_early_ends_its_search(solver):
    async def body():
        async for event in solver.stream("a=1+2", LONG):
            if isinstance(event, ev.Finished):
                break
        return await is_free(solver)

    assert asyncio.run(body())


def test_mistakes_reach_whoever_waits(solver):
    async def body():
        with pytest.raises(UserError, match="empty"):
            await solver.solve(" ", QUICK)
        with pytest.raises(UserError, match="empty"):
            async for _ in solver.stream(" ", QUICK):
                pass

    asyncio.run(body())
    with pytest.raises(UserError, match="async with"):
        asyncio.run(AsyncSolver("pawn").solve("a=1+2"))
