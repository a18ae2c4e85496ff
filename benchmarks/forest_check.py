"""Checks of forest attention for `vllm_cuda_check.py`: log-probabilities, distribution and accuracy of stock's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

SEEDS = 2  # sampled trees of each kind
CHUNK = 10  # puzzles between two looks at the clock
# Of the likeliest token, the median: bfloat16 has eight bits, and scores of such states are off by 0.5 % of their size.
MOST_DIFFERENCE = {"bfloat16": 0.05, "float32": 1e-4}
Tokens = dict[int, tuple[int, ...]]
Logs = dict[tuple[int, int], torch.Tensor]  # by trace and position


@dataclass(frozen=True, slots=True)
class Said:
    """One search: what its traces said, and the log-probabilities before every token."""

    tokens: Tokens
    logs: Logs


def on_this_device() -> Any:
    """Forest attention as it is on a GPU; on a CPU inside vLLM's own attention backend, with torch for kernels."""
    if torch.cuda.is_available():
        return nullcontext()
    import os

    from support.forest_on_cpu import forest_on_cpu

    return forest_on_cpu(interprets="TRITON_INTERPRET" in os.environ)


def check_forest(start: Callable[..., Any], model: str, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Greedy and sampled trees of branches with stock and forest attention, and traces that share nothing."""
    from gambit.engines.vllm.compat.forest import forest_error
    from gambit.engines.vllm.messages import DecodeAttention
    from support.engine_setups import GREEDY, worker_of

    with on_this_device():
        # The engine's own self-check runs as it starts, with forest attention in every decode step.
        engine = start(model, attention="forest", async_scheduling=False)
        switch, numbers = worker_of(engine)._forest, iter(range(1, 100))
        dtype = engine.info.dtype

        def say(wish: str, **how: Any) -> Said:
            switch.wish = DecodeAttention(wish)
            return said(engine, next(numbers), **how)

        found: dict[str, Any] = {
            "self-check": "passed", "dtype": dtype,
            "difference on random data": [forest_error(builder) for builder in switch._builders],
        }  # fmt: skip
        trees = {wish: say(wish, sampling=GREEDY) for wish in ("stock", "auto", "forest")}
        found["greedy"] = {wish: compared(trees["stock"], trees[wish]) for wish in ("auto", "forest")}
        found["steps with forest attention"] = switch.num_steps
        tell(found)
        apart = {wish: say(wish, sampling=GREEDY, is_shared=False) for wish in ("stock", "forest")}
        found["nothing shared"] = compared(apart["stock"], apart["forest"])
        tell(found)
        found["sampled"] = distributions(say)
        engine.close()
    check_found(found, MOST_DIFFERENCE[dtype])
    return found


def check_found(found: dict[str, Any], most: float) -> None:
    assert found["greedy"]["auto"]["same tokens"] > 0.95, found  # so little does not pay: stock attention
    assert found["greedy"]["forest"]["same tokens"] > 0.8 and found["steps with forest attention"] > 50, found
    assert found["greedy"]["forest"]["median |log p|"] < most, found
    assert found["nothing shared"]["same tokens"] > 0.95 and found["nothing shared"]["median |log p|"] < most, found
    assert found["sampled"]["forest"] < 2 * found["sampled"]["stock again"] + 0.02, found


def distributions(say: Callable[..., Said]) -> dict[str, float]:
    """Returns how far the tokens of sampled trees are from stock attention's: half the sum of differences in share."""
    from support.engine_setups import SAMPLED

    counts = {
        name: Counter(
            token for seed in range(SEEDS)
            for tokens in say(wish, sampling=replace(SAMPLED, seed=10 * first + seed)).tokens.values()
            for token in tokens
        ) for first, (name, wish) in enumerate({"stock": "stock", "stock again": "stock", "forest": "forest"}.items())
    }  # fmt: skip
    return {name: distance(counts["stock"], counts[name]) for name in ("stock again", "forest")}


def distance(one: Counter[int], other: Counter[int]) -> float:
    shares = [{token: count / counts.total() for token, count in counts.items()} for counts in (one, other)]
    return round(sum(abs(shares[0].get(token, 0) - shares[1].get(token, 0)) for token in one | other) / 2, 4)


def said(engine: Any, search: int, *, sampling: Any, is_shared: bool = True) -> Said:
    """Eight roots with a long prompt and branches of them; or, with nothing shared, as many roots with a short one."""
    from gambit.types import TraceKey
    from support.engine_setups import PROMPT, finish, open_search, run, spec, tokens_of

    logs: Logs = {}
    open_search(engine, search, prompt=PROMPT * 5 if is_shared else PROMPT[:4], stops=())
    common = {"search": search, "sampling": sampling, "tokens": 90}
    with watching(engine, search, logs):
        count = 8 if is_shared else 24
        engine.submit([spec(i, prefix=(5 + i,), inherited=1, **common) for i in range(count)])
        if is_shared:
            run(engine, 40, search)
            engine.submit([spec(8 + i, inherited=33, parent=TraceKey(search, i // 2), **common) for i in range(16)])
        tokens = tokens_of(finish(engine, search))
    engine.close_search(search)
    return Said(tokens, logs)


@contextmanager
def watching(engine: Any, search: int, logs: Logs) -> Iterator[None]:
    """Notes what the sampler sees, on an engine that schedules synchronously: the front knows all earlier tokens."""
    from support.engine_setups import worker_of

    worker = worker_of(engine)
    tap, sample = worker.model_runner.sampler, worker.sample_tokens
    see, rows = tap._see, []

    def note_rows(*args: Any, **kwargs: Any) -> Any:
        rows[:] = worker._row_ids()
        return sample(*args, **kwargs)

    def note_logs(logits: Any) -> None:
        values = logits[: len(rows)].float().log_softmax(-1).cpu()
        traces = {trace.request: (number, len(trace.tokens)) for number, trace in searched().items()}
        logs.update({traces[row]: value for row, value in zip(rows, values, strict=True) if row in traces})
        see(logits)

    def searched() -> Any:
        return engine._searches[search].traces

    tap._see, worker.sample_tokens = note_logs, note_rows
    try:
        yield
    finally:
        tap._see = see
        del worker.sample_tokens


def compared(one: Said, other: Said) -> dict[str, Any]:
    """Tokens place by place; log-probabilities where both traces had said the same up to there."""
    pairs = [pair for trace in one.tokens for pair in zip(one.tokens[trace], other.tokens[trace], strict=True)]
    alike = [
        place for place in one.logs.keys() & other.logs.keys()
        if one.tokens[place[0]][: place[1]] == other.tokens[place[0]][: place[1]]
    ]  # fmt: skip
    likeliest = {place: int(one.logs[place].argmax()) for place in alike}
    off = [abs(float(one.logs[place][token] - other.logs[place][token])) for place, token in likeliest.items()]
    return {
        "same tokens": round(sum(a == b for a, b in pairs) / len(pairs), 4), "compared": len(alike),
        "median |log p|": float(np.median(off)), "99 %": float(np.quantile(off, 0.99)),
        "same to the bit": round(float(np.mean([torch.equal(one.logs[at], other.logs[at]) for at in alike])), 4),
    }  # fmt: skip


# -- accuracy on pawn -----------------------------------------------------------------------------------------------


def pawn_accuracy(
    options: dict[str, Any], count: int, seconds: float, tell: Callable[[dict[str, Any]], None], **search: Any
) -> dict[str, Any]:
    """The same puzzles with stock and forest attention, in turns: shares of right answers and of their difference."""
    from gambit import Solver
    from gambit.engines.vllm.messages import DecodeAttention
    from gambit.pawn.puzzles import Split, generate
    from support.engine_setups import worker_of

    end, longest = time.monotonic() + seconds, 0.0
    puzzles = list(islice(generate(Split.DEV, seed=6), count))
    right: dict[str, list[bool]] = {"stock": [], "forest": []}
    found: dict[str, Any] = {}
    options = {**options, "attention": "forest", "own_process": False}
    with on_this_device(), Solver("pawn", engine="vllm", memory_ratio=0.3, engine_options=options) as solver:
        switch = worker_of(solver.engine)._forest
        for first in range(0, count, CHUNK):
            began = time.monotonic()
            if began + 1.3 * longest > end:
                break
            for way in right:
                switch.wish = DecodeAttention(way)
                right[way] += solved(solver, puzzles[first : first + CHUNK], first, search)
            longest = max(longest, time.monotonic() - began)
            found = {**accuracies(right), "steps with forest attention": switch.num_steps}
            tell(found)
    assert found.get("steps with forest attention"), f"no puzzle was solved in {seconds:.0f} s with forest attention"
    return found


def solved(solver: Any, puzzles: list[Any], first: int, search: dict[str, Any]) -> list[bool]:
    from gambit import Problem, SearchConfig

    problems = [Problem(puzzle.text, id=f"{first + i}") for i, puzzle in enumerate(puzzles)]
    results = solver.solve_many(problems, SearchConfig(policy="gambit", **search), concurrency=8)
    answers = {result.problem_id: result.answer for result in results}
    return [answers[problem.id] == str(puzzle.answer) for problem, puzzle in zip(problems, puzzles, strict=True)]


def accuracies(right: dict[str, list[bool]]) -> dict[str, Any]:
    """Both, and the paired difference with its 95 % interval."""
    from gambit.stats import mean_interval, resamples

    stock, forest = (np.array(right[way], dtype=float) for way in ("stock", "forest"))
    found = mean_interval(forest - stock, resamples(len(stock)))
    return {
        "puzzles": len(stock), "stock": round(float(stock.mean()), 4), "forest": round(float(forest.mean()), 4),
        "forest - stock": round(found.value, 4), "95 %": [round(found.low, 4), round(found.high, 4)],
        "right with one alone": {"stock": int((stock > forest).sum()), "forest": int((forest > stock).sum())},
    }  # fmt: skip
