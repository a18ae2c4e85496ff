"""Tries a model for `gambit doctor MODEL`: its scorer, trust, pool, memory, and the time of a question."""

from collections.abc import Iterator

from gambit.cli.forecast import EFFORTS, CompareForecast, duration, usual_tokens
from gambit.cli.session import check_model, loaded, only_our_warnings
from gambit.config.effort import Effort
from gambit.config.options import EngineConfig, SearchConfig
from gambit.config.presets import num_fitting
from gambit.engines.base import check_engine
from gambit.models import files as models
from gambit.models.files import usual_effort
from gambit.solver import Solver
from gambit.solver.builder import LengthHistory, request_of

QUESTION = "What is the largest prime factor of 8051?"
PAWN_QUESTION = "a = 17; b = 5; c = a * b; d = c - a; d?"
TRIED_TOKENS = 200  # of each trace


def examine_model(engine: EngineConfig) -> Iterator[tuple[str, str]]:
    """Loads a model and searches for a moment; yields names and what was found."""
    check_engine(engine)
    check_model(engine.model, is_offline=engine.offline)
    with only_our_warnings(), loaded(engine, lambda _: None) as solver:
        yield from _facts(solver, engine.model)


def _facts(solver: Solver, model: str) -> Iterator[tuple[str, str]]:
    question = QUESTION if models.named_model(model) is None else PAWN_QUESTION
    usual = usual_effort(model)
    requests = (request_of(question, SearchConfig(effort=each), None, None, None) for each in (Effort.HIGH, usual))
    plan, usual_plan = (solver.plan(each, LengthHistory(), 1) for each in requests)
    settings, info = plan.settings, solver.engine.info
    scorer = plan.header.environment["scorer"]
    room = info.kv_capacity_tokens - info.weight(len(plan.header.prompt_tokens))
    warmup, limit = settings.pool.warmup_tokens, settings.max_new_tokens
    yield "model", f"{model} on {info.name}, {info.device}, {info.dtype}, context of {info.context_tokens:,} tokens"
    yield "scorer", str(scorer)
    yield "trust", settings.pool.why
    yield "pool", str(settings.pool).partition(":")[0]
    at_warmup, at_limit = (num_fitting(room, info.weight(tokens)) for tokens in (warmup, limit))
    yield "solve", f"by default {EFFORTS[usual]}"
    yield "fit", (f"{at_warmup:,} traces at the warm-up of {warmup:,} tokens, {at_limit:,} at the limit of {limit:,}; "
                  f"the pool has {settings.capacity}")  # fmt: skip
    state = f"; the state of a trace weighs {info.state_tokens:,}" if info.state_tokens else ""
    yield "memory", f"{info.kv_capacity_tokens:,} tokens of KV cache{_device_memory(info.device)}{state}"
    tried = SearchConfig(policy="sc", capacity=settings.capacity, max_new_tokens=min(TRIED_TOKENS, limit))
    result = solver.solve(question, tried)
    rate = result.tokens.generated / max(result.seconds.total, 1e-9)
    whole = f"{settings.num_traces} traces of {limit:,} tokens"
    time = duration(settings.num_traces * limit / rate)
    yield "time", (f"{rate:,.0f} tokens/s with {settings.capacity} short traces: {whole} would take about {time}; "
                   "long traces are slower, most end before")  # fmt: skip
    forecast = CompareForecast(usual_plan.settings.num_traces, usual_tokens(model, usual_plan.settings))
    yield "compare", f"{forecast}, {' to '.join(map(duration, forecast.times(rate)))} at this rate"


def _device_memory(device: str) -> str:
    if not device.startswith("cuda"):
        return ""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return f"; {free / 2**30:.0f} of {total / 2**30:.0f} GiB of the GPU are free beside it"
