"""Makes the settings of one run from a model's preset, its earlier runs and the user's options."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field

from gambit.answers import AnswerKind
from gambit.config.options import (
    BranchPoint,
    Compat,
    MinP,
    PoolSize,
    PresetSource,
    SearchConfig,
    Temperature,
    Tokens,
    TokensOrNone,
    TopP,
    check_swap,
)
from gambit.config.trust import RULES, USUAL_FLOOR, Doubt, ScorerTrust, TrustRule, reason_for, rule_for
from gambit.errors import UserError
from gambit.results.vote import Consensus
from gambit.storage.files import read_record
from gambit.text.prompts import DEFAULT_SYSTEM_PROMPT
from gambit.types import Forcing, PoolSettings, Sampling

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
DEFAULT_CAPACITY = 64
DEFAULT_MAX_NEW_TOKENS = 32_768
PRESET_FILE = "gambit.json"  # in a model's folder
Length = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings that travel with a model and suit its traces, and the lengths of these traces."""

    capacity: PoolSize | None = None
    islands: PoolSize | None = None
    swap_size: PoolSize | None = None
    check_interval: Tokens | None = None
    warmup_tokens: TokensOrNone | None = None
    max_new_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TokensOrNone | None = None
    min_p: MinP | None = None
    system_prompt: str | None = None
    median_length: Length | None = None  # of completed traces, in tokens
    mean_thought_length: Length | None = None  # in tokens


PAPER = Preset(capacity=256, swap_size=16, check_interval=200, warmup_tokens=12_000, max_new_tokens=60_000)
# For the paper's models without `--preset paper`: a pool of a quarter, which one GPU holds.
PAPER_MODEL = dataclasses.replace(PAPER, capacity=DEFAULT_CAPACITY, swap_size=4)
_PAPER_MODELS = ("qwen3-4b-thinking-2507", "deepseek-r1-0528-qwen3-8b", "phi-4-reasoning-plus")


def preset_for(model: str, folder: Path | None) -> Preset:
    """Returns the preset in a model's folder, or one of the paper's rules for the paper's models, or an empty one.

    Unknown keys of the file are notes for people.
    """
    if folder is not None and (path := folder / PRESET_FILE).is_file():
        return read_record(Preset, path, "a preset", "mend it, or take it away")
    is_paper_model = model.rstrip("/").rpartition("/")[2].lower() in _PAPER_MODELS
    return PAPER_MODEL if is_paper_model else Preset()


def system_prompt_of(config: SearchConfig, preset: Preset, *, has_tools: bool = False) -> str | None:
    """Returns the user's, else the model's, else the default for boxed answers; None for none.

    A request to box the answer would keep a model from calling tools, and from writing JSON.
    """
    if has_tools or config.answer is AnswerKind.JSON:
        return config.system_prompt or None
    usual = DEFAULT_SYSTEM_PROMPT.removesuffix(".") if config.compat is Compat.AUTHORS else DEFAULT_SYSTEM_PROMPT
    return _first(config.system_prompt, preset.system_prompt, usual) or None


@dataclass(frozen=True, slots=True)
class SearchPart:
    """The share of one engine in a search that is spread over several: some islands, or some independent traces."""

    islands: range | None = None  # None: all
    first_trace: int = 0  # its traces draw the random numbers of the whole search's from this one on


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """One run's settings, nothing left open."""

    policy: str
    capacity: int
    num_traces: int
    pool: PoolSettings
    hard_floor: float | None
    child_temperature: float
    branch_point: BranchPoint
    ghost_parents: bool
    max_new_tokens: int
    sampling: Sampling
    budget_tokens: int | None
    budget_seconds: float | None
    budget_traces: int | None
    consensus: Consensus | None = None
    first_traces: int | None = None  # None: all at once
    is_probability: bool = False  # scores are chances
    doubt: Doubt | None = None  # None: the pool stays as it is
    forcing: Forcing | None = None  # None: no trace is ever forced to answer
    policy_options: BaseModel | None = None  # checked by the policy's own model; None: its defaults
    part: SearchPart | None = None  # None: all of the search
    own_limit: bool = False  # max_new_tokens are a child's own

    @property
    def num_first(self) -> int:
        """Returns the number of traces that the search begins with."""
        return self.capacity if self.first_traces is None else min(self.capacity, self.first_traces)

    @property
    def most_at_once(self) -> int:
        """Returns how many traces run at a time; of a search in rounds the last one, at most half of all, has most."""
        if self.first_traces is None:
            return self.capacity
        return min(self.capacity, max(self.first_traces, -(-self.num_traces // 2)))

    def options_of(self, kind: type[Model]) -> Model:
        """Returns the policy's own options."""
        options = kind() if self.policy_options is None else self.policy_options
        assert isinstance(options, kind), f"options of another policy: {options!r}"
        return options

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for the log's header, which is that of the whole search."""
        options = self.policy_options.model_dump(mode="json") if self.policy_options is not None else {}
        values = dataclasses.asdict(dataclasses.replace(self, policy_options=None, part=None))
        del values["part"], values["pool"]
        if not self.own_limit:
            del values["own_limit"]  # as in older logs
        return values | dataclasses.asdict(self.pool) | {"policy_options": options}


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """The defaults that come with a model; the lengths in its preset may be those of earlier runs."""

    preset: Preset = Preset()
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)  # its generation_config


def resolve(
    config: SearchConfig,
    defaults: ModelDefaults,
    context_left: int,
    *,
    is_probability: bool,
    trust: ScorerTrust | None = None,
    policy_options: BaseModel | None = None,
    room_tokens: int | None = None,
    weight: Callable[[int], int] = int,
) -> tuple[SearchSettings, list[str]]:
    """Returns the settings of one run, and warnings; `context_left` is what the context leaves after the prompt.

    `is_probability`: scores are chances; only those have a floor. `trust`: in the scorer; open settings of islands,
    swaps and warm-up follow from it. `room_tokens`: what the prompt leaves of the KV cache; None if it is not known.
    `weight`: from the length of a trace to the tokens that it takes of this room.
    """
    preset = _preset_of(config, defaults)
    longest = _first(config.max_new_tokens, preset.max_new_tokens, DEFAULT_MAX_NEW_TOKENS)
    max_new_tokens = min(longest, context_left)
    median = preset.median_length or (trust.median_tokens if trust else None)
    half_trace = int(median / 2) if median else min(12_000, max_new_tokens // 2)
    capacity, notes = resolved_capacity(config, defaults), list[str]()
    if room_tokens is not None:
        usual_warmup = _first(config.warmup_tokens, preset.warmup_tokens, half_trace)
        capacity, notes = _fitting_capacity(config, capacity, room_tokens, usual_warmup, weight)
    num_traces = _first(config.num_traces, capacity)
    pool, rule, doubt = _pool(
        config, preset, trust, capacity=capacity, most_islands=min(capacity, num_traces), half_trace=half_trace,
        is_probability=is_probability,
    )  # fmt: skip
    usual_floor = USUAL_FLOOR if rule is None or rule.has_floor else 0.0
    settings = SearchSettings(
        policy=config.policy_name,
        capacity=capacity,
        num_traces=num_traces,
        pool=pool,
        is_probability=is_probability,
        doubt=doubt,
        hard_floor=(_first(config.hard_floor, usual_floor) or None) if is_probability else None,
        child_temperature=config.child_temperature,
        own_limit=config.own_limit,
        branch_point=config.branch_point,
        ghost_parents=config.ghost_parents,
        max_new_tokens=max_new_tokens,
        sampling=_sampling(config, preset, defaults.sampling),
        budget_tokens=config.budget_tokens,
        budget_seconds=config.budget_seconds,
        budget_traces=config.budget_traces,
        consensus=config.consensus,
        first_traces=config.first_traces if (config.first_traces or num_traces) < num_traces else None,
        policy_options=policy_options,
    )
    return settings, [*notes, *_check(settings, config, context_left)]


def num_fitting(room_tokens: int, warmup_weight: int) -> int:
    """Returns how many traces the KV cache holds when each has written a warm-up, which is when branching begins."""
    return room_tokens // max(1, warmup_weight)


def _fitting_capacity(
    config: SearchConfig, capacity: int, room_tokens: int, warmup_tokens: int, weight: Callable[[int], int]
) -> tuple[int, list[str]]:
    """Lowers a capacity that nobody has set to what the KV cache holds, and notes it; the paper's pool stays."""
    if config.capacity is not None or config.preset is PresetSource.PAPER:
        return capacity, []
    islands = config.islands if isinstance(config.islands, int) else 1
    least = max(1, islands, config.swap_size or 1, config.first_traces or 1)
    fitting = max(num_fitting(room_tokens, weight(warmup_tokens)), least)
    if fitting >= capacity:
        return capacity, []
    note = (f"the pool has {fitting} places instead of {capacity}: so many traces fit into the KV cache when each has "
            f"written its warm-up of {warmup_tokens:,} tokens; --capacity sets another number")  # fmt: skip
    return fitting, [note]


def resolved_capacity(config: SearchConfig, defaults: ModelDefaults) -> int:
    """Returns the capacity before it is known how many traces the KV cache holds."""
    return _first(config.capacity, _preset_of(config, defaults).capacity, DEFAULT_CAPACITY)


def _preset_of(config: SearchConfig, defaults: ModelDefaults) -> Preset:
    if config.preset is PresetSource.AUTO:  # the pool's settings are worked out from the lengths
        return dataclasses.replace(defaults.preset, swap_size=None, check_interval=None, warmup_tokens=None)
    return PAPER if config.preset is PresetSource.PAPER else defaults.preset


def _first(*values: T | None) -> T:
    """Returns the first that is given; the last always is."""
    return next(value for value in values if value is not None)


def _pool(
    config: SearchConfig,
    preset: Preset,
    trust: ScorerTrust | None,
    *,
    capacity: int,
    most_islands: int,
    half_trace: int,
    is_probability: bool,
) -> tuple[PoolSettings, TrustRule | None, Doubt | None]:
    """Returns how a search's traces compete, their rule, and the doubt that may turn it to a safer one.

    Each island has a place and a trace to complete, so that there are no more than `most_islands`. `half_trace` is in
    tokens.
    """
    swap_size = _first(config.swap_size, _scaled_swap(preset, capacity), max(1, capacity // 16))
    warmup = _first(config.warmup_tokens, preset.warmup_tokens, half_trace)

    def pool(islands: int, swaps: int, warmup_tokens: int, why: str, margin: float = 0.0) -> PoolSettings:
        usual = max(1, round(max(preset.mean_thought_length or 0.0, warmup_tokens / 60)))
        interval = _first(config.check_interval, preset.check_interval, usual)
        margin = _first(config.swap_margin, margin if is_probability else 0.0)
        return PoolSettings(islands, swaps, interval, warmup_tokens, why, margin)

    if config.policy != "gambit":  # only Gambit's own has several islands
        return pool(1, swap_size, warmup, ""), None, None
    given, source = _given_islands(config, preset)
    if given is not None:
        if given > most_islands:
            raise UserError(
                f"islands = {given}: a pool that completes {most_islands} traces has at most as many islands"
            )
        return pool(given, swap_size, warmup, f"islands = {given} is {source}"), None, None

    def by_rule(rule: TrustRule, divides: int = 1) -> tuple[int, int, int]:
        """Returns M, K and w. `divides`: islands that there are already, each to be divided into equally many."""
        wanted = max(1, most_islands // rule.island_size)
        islands = divides * min(-(-wanted // divides), most_islands // divides)
        swaps = _first(config.swap_size, min(capacity, islands * rule.swaps_per_island))
        least_warmup = max(warmup, round(2 * half_trace * rule.least_warmup))
        return islands, swaps, _first(config.warmup_tokens, least_warmup)

    rule = rule_for(trust)
    chosen = pool(*by_rule(rule), reason_for(trust), rule.margin)
    safer: list[tuple[float, PoolSettings]] = []
    if trust is not None and trust.spread:
        divides = chosen.islands
        for other in (each for each in RULES if each.from_auc < rule.from_auc):  # a search may fall back more than once
            islands, swaps, warmup_tokens = by_rule(other, divides)
            if islands > divides:
                divides = islands
                fallback = dataclasses.replace(chosen, islands=islands, swap_size=swaps, warmup_tokens=warmup_tokens)
                safer.append((other.from_auc, fallback))
    doubt = Doubt(trust.halfway, trust.spread, is_probability, tuple(safer)) if trust and safer else None
    return chosen, rule, doubt


def _given_islands(config: SearchConfig, preset: Preset) -> tuple[int | None, str]:
    """Returns an explicit number of islands and its source; None if it follows from the scorer."""
    if config.islands is not None:
        return (None, "") if config.islands == "auto" else (config.islands, "given")
    if config.preset is PresetSource.PAPER:
        return 1, "the paper's pool"
    return preset.islands, "the model's preset"


def _scaled_swap(preset: Preset, capacity: int) -> int | None:
    """Returns a preset's K, scaled: it belongs to the preset's C, and a smaller pool swaps proportionally fewer."""
    if preset.swap_size is None or preset.capacity is None:
        return preset.swap_size
    return max(1, round(preset.swap_size * capacity / preset.capacity))


def _sampling(config: SearchConfig, preset: Preset, model: Mapping[str, float]) -> Sampling:
    fallback = Sampling()
    return Sampling(
        temperature=_first(config.temperature, preset.temperature, model.get("temperature"), fallback.temperature),
        top_p=_first(config.top_p, preset.top_p, model.get("top_p"), fallback.top_p),
        top_k=int(_first(config.top_k, preset.top_k, model.get("top_k"), fallback.top_k)),
        min_p=_first(config.min_p, preset.min_p, model.get("min_p"), fallback.min_p),
        seed=config.seed,
    )


def _check(settings: SearchSettings, config: SearchConfig, context_left: int) -> list[str]:
    pool = settings.pool
    check_swap(pool.swap_size, settings.capacity)
    warnings = []
    if config.max_new_tokens is not None and config.max_new_tokens > context_left:
        warnings.append(f"max_new_tokens {config.max_new_tokens} is cut to {context_left}, what the context leaves")
    if settings.policy == "gambit" and pool.islands == 1 and settings.num_traces > settings.capacity:
        warnings.append(f"num_traces {settings.num_traces} is above the capacity {settings.capacity}: one island has "
                        f"{settings.capacity} roots and adds traces by branching alone, so that it may end with fewer; "
                        "raise --capacity, or give --islands 2 or more")  # fmt: skip
    first = settings.first_traces
    is_asked = config.effort is None  # a medium effort begins with whole islands, however many that makes
    if is_asked and settings.policy == "gambit" and first is not None and first * pool.islands < settings.num_traces:
        warnings.append(f"first_traces {first} is less than an island: the search begins with a whole "
                        f"one, {-(-settings.num_traces // pool.islands)} traces")  # fmt: skip
    if settings.policy == "gambit" and pool.warmup_tokens >= settings.max_new_tokens:
        warnings.append(f"the warm-up of {pool.warmup_tokens} tokens leaves a trace of at most "
                        f"{settings.max_new_tokens} tokens no room: nothing can ever branch")  # fmt: skip
    return warnings
