"""Starts vLLM with Gambit's scheduler and worker, and refuses options and scorers that cannot work there."""

import hashlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gambit.config.options import EngineConfig
from gambit.engines.base import SearchSpec
from gambit.engines.vllm import note_on
from gambit.engines.vllm.engine import VllmEngine
from gambit.engines.vllm.messages import DecodeAttention, GambitConfig
from gambit.engines.vllm.schemas import SchemaChecker
from gambit.errors import EngineError, GambitWarning, UserError, first_line, install_line
from gambit.models.files import SCORER_FILE, adapter_rank
from gambit.scorers.base import HistoryScorer, Scorer, SplitScorer
from gambit.storage.files import package_version
from gambit.storage.folders import cache_folder
from gambit.text.boundary import BoundaryRule
from gambit.text.tokenizers import Tokenizer, load_tokenizer
from gambit.types import Eviction, OnPressure, PressureAction, RunningScore, Sampling, TraceKey, TraceSpec

_LOG = logging.getLogger(__name__)
COMPAT = "gambit.engines.vllm.compat"
WORKER = f"{COMPAT}.worker.GambitWorker"
CPU_KV_BYTES = 2 << 30  # of the KV cache, where memory is shared with everything else
CPU_BLOCK_TOKENS = 32  # vLLM's own default there, 128, recomputes up to 127 tokens per branch
OWN_OPTIONS = {
    "exact_noise": None, "own_process": None, "self_check": True, "short_cuts": None, "fused_scorer": None,
    "attention": DecodeAttention.STOCK.value,
}  # fmt: skip
ATTENTION_OPTIONS = ("attention_backend", "attention_config")  # vLLM's own
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has room
_OURS = ("worker_cls", "scheduler_cls", "scheduling_policy", "enable_prefix_caching", "additional_config", "model")
_REFUSED = {
    "speculative_config": "a step would give a trace several tokens, and states for tokens that are then rejected",
    "pipeline_parallel_size": "states and scores would be on another stage than the one that reports",
    "decode_context_parallel_size": "states would be spread over ranks",
    "prefill_context_parallel_size": "states would be spread over ranks",
}


def start_vllm(config: EngineConfig, model: str, scorer: Scorer, tokenizer: Tokenizer | None = None) -> VllmEngine:
    """Starts vLLM in this process or in one of its own, and checks that Gambit works inside it.

    `model` is a folder or a hub name. `config.engine_options` go to vLLM as they are, but for our own. vLLM itself sees
    token ids only; `tokenizer` is for models that bring none, in measurements.
    """
    if find_spec("vllm") is None:
        raise UserError(f"vLLM is not installed: {install_line('vllm')}, or use --engine local")
    # Where a thought ends is known in the scheduler, which receives scores but no states.
    is_in_one = not isinstance(scorer, SplitScorer)
    if is_in_one and scorer.info.needs_confidence and scorer.info.hidden_size is not None:
        raise UserError(f"the scorer {scorer.info.architecture!r} needs states and confidences together: the vllm "
                        "engine needs one that takes them in turn (`part`, `whole`), use --engine local")  # fmt: skip
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from gambit.engines.vllm.compat import core as vllm_build  # here: vLLM takes seconds to import

    device = vllm_build.device_type()
    if (note := note_on(vllm_build.VERSION, device)) is not None:
        warnings.warn(note, GambitWarning, stacklevel=2)
    if config.device != "auto" and config.device.partition(":")[0] != device:
        raise UserError(f"device {config.device!r}: this vLLM is built for {device!r}")
    is_tested, is_cpu = note is None, device == "cpu"
    own = {name: config.engine_options.get(name, default) for name, default in OWN_OPTIONS.items()}
    tokenizer = tokenizer or load_tokenizer(model)
    gambit = GambitConfig(
        scorer,
        exact_noise=own["exact_noise"] is not False,
        kv_budget_tokens=config.kv_budget_tokens,
        short_cuts=is_tested if own["short_cuts"] is None else bool(own["short_cuts"]),
        fused_scorer=not is_cpu if own["fused_scorer"] is None else bool(own["fused_scorer"]),
        attention=_attention(own["attention"], config.engine_options, is_tested=is_tested),
        adapters=config.adapters,
    )
    # In this process by default: nothing then happens between two steps, and a seed gives the same tree again.
    is_apart_by_default = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1"
    own_process = is_apart_by_default if own["own_process"] is None else bool(own["own_process"])
    with _multiprocessing(own_process):
        vllm_config = _vllm_config(_options(config, weights_folder(model), gambit, is_cpu))
        vllm_build.check_layers(vllm_config, scorer.info.layers)
        # vLLM's noise is of the same kind and as repeatable, and its sampler makes it at no cost on a GPU.
        if own["exact_noise"] is None and not is_cpu and vllm_build.has_seeded_noise(vllm_config):
            vllm_build.use_vllm_noise(vllm_config)
        try:
            core = vllm_build.VllmCore(vllm_config, own_process=own_process)
        except Exception as error:
            hint = "; if that is memory, free some, or change --memory-ratio or --kv-budget-tokens" * own_process
            raise EngineError(f"vLLM does not start: {first_line(error)}{hint}") from error
    info = vllm_build.engine_info(vllm_config, model, {"torch": package_version("torch") or "unknown"})
    engine = VllmEngine(core, info, tokenizer, remembers=isinstance(scorer, HistoryScorer))
    engine.schemas = SchemaChecker(model, vllm_build.vocab_size(vllm_config))
    if own["self_check"] and not fits(engine):
        warnings.warn(
            "the KV budget is too small for vLLM's self-check, which is left out", GambitWarning, stacklevel=2
        )
    elif own["self_check"]:
        try:
            self_check(engine, vllm_build.vocab_size(vllm_config))
        except BaseException:
            engine.close()
            raise
    return engine


def _attention(option: object, options: Mapping[str, Any], *, is_tested: bool) -> DecodeAttention:
    """Returns what the option `attention` names; stock attention for "auto" where forest attention cannot be used."""
    if option not in list(DecodeAttention):
        raise UserError(f"engine option attention={option!r}: choose one of {', '.join(DecodeAttention)}")
    attention = DecodeAttention(str(option))
    if attention is DecodeAttention.STOCK:
        return attention
    from gambit.engines.vllm.compat import forest

    chosen = [name for name in ATTENTION_OPTIONS if options.get(name) is not None]
    reason = f"{chosen[0]}={options[chosen[0]]!r} is given" if chosen else forest.why_not()
    if attention is DecodeAttention.FOREST and reason is not None:
        raise UserError(f"engine option attention=forest cannot be used: {reason}; leave it out, or use attention=auto")
    if attention is DecodeAttention.AUTO and (reason is not None or not is_tested):
        _LOG.info("vLLM's own attention is used, not forest attention: %s", reason or "this version was not tried")
        return DecodeAttention.STOCK
    return attention


@contextmanager
def _multiprocessing(own_process: bool) -> Iterator[None]:
    """Sets the environment from which vLLM reads where the core lives and how its process begins.

    Spawned, not forked: the front has used torch's threads, which hang in a forked child.
    """
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if own_process else "0"}
    if own_process:
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _options(config: EngineConfig, model: str, gambit: GambitConfig, is_cpu: bool) -> dict[str, Any]:
    """Returns vLLM's options: our defaults, the user's, and those that Gambit must set itself."""
    given = {name: value for name, value in config.engine_options.items() if name not in OWN_OPTIONS}
    for name in _OURS:
        if name in given:
            raise UserError(f"engine option {name!r} is set by Gambit itself: leave it out")
    for name, reason in _REFUSED.items():
        if given.get(name) not in (None, 1):
            raise UserError(f"engine option {name}={given[name]!r} cannot be used: {reason}")
    options: dict[str, Any] = {
        "dtype": "float32" if is_cpu and config.dtype == "auto" else config.dtype,
        "skip_tokenizer_init": True,  # vLLM reads and returns token ids
        "disable_log_stats": True,
        "use_tqdm_on_load": False,  # our own display has the terminal
        "gpu_memory_utilization": config.memory_ratio,
    }
    if gambit.adapters:
        rank = max(adapter_rank(folder) for folder in gambit.adapters.values())
        rank = next((known for known in LORA_RANKS if known >= rank), rank)
        # One place more, which stays empty: on a CPU vLLM gives traces without an adapter what lies in the last one.
        options |= {"enable_lora": True, "max_loras": len(gambit.adapters) + is_cpu, "max_lora_rank": rank}
    if gambit.attention is not DecodeAttention.STOCK:
        from gambit.engines.vllm.compat import forest

        options |= forest.attention_options()
    if is_cpu:
        options |= {"block_size": CPU_BLOCK_TOKENS, "enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES}
    is_async = given.get("async_scheduling", not is_cpu) is not False
    ours = {
        "model": model,
        "additional_config": gambit,
        "worker_cls": WORKER,
        "scheduler_cls": f"{COMPAT}.scheduler.Gambit{'Async' if is_async else ''}Scheduler",
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
    }
    return options | given | ours


def _vllm_config(options: Mapping[str, Any]) -> Any:
    from gambit.engines.vllm.compat.core import make_config

    try:
        return make_config(options)
    except ValidationError as error:  # vLLM's configs are pydantic's; the first line only counts the errors
        reason = "; ".join(each["msg"].partition("\n")[0] for each in error.errors())
        raise UserError(f"vLLM refuses these options: {reason}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"vLLM refuses these options: {first_line(error)}") from error


# -- weights ---------------------------------------------------------------------------------------------------------


_INDEX = "model.safetensors.index.json"  # where there is one, vLLM reads what it names and nothing else


def weights_folder(model: str) -> str:
    """Returns `model` itself, or a folder of links to everything in it but the scorer.

    The folder has the same name at every start: vLLM files what it has compiled under the model's name.
    """
    source = Path(model)
    if not (source / SCORER_FILE).is_file() or (source / _INDEX).is_file():
        return model
    view = _view_of(source.resolve())
    wanted = {entry.name: entry.resolve() for entry in source.iterdir() if entry.name != SCORER_FILE}
    for link in list(view.iterdir()):
        if not link.is_symlink() or link.resolve() != wanted.get(link.name):
            link.unlink()
    for name, target in wanted.items():
        if not (view / name).is_symlink():
            (view / name).symlink_to(target)
    return str(view)


def _view_of(source: Path) -> Path:
    """Makes a folder in the cache, or among the temporary files where the cache cannot be written."""
    digest = hashlib.sha256(str(source).encode()).hexdigest()[:12]
    names = ("models", f"{source.name}-{digest}")
    try:
        view = cache_folder(*names)
        view.mkdir(parents=True, exist_ok=True)
        if os.access(view, os.W_OK):
            return view
    except (OSError, UserError):
        pass
    view = Path(tempfile.gettempdir(), "gambit", *names)
    view.mkdir(parents=True, exist_ok=True)
    return view


# -- self-check ------------------------------------------------------------------------------------------------------


SEARCH = -1
SCORES = (0.8, 0.6, 0.2, 0.4)  # of the traces; the third must be the victim
VICTIM = 2
BRANCHES = {len(SCORES) + trace: trace for trace in range(len(SCORES)) if trace != VICTIM}  # and their parents
NEW_TOKENS = 12
MOST_STEPS = 100
MOST_MISMATCHES = 0.2  # of the rows: half precision has ties, a mixed-up row is wrong nearly always
_NO_RULE = BoundaryRule(1, frozenset(), frozenset(), frozenset(), None)


def fits(engine: VllmEngine) -> bool:
    """Returns False for a budget of a few blocks, which cannot hold the check itself."""
    return engine.info.kv_capacity_tokens >= 3 * len(SCORES) * max(engine.info.block_tokens, NEW_TOKENS)


def self_check(engine: VllmEngine, vocab_size: int) -> None:
    """Runs greedy traces with different texts; lets one allocation fail on the way, then branches from the others."""
    engine.open(SearchSpec(SEARCH, (1 % vocab_size,), _NO_RULE, frozenset()))
    prefixes = [
        [(7 + 13 * trace + 5 * place) % vocab_size for place in range(trace + 2)] for trace in range(len(SCORES))
    ]
    engine.submit(
        [_spec(trace, trace, inherited=len(prefix), prefix=tuple(prefix)) for trace, prefix in enumerate(prefixes)],
        is_check=True,
    )
    num_steps = checked = mismatches = 0
    evicted: list[Eviction] = []
    tokens: dict[int, tuple[int, ...]] = {}  # of those that finished
    inherited: dict[int, int] = {}  # by branch
    while engine.progress(SEARCH) and num_steps < MOST_STEPS:
        report, steps = engine.step_report()
        num_steps, checked, mismatches = num_steps + 1, checked + report.checked, mismatches + report.mismatches
        if SEARCH in steps:
            evicted += steps[SEARCH].evicted
            tokens |= {done.trace: done.tokens for done in steps[SEARCH].finished}
        if evicted and not inherited:
            progress = engine.progress(SEARCH)
            inherited = {branch: progress[trace].num_tokens for branch, trace in BRANCHES.items() if trace in progress}
            branches = [
                _spec(branch, BRANCHES[branch], inherited=length, parent=TraceKey(SEARCH, BRANCHES[branch]))
                for branch, length in inherited.items()
            ]
            engine.submit(branches, is_check=True)
    engine.close_search(SEARCH)
    reasons = [*_wrong_steps(checked, mismatches, evicted), *_wrong_branches(tokens, inherited)]
    if reasons:
        versions = ", ".join(f"{name} {version}" for name, version in engine.info.versions.items())
        raise EngineError(f"Gambit does not work inside this vLLM ({versions}): {'; '.join(reasons)}")


def _spec(trace: int, like: int, **more: Any) -> TraceSpec:
    """Returns a greedy trace with the length and the score of `like`."""
    score = RunningScore(1, SCORES[like], SCORES[like], SCORES[like])
    sampling, on_pressure = Sampling(temperature=0.0, top_p=1.0, top_k=0), OnPressure(PressureAction.GHOST)
    return TraceSpec(TraceKey(SEARCH, trace), sampling, _length(like), on_pressure, score=score, **more)


def _length(trace: int) -> int:
    return trace + 2 + NEW_TOKENS


def _wrong_steps(checked: int, mismatches: int, evicted: list[Eviction]) -> Iterator[str]:
    if checked == 0:
        yield "the worker gave no states"
    elif mismatches > MOST_MISMATCHES * checked:
        yield f"{mismatches} of {checked} states do not make the token that was sampled for their row"
    if [(lost.trace, lost.action) for lost in evicted] != [(VICTIM, PressureAction.GHOST)]:
        victims = ", ".join(f"{lost.trace} ({lost.score})" for lost in evicted) or "none"
        yield f"when an allocation failed, {victims} had to go instead of trace {VICTIM}, the lowest-scoring one"


def _wrong_branches(tokens: dict[int, tuple[int, ...]], inherited: dict[int, int]) -> Iterator[str]:
    lengths = {trace: len(own) for trace, own in tokens.items()}
    expected = {trace: _length(parent) for branch, parent in BRANCHES.items() for trace in (branch, parent)}
    if lengths != expected:
        yield f"traces of {expected} tokens were expected, {lengths} came"
        return
    # One token more than they inherited, and most of them: half precision has ties here too.
    same = sum(
        tokens[branch][: inherited[branch] + 1] == tokens[parent][: inherited[branch] + 1]
        for branch, parent in BRANCHES.items()
    )
    if 2 * same <= len(BRANCHES):
        yield f"only {same} of {len(BRANCHES)} greedy branches go on like the trace they come from"
