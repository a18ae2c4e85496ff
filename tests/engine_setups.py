"""How the contract suite starts each engine; a new engine joins the suite by one entry here."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from gambit.config import EngineConfig
from gambit.engines.base import Engine, SearchSpec
from gambit.engines.local.engine import LocalEngine
from gambit.engines.local.model import PoolModel
from gambit.prompts import boundary_rule, stop_ids
from gambit.scorers.base import ScorerInfo, ThoughtBatch
from gambit.types import (
    OnPressure,
    PressureAction,
    Sampling,
    SearchStep,
    StatePosition,
    TraceKey,
    TraceSpec,
)
from tiny import copied, save_tiny, tiny_model, tiny_tokenizer

PROMPT = (*tiny_tokenizer().encode("a=1+2 b=a*3 c=a+b", add_special_tokens=False), 3)
RULE = boundary_rule(tiny_tokenizer())
STOPS = stop_ids(tiny_tokenizer(), None)
GHOST = OnPressure(PressureAction.GHOST)
SAMPLED = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5)
GREEDY = replace(SAMPLED, temperature=0.0)


@dataclass(frozen=True)
class ProjectionScorer:
    """A state's product with a fixed random vector: two states score alike only if they are alike."""

    position: StatePosition = StatePosition.BOUNDARY
    vector: torch.Tensor | None = None

    @property
    def info(self) -> ScorerInfo:
        return ScorerInfo("projection", state_position=self.position, is_probability=False)

    def to(self, device: torch.device) -> ProjectionScorer:
        return replace(self, vector=projection(32).to(device))

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return thoughts.states.float() @ self.vector


def projection(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(7))


def start_local(scorer=None, *, model=None, **options: object) -> LocalEngine:
    pool_model = PoolModel(copied(model or tiny_model()), "tiny")
    return LocalEngine(pool_model, tiny_tokenizer(), scorer or ProjectionScorer(), **options)


@functools.cache
def _tiny_folder() -> Path:
    """vLLM loads from a folder."""
    folder = Path(tempfile.mkdtemp(prefix="gambit-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save_tiny(folder)


def start_vllm(scorer=None, *, kv_budget_tokens=None, block_tokens=None, **options: object) -> Engine:
    """In this process and synchronous unless told otherwise; vLLM's CPU kernels know blocks of 32 tokens only."""
    from gambit.engines.vllm.start import start_vllm as start

    model = str(_tiny_folder())
    fast = {"kv_cache_memory_bytes": 64 << 20, "own_process": False, "self_check": False}
    config = EngineConfig(
        model=model, engine="vllm", kv_budget_tokens=kv_budget_tokens, engine_options={**fast, **options}
    )
    return start(config, model, scorer or ProjectionScorer())


HAS_VLLM = find_spec("vllm") is not None
ENGINES: dict[str, Callable[..., Engine]] = {"local": start_local, "vllm": start_vllm, "vllm-async": functools.partial(start_vllm, async_scheduling=True)}


def spec(trace: int, *, search: int = 1, sampling: Sampling = SAMPLED, tokens: int = 60, on_pressure=GHOST, **more):
    return TraceSpec(TraceKey(search, trace), sampling, tokens, on_pressure, **more)


def open_search(engine: Engine, number: int = 1, prompt: Sequence[int] = PROMPT, stops=STOPS, **options) -> None:
    engine.open(SearchSpec(number, tuple(prompt), RULE, frozenset(stops), **options))


def run(engine: Engine, steps: int, search: int = 1) -> list[SearchStep]:
    return [engine.step().searches.get(search, SearchStep()) for _ in range(steps)]


def finish(engine: Engine, search: int = 1, most: int = 500) -> list[SearchStep]:
    """Step until nothing of the search lives."""
    steps = []
    while engine.progress(search):
        steps += run(engine, 1, search)
        assert len(steps) < most, "traces must end"
    return steps


def tokens_of(steps: Sequence[SearchStep]) -> dict[int, tuple[int, ...]]:
    """All tokens of the traces that finished."""
    return {done.trace: done.tokens for step in steps for done in step.finished}
