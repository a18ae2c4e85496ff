"""What a bench run would do, worked out without a model: its searches, and about how many tokens they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gambit.bench.datasets import Benchmark, benchmark_for
from gambit.bench.recipe import BenchRecipe, BenchVariant
from gambit.config.options import EngineConfig, PresetSource, build
from gambit.config.presets import PAPER, ModelDefaults, Preset, preset_for, resolve
from gambit.models.files import folder_on_disk, locate, named_model
from gambit.search.choice import with_fixed_pool

ANY_LENGTH = 10_000_000  # no model is asked how long its context is
HALVES = 2  # a warm-up is about half a trace (the paper: 12,000 of 23,500 tokens)


@dataclass(frozen=True, slots=True)
class PlannedSearches:
    """The searches of one method on one benchmark."""

    variant: str
    benchmark: str
    num_problems: int
    num_searches: int
    num_traces: int  # of one search
    trace_tokens: int  # of one trace, about

    @property
    def num_tokens(self) -> int:
        """Were every trace written in full."""
        return self.num_searches * self.num_traces * self.trace_tokens


def planned_searches(recipe: BenchRecipe) -> Iterator[PlannedSearches]:
    """In the order of a report; reads files of problems, downloads nothing."""
    engine = build(EngineConfig, recipe.engine)
    preset = _preset(engine.model)
    for benchmark in (benchmark_for(name, recipe.bench.columns) for name in recipe.bench.benchmarks):
        num_problems = _num_problems(recipe, benchmark)
        for variant in recipe.variants():
            num_traces, trace_tokens = _size(recipe, variant, preset)
            num_searches = num_problems * len(recipe.bench.seeds)
            yield PlannedSearches(variant.label, benchmark.name, num_problems, num_searches, num_traces, trace_tokens)


def _preset(model: str) -> Preset:
    source = model if named_model(model) is None else locate(model)  # which downloads what is no name of ours
    return preset_for(source, folder_on_disk(source))


def _num_problems(recipe: BenchRecipe, benchmark: Benchmark) -> int:
    """Of this shard."""
    limit = recipe.bench.limit
    known = benchmark.num_items
    count = sum(1 for _ in benchmark.first(limit)) if known is None else min(known, limit or known)
    number, shards = recipe.bench.part
    return len(range(number, count, shards))


def _size(recipe: BenchRecipe, variant: BenchVariant, preset: Preset) -> tuple[int, int]:
    """Traces of a search, and tokens of a trace: the preset's length, or twice the warm-up of what is not swept."""
    config = recipe.search_config(variant, recipe.bench.seeds[0], {})
    used = PAPER if config.preset is PresetSource.PAPER else preset
    settings, _ = resolve(with_fixed_pool(config), ModelDefaults(used), ANY_LENGTH, is_probability=True)
    usual = used.median_length or HALVES * (used.warmup_tokens or settings.warmup_tokens)
    return settings.num_traces, min(int(usual), settings.max_new_tokens)
