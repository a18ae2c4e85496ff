"""The recipe of a bench run, from flags or a YAML file: benchmarks, methods, sweeps, seeds."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gambit.bench.datasets import Benchmark, benchmark_for
from gambit.config import registry
from gambit.config.options import EngineConfig, Model, PresetSource, SearchConfig, Seed, build, unknown_key
from gambit.config.presets import PAPER, ModelDefaults, Preset, preset_for, resolve
from gambit.errors import UserError
from gambit.models.files import folder_on_disk, locate, named_model
from gambit.search.choice import GROUP, check_options, lacking, load_policy, options_model, with_fixed_pool
from gambit.storage.problems import COLUMNS, MANY_SUFFIXES, shard_of

Scalar: TypeAlias = bool | int | float | str
Positive = Annotated[int, Field(ge=1, le=10_000_000)]
ALL = "all"
ANY_LENGTH = 10_000_000  # stands for the length of a context, which no model is loaded to find out
HALVES = 2  # a warm-up is about half a trace (the paper: 12,000 of 23,500 tokens)
POLICY_OPTIONS = "policy_options"  # options of a policy's own, where a search config takes any
# One seed for all problems would give their traces the same random numbers: an accuracy over 300 problems would then
# vary with the luck of 64 traces, and the intervals, which take problems for independent, would be too narrow.
BENCH_DEFAULTS = {"own_noise": True}
# These have flags of their own in a bench: naming them twice would be a contradiction.
NOT_VARIED = {"policy": "--policies", "seed": "--seeds"}


class BenchConfig(BaseModel):
    """The comparison. Search and engine options stand beside these in a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    benchmarks: tuple[str, ...] = Field((), description="names or .jsonl files")
    policies: tuple[str, ...] = Field(("sc", "gambit"), description="search methods")
    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="each problem is searched once per seed")
    limit: Positive | None = Field(None, description="first problems of each benchmark only")
    problems: tuple[Positive, ...] = Field((), description="only the problems with these numbers, counted from 1")
    sweep: dict[str, tuple[Scalar, ...]] = Field(default_factory=dict, description="option -> values")
    sweep_mode: Literal["product", "each"] = Field(
        "product", description="every combination of swept options (product), or one option at a time (each)"
    )
    variants: dict[str, dict[str, Scalar]] = Field(default_factory=dict, description="name -> policy and options")
    concurrency: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="problems searched at a time")
    block: Positive | None = Field(None, description="problems after which the next method has its turn")
    shard: str = Field("1/1", pattern=r"^[1-9]\d*/[1-9]\d*$", description="i/n: every n-th problem from the i-th on")
    logs: bool = Field(True, description="keep every search's event log")
    columns: dict[str, str] = Field(default_factory=dict, description="question, answer, id -> a file's own column")

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        for name in columns:
            if name not in COLUMNS:
                raise ValueError(f"{name!r} is none of {', '.join(COLUMNS)}")
        return columns

    @field_validator("benchmarks", "policies", "seeds", "problems")
    @classmethod
    def _all_different(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        if len(set(values)) < len(values):
            raise ValueError("one is named twice")
        return values

    @property
    def shard_numbers(self) -> tuple[int, int]:
        """Returns the shard's number, from 0, and the number of shards."""
        return shard_of(self.shard)

    @property
    def block_size(self) -> int:
        """Returns the problems of a block, by default so many that its idle end is a small share of it."""
        return self.block or max(8, 4 * self.concurrency)


@dataclass(frozen=True, slots=True)
class BenchVariant:
    """One method under comparison: a policy and what it changes in the search options."""

    label: str
    policy: str
    changes: Mapping[str, Scalar]  # "policy_options.x" reaches into the policy's own options
    swept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchRecipe:
    """One bench run, complete: the same recipe on the same machine makes the same run."""

    bench: BenchConfig
    search: Mapping[str, object]  # as given; a preset fills the gaps
    engine: Mapping[str, object]

    def variants(self) -> list[BenchVariant]:
        """Returns the methods in the order of the report, each with a label of its own."""
        found = list(_variants(self.bench))
        if not found:
            raise UserError("no method is named: give policies or variants")
        labels = [variant.label for variant in found]
        for label in labels:
            if labels.count(label) > 1:
                raise UserError(f"two variants are called {label!r}: rename one")
        return found

    def search_config(self, variant: BenchVariant, seed: int, fixed: Mapping[str, object]) -> SearchConfig:
        """Returns the options of one search; `fixed` are those that the benchmark needs and the user may overrule."""
        values = {**BENCH_DEFAULTS, **fixed, **self.search}
        taken = options_model(load_policy(variant.policy)).model_fields
        own = {key: value for key, value in _mapping(values.pop(POLICY_OPTIONS, None)).items() if key in taken}
        for key, value in variant.changes.items():
            if key.startswith(f"{POLICY_OPTIONS}."):
                own[key.partition(".")[2]] = value
            else:
                values[key] = value
        if own:
            values[POLICY_OPTIONS] = own
        return build(SearchConfig, {**values, "policy": variant.policy, "seed": seed})

    def flat(self) -> dict[str, object]:
        """Returns its options as one mapping, as a recipe file holds them."""
        return {**self.bench.model_dump(mode="json"), **self.search, **self.engine}

    def lacking(self) -> list[str]:
        """Returns what its methods need and this machine does not have, each once."""
        configs = (self.search_config(variant, 0, {}) for variant in self.variants())
        return list(dict.fromkeys(missing for config in configs if (missing := lacking(config)) is not None))

    def check(self) -> None:
        """Raises for what could run nowhere, before a model is loaded."""
        if not self.bench.benchmarks:
            raise UserError("no benchmark is named: --benchmark pawn, --benchmark FILE.jsonl, …")
        if self.bench.columns and not any(Path(name).suffix.lower() in MANY_SUFFIXES for name in self.bench.benchmarks):
            raise UserError(f"--map names the columns of a file, and {', '.join(self.bench.benchmarks)} is none")
        if self.bench.problems and self.bench.limit is not None:
            raise UserError("--problems names problems and --limit counts them: give one of both")
        self.bench.shard_numbers  # noqa: B018 # refuses a shard that does not exist
        build(EngineConfig, self.engine)
        for variant in self.variants():
            config = self.search_config(variant, 0, {})
            check_options(config)
            if config.preset is PresetSource.AUTO:
                raise UserError("preset auto learns from earlier problems, so that results would depend on their "
                                "order: give swap_size, check_interval and warmup_tokens instead")  # fmt: skip
        models = [options_model(load_policy(variant.policy)) for variant in self.variants()]
        known = {name: None for model in models for name in model.model_fields}
        for name in _mapping(self.search.get(POLICY_OPTIONS)):
            if name not in known:
                raise UserError(f"no policy that is compared has such an option: {unknown_key(name, known)}")


def recipe_from(values: Mapping[str, object]) -> BenchRecipe:
    """Makes a recipe from flat options; an unknown one is an error."""
    known = {**BenchConfig.model_fields, **SearchConfig.model_fields, **EngineConfig.model_fields}
    for key in values:
        if key in NOT_VARIED:
            raise UserError(f"{key!r} is no option of a bench: use {NOT_VARIED[key]}")
        if key not in known:
            raise UserError(unknown_key(key, known))

    def given(kind: type[Model]) -> Model:
        return build(kind, {key: value for key, value in values.items() if key in kind.model_fields})

    def plain(kind: type[BaseModel]) -> dict[str, object]:
        checked = given(kind).model_dump(mode="json")
        return {key: checked[key] for key in values if key in checked}  # in the order in which they were given

    return BenchRecipe(given(BenchConfig), plain(SearchConfig), plain(EngineConfig))


def with_methods(values: Mapping[str, object], methods: Iterable[str]) -> dict[str, object]:
    """Returns a recipe's options for these methods alone: each is a variant of the recipe or a policy."""
    variants, methods = _mapping(values.get("variants")), list(methods)
    strange = [name for name in methods if name not in variants and ":" not in name and not registry.knows(GROUP, name)]
    if len(strange) > 1:  # a single one is refused where the policy is loaded
        raise UserError(" ".join(unknown_key(name, dict.fromkeys(registry.names(GROUP)), "policy") for name in strange))
    chosen = {name: variants[name] for name in methods if name in variants}
    return {**values, "policies": [name for name in methods if name not in chosen], "variants": chosen}


def default_options() -> dict[str, object]:
    """Returns the options of searches and engines where none is given, but for those that a benchmark may set."""
    every = {**SearchConfig().model_dump(mode="json"), **EngineConfig().model_dump(mode="json"), **BENCH_DEFAULTS}
    return {name: value for name, value in every.items() if name not in (*NOT_VARIED, "answer")}


# -- variants --------------------------------------------------------------------------------------------------


def _variants(bench: BenchConfig) -> Iterator[BenchVariant]:
    sweeps = [(*_swept(key, values, bench.policies), values) for key, values in bench.sweep.items()]
    for policy in bench.policies:
        mine = [(option, values) for policies, option, values in sweeps if policy in policies]
        if not mine or bench.sweep_mode == "each":
            yield BenchVariant(policy, policy, {})
        for changes in _combinations(mine, bench.sweep_mode):
            swept = ", ".join(f"{key}={value}" for key, value in changes.items())
            yield BenchVariant(f"{policy} {swept}", policy, changes, tuple(changes))
    for label, options in bench.variants.items():
        yield _named(label, options)


def _swept(key: str, values: Sequence[Scalar], policies: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Reads `option` (of gambit if that is compared, else of all), `policy:option` or `all:option`."""
    policy, colon, option = key.rpartition(":")
    if not colon:
        policy = "gambit" if "gambit" in policies else ALL
    if policy not in (ALL, *policies):
        raise UserError(f"sweep {key}: the policy {policy!r} is not among those compared ({', '.join(policies)})")
    if not values:
        raise UserError(f"sweep {key}: no value is given")
    _check_option(option, f"sweep {key}")
    return (policies if policy == ALL else (policy,)), option


def _combinations(sweeps: Sequence[tuple[str, Sequence[Scalar]]], mode: str) -> Iterator[dict[str, Scalar]]:
    if mode == "each":
        yield from ({option: value} for option, values in sweeps for value in values)
    elif sweeps:
        options, columns = zip(*sweeps, strict=True)
        yield from (dict(zip(options, values, strict=True)) for values in itertools.product(*columns))


def _named(label: str, options: Mapping[str, Scalar]) -> BenchVariant:
    if not label.strip():
        raise UserError(f"a variant with {dict(options)} has no name: give it one")
    changes = dict(options)
    policy = str(changes.pop("policy", "gambit"))
    for key in changes:
        _check_option(key, f"variant {label!r}")
    return BenchVariant(label, policy, changes)


def _check_option(option: str, where: str) -> None:
    name, dot, _ = option.partition(".")
    if name in NOT_VARIED:
        raise UserError(f"{where}: {name!r} is varied with {NOT_VARIED[name]}")
    if name in EngineConfig.model_fields:
        raise UserError(f"{where}: {name!r} belongs to the engine, and a run has one engine: make one run per value")
    if name not in SearchConfig.model_fields or bool(dot) != (name == POLICY_OPTIONS):
        known = {name: None for name in SearchConfig.model_fields if name not in NOT_VARIED}
        raise UserError(f"{where}: {unknown_key(option, known)}")


def _mapping(value: object) -> Mapping[str, Scalar]:
    return value if isinstance(value, dict) else {}


# -- dry runs --------------------------------------------------------------------------------------------------


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
        """Returns the tokens if every trace were written in full."""
        return self.num_searches * self.num_traces * self.trace_tokens


def planned_searches(recipe: BenchRecipe) -> Iterator[PlannedSearches]:
    """Yields the searches in the order of a report; reads files of problems, downloads nothing."""
    model = build(EngineConfig, recipe.engine).model
    source = model if named_model(model) is None else locate(model)  # which downloads what is no name of ours
    preset = preset_for(source, folder_on_disk(source))
    for benchmark in (benchmark_for(name, recipe.bench.columns) for name in recipe.bench.benchmarks):
        num_problems = _num_problems(recipe, benchmark)
        for variant in recipe.variants():
            num_traces, trace_tokens = _size(recipe, variant, preset)
            num_searches = num_problems * len(recipe.bench.seeds)
            yield PlannedSearches(variant.label, benchmark.name, num_problems, num_searches, num_traces, trace_tokens)


def _num_problems(recipe: BenchRecipe, benchmark: Benchmark) -> int:
    """Returns the number of problems in this shard."""
    limit, numbers = recipe.bench.limit, recipe.bench.problems
    known = benchmark.num_items
    if numbers and known is not None and max(numbers) > known:
        raise UserError(f"{benchmark.name} has {known} problems, there is no number {max(numbers)}")
    if known is None:
        count = sum(1 for _ in benchmark.first(limit, numbers))
    else:
        count = len(numbers) or min(known, limit or known)
    number, shards = recipe.bench.shard_numbers
    return len(range(number, count, shards))


def _size(recipe: BenchRecipe, variant: BenchVariant, preset: Preset) -> tuple[int, int]:
    """Returns traces of a search and tokens of a trace: the preset's length, or twice the warm-up if not swept."""
    config = recipe.search_config(variant, recipe.bench.seeds[0], {})
    used = PAPER if config.preset is PresetSource.PAPER else preset
    settings, _ = resolve(with_fixed_pool(config), ModelDefaults(used), ANY_LENGTH, is_probability=True)
    usual = used.median_length or HALVES * (used.warmup_tokens or settings.pool.warmup_tokens)
    return settings.num_traces, min(int(usual), settings.max_new_tokens)


# Generated tokens a second on one H200 with vLLM and random weights of the model's shape: of 256 short traces (medians
# of benchmarks/results/gpu_speed.json, gpu_speed_8b.json and gpu_speed_phi4.json), and of 64 traces of 12,000 tokens,
# half-way through 24,000 (stock attention in forest_speed_qwen3-4b.json and forest_speed_qwen3-8b.json).
RATES: Mapping[str, tuple[int, int | None]] = {
    "qwen3-4b-thinking-2507": (23_800, 2_520),
    "deepseek-r1-0528-qwen3-8b": (21_500, 2_360),
    "phi-4-reasoning-plus": (12_600, None),
}
LONG_TRACE = 8_000  # tokens; shorter ones keep about the pace of their first steps


def outlook(recipe: BenchRecipe, planned: Sequence[PlannedSearches]) -> Iterator[str]:
    """Yields the sentences. Hours are computed from a measured rate, and left open for other models."""
    engine = build(EngineConfig, recipe.engine)
    needs = "" if engine.scorer != "auto" else ", the model's own"
    seeds = ", ".join(map(str, recipe.bench.seeds))
    configs = [recipe.search_config(variant, recipe.bench.seeds[0], {}) for variant in recipe.variants()]
    limits = sorted({config.max_new_tokens for config in configs if config.max_new_tokens is not None})
    most = " or ".join(f"{limit:,}" for limit in limits) if limits else "as many as the preset says"
    yield f"scorer: {engine.scorer}{needs}; seeds: {seeds}; new tokens of a trace: {most}"
    short, long = RATES.get(engine.model.rstrip("/").rpartition("/")[2].lower(), (None, None))
    if short is None:
        yield "hours are not computed: the speed of this model has not been measured"
        return
    num_tokens, are_long = sum(each.num_tokens for each in planned), any(p.trace_tokens >= LONG_TRACE for p in planned)
    rate, measured = (long, "64 traces of 12,000 tokens") if are_long and long else (short, "256 short traces")
    about, rest = ("at least", "; long ones are several times slower") if are_long and not long else ("about", "")
    yield (
        f"{about} {max(num_tokens / rate / 3600, 0.1):,.1f} hours on one H200, computed: {num_tokens:,} tokens at "
        f"{rate:,} a second, measured with {measured}{rest}"
    )
