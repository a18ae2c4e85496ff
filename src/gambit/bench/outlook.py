"""The lines of a dry run that follow its size: scorer, seeds, the limit of a trace, and hours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gambit.bench.recipe import BenchRecipe
from gambit.config.options import EngineConfig, build

# Generated tokens a second of 256 traces at a time on one H200 with vLLM, their thoughts scored, with random weights of
# the model's shape: medians of benchmarks/results/gpu_speed.json, gpu_speed_8b.json and gpu_speed_phi4.json.
RATES: Mapping[str, int] = {
    "qwen3-4b-thinking-2507": 23_800,
    "deepseek-r1-0528-qwen3-8b": 21_500,
    "phi-4-reasoning-plus": 12_600,
}


def outlook(recipe: BenchRecipe, num_tokens: int) -> Iterator[str]:
    """Yields the sentences. Hours are computed from a measured rate, and left open for other models."""
    engine = build(EngineConfig, recipe.engine)
    needs = "" if engine.scorer != "auto" else ", the model's own"
    seeds = ", ".join(map(str, recipe.bench.seeds))
    configs = [recipe.search_config(variant, recipe.bench.seeds[0], {}) for variant in recipe.variants()]
    limits = sorted({config.max_new_tokens for config in configs if config.max_new_tokens is not None})
    most = " or ".join(f"{limit:,}" for limit in limits) if limits else "as many as the preset says"
    yield f"scorer: {engine.scorer}{needs}; seeds: {seeds}; new tokens of a trace: {most}"
    rate = RATES.get(engine.model.rstrip("/").rpartition("/")[2].lower())
    if rate is None:
        yield "hours are not computed: the speed of this model has not been measured"
    else:
        hours = num_tokens / rate / 3600
        yield (
            f"about {max(hours, 0.1):,.1f} hours on one H200, computed: {num_tokens:,} tokens at {rate:,} a second, "
            "the rate measured with 256 short traces; long traces are slower"
        )
