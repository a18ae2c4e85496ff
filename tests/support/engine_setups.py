"""How the contract suite starts each engine; a new engine joins the suite by one entry here."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from gambit import events as ev
from gambit.config.options import EngineConfig
from gambit.engines.base import Engine, SearchSpec
from gambit.engines.local.engine import LocalEngine
from gambit.engines.local.model import PoolModel
from gambit.scorers.base import ScorerInfo, ThoughtBatch
from gambit.scorers.mlp import MlpScorer
from gambit.scorers.sequence import SequenceNetwork, SequenceScorer, SequenceShape, sequence_info
from gambit.text.boundary import boundaries, boundary_rule
from gambit.text.prompts import stop_ids
from gambit.types import (
    Aggregation,
    OnPressure,
    PressureAction,
    Sampling,
    SearchStep,
    StatePosition,
    TraceKey,
    TraceSpec,
)
from support.tiny import copied, save_tiny, tiny_model, tiny_tokenizer

PROMPT = (*tiny_tokenizer().encode("a=1+2 b=a*3 c=a+b", add_special_tokens=False), 3)
RULE = boundary_rule(tiny_tokenizer())
STOPS = stop_ids(tiny_tokenizer())
GHOST = OnPressure(PressureAction.GHOST)
SAMPLED = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5)
GREEDY = replace(SAMPLED, temperature=0.0)


@dataclass(frozen=True)
class ProjectionScorer:
    """A state's product with a fixed random vector: two states score alike only if they are alike."""

    position: StatePosition = StatePosition.BOUNDARY
    layers: tuple[int, ...] = (-1,)
    vector: torch.Tensor | None = None

    @property
    def info(self) -> ScorerInfo:
        return ScorerInfo("projection", state_position=self.position, is_probability=False, layers=self.layers)

    def to(self, device: torch.device) -> ProjectionScorer:
        return replace(self, vector=projection(32 * len(self.layers)).to(device))

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


class SharedEngine:
    """An engine that outlives its tests: vLLM takes seconds to start and to stop, closing searches takes none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: set[int] = set()

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def open(self, spec: SearchSpec) -> None:
        self._engine.open(spec)
        self._open.add(spec.search)

    def close_search(self, search: int) -> None:
        self._open.discard(search)
        self._engine.close_search(search)

    def close(self) -> None:
        for search in list(self._open):
            self.close_search(search)


@functools.cache
def _shared_vllm(scorer, kv_budget_tokens: int | None, options: tuple[tuple[str, object], ...]) -> SharedEngine:
    return SharedEngine(start_own_vllm(scorer, kv_budget_tokens=kv_budget_tokens, **dict(options)))


def start_own_vllm(
    scorer=None, *, kv_budget_tokens=None, model=None, adapters=None, dtype="auto", memory_ratio=0.9, **options: object
) -> Engine:
    """In this process and synchronous unless told otherwise."""
    from gambit.engines.vllm.start import start_vllm as start

    model = str(model or _tiny_folder())
    fast = {"kv_cache_memory_bytes": 64 << 20, "own_process": False, "self_check": False}
    config = EngineConfig(
        model=model, engine="vllm", kv_budget_tokens=kv_budget_tokens, adapters=adapters or {}, dtype=dtype,
        memory_ratio=memory_ratio, engine_options={**fast, **options},
    )  # fmt: skip
    return start(config, model, scorer or ProjectionScorer())


def worker_of(engine: Engine):
    """vLLM's worker in this process."""
    return engine._core._client.engine_core.model_executor.driver_worker.worker


def random_mlp(hidden: int = 32, width: int = 16) -> MlpScorer:
    generator = torch.Generator().manual_seed(1)
    shapes = ((width, hidden), (width,), (1, width), (1,))
    weights = tuple(torch.randn(shape, generator=generator) / 4 for shape in shapes)
    return MlpScorer(ScorerInfo("mlp", hidden_size=hidden), weights)


def start_vllm(scorer=None, *, kv_budget_tokens=None, block_tokens=None, **options: object) -> SharedEngine:
    """Blocks have 32 tokens whatever is wished: vLLM's CPU kernels know no others."""
    engine = _shared_vllm(scorer or ProjectionScorer(), kv_budget_tokens, tuple(sorted(options.items())))
    engine.close()
    return engine


HAS_VLLM = find_spec("vllm") is not None
ENGINES: dict[str, Callable[..., Engine]] = {
    "local": start_local,
    "vllm": start_vllm,
    "vllm-async": functools.partial(start_vllm, async_scheduling=True),
    # As a version of vLLM that was not tried: no plain decode is planned here, and no branch copies blocks.
    "vllm-plain": functools.partial(start_vllm, async_scheduling=True, short_cuts=False),
}
# Asynchronous scheduling decides a step ahead: a token that is on its way when its trace loses its room is lost or
# late, and a trace is admitted a step before its first token comes.
LAG = {"vllm-async": 1, "vllm-plain": 1}


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


@contextmanager
def starting(name: str) -> Iterator[tuple[Callable[..., Engine], list[Engine]]]:
    """What starts engines of a kind, and those it has started: closed in the end."""
    if name.startswith("vllm") and not HAS_VLLM:
        import pytest  # here alone: benchmarks/vllm_cuda_check.py uses these set-ups without it

        pytest.skip("vLLM is not installed: scripts/install.sh brings its CPU build where there is one")
    started: list[Engine] = []

    def begin(*args, **options):
        started.append(ENGINES[name](*args, **options))
        return started[-1]

    begin.lag = LAG.get(name, 0)
    try:
        yield begin, started
    finally:
        for engine in started:
            engine.close()


EVERYWHERE = replace(RULE, think_end=None)  # thoughts are found to the end of a trace


def make_sequence(features=6, seed=0, **changes):
    shape = SequenceShape(features, **{"width": 16, "layers": 2, "heads": 2, **changes})
    torch.manual_seed(seed)
    return SequenceScorer(sequence_info(shape), SequenceNetwork(shape)).to(torch.device("cpu"))


@functools.cache
def sequence_scorer(position=StatePosition.BOUNDARY, max_thoughts=1024, aggregation=Aggregation.LAST):
    """Random, with attention that is sharp enough for the history to matter."""
    scorer = make_sequence(32, seed=4, max_thoughts=max_thoughts)
    with torch.no_grad():
        for parameter in scorer.network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
    info = ScorerInfo("sequence", state_position=position, hidden_size=32, aggregation=aggregation)
    return SequenceScorer(info, scorer.network)


@functools.cache
def expected_scores(scorer, tokens, rule=EVERYWHERE):
    """Length at each boundary -> the score, from one pass of transformers and one of the network."""
    with torch.inference_mode():
        states = tiny_model().model(input_ids=torch.tensor([[*PROMPT, *tokens]])).last_hidden_state[0]
        shift = 0 if scorer.info.state_position is StatePosition.BOUNDARY else -1
        ends = boundaries(rule, tokens)[0]
        at = [len(PROMPT) + end + shift for end in ends]
        scores = scorer.network(states[at][None])[0].sigmoid().tolist()
    return {end + 1: score for end, score in zip(ends, scores, strict=True)}


def check_scores(scorer, scored, tokens, rule=EVERYWHERE):
    """`scored`: trace -> {length: score}. Gives how far off a scorer without memory would be at most."""
    apart = []
    for trace, scores in scored.items():
        expected = expected_scores(scorer, tuple(tokens[trace]), rule)
        ends = list(expected)
        if ends and ends[-1] == len(tokens[trace]) and ends[-1] not in scores:
            assert scorer.info.state_position is StatePosition.BOUNDARY
            ends.pop()  # its last token was never fed
        assert list(scores) == ends, trace
        assert all(abs(expected[end] - scores[end]) < 1e-4 for end in ends), trace
        apart += [abs(expected[end] - expected[ends[0]]) for end in ends]
    return max(apart)


def check_search(scorer, watched, rule=EVERYWHERE):
    """`check_scores` for everything in the log of a search."""
    tree, scored = watched.search.record.tree, {}
    for event in watched.events:
        if isinstance(event, ev.Created):
            scored[event.trace] = {}
        elif isinstance(event, ev.Branched):
            scored[event.trace] = dict(scored[event.parent])
        elif isinstance(event, ev.Scored):
            for trace, score, length in zip(event.traces, event.scores, event.num_tokens, strict=True):
                scored[trace][length] = score
    return check_scores(scorer, scored, {trace.id: tree.tokens_of(trace.id) for trace in tree.traces}, rule)
