"""Starts vLLM with Gambit's scheduler and worker, and refuses options and scorers that cannot work there."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gambit.config.options import EngineConfig
from gambit.engines.base import SearchSpec
from gambit.engines.states import LayerChoice
from gambit.engines.vllm import note_on
from gambit.engines.vllm.engine import VllmEngine
from gambit.engines.vllm.messages import DecodeAttention, GambitConfig, StepReport
from gambit.errors import EngineError, GambitWarning, UserError, first_line
from gambit.models.files import SCORER_FILE
from gambit.scorers.base import HistoryScorer, Scorer, SplitScorer
from gambit.storage.folders import cache_folder
from gambit.storage.identity import package_version
from gambit.text.boundary import BoundaryRule
from gambit.text.tokenizers import Tokenizer, load_tokenizer
from gambit.types import Eviction, OnPressure, PressureAction, RunningScore, Sampling, TraceKey, TraceSpec

if TYPE_CHECKING:
    from gambit.engines.vllm.compat.core import EngineSetup, VllmCore


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
_OURS = ("worker_cls", "scheduler_cls", "scheduling_policy", "enable_prefix_caching", "additional_config", "model")
_REFUSED = {
    "speculative_config": "a step would give a trace several tokens, and states for tokens that are then rejected",
    "pipeline_parallel_size": "states and scores would be on another stage than the one that reports",
    "decode_context_parallel_size": "states would be spread over ranks",
    "prefill_context_parallel_size": "states would be spread over ranks",
}


def start_vllm(config: EngineConfig, model: str, scorer: Scorer, tokenizer: Tokenizer | None = None) -> VllmEngine:
    """`model` is a folder or a hub name; `config.engine_options` go to vLLM as they are, but for our own.

    vLLM itself sees token ids only; `tokenizer` is for models that bring none, in measurements.
    """
    if find_spec("vllm") is None:
        raise UserError("vLLM is not installed: pip install 'gambit-search[vllm]', or use --engine local")
    _check_scorer(scorer)
    _prepare_environment()
    from gambit.engines.vllm.compat import core as vllm_build  # here: vLLM takes seconds to import

    device = vllm_build.device_type()
    is_tested = _is_tested(vllm_build.VERSION, device)
    _check_device(config.device, device)
    own = {name: config.engine_options.get(name, default) for name, default in OWN_OPTIONS.items()}
    tokenizer = tokenizer or load_tokenizer(model)
    attention = _attention(own["attention"], config.engine_options, is_tested=is_tested)
    gambit = GambitConfig(
        scorer,
        exact_noise=own["exact_noise"] is not False,
        kv_budget_tokens=config.kv_budget_tokens,
        fast_path=_unless_said(own["short_cuts"], is_tested),
        fused_scorer=_unless_said(own["fused_scorer"], device != "cpu"),
        attention=attention,
    )
    own_process = _wants_own_process(own["own_process"])
    with _multiprocessing(own_process):
        setup = _build(_options(config, weights_folder(model), gambit, device == "cpu"), config.kv_budget_tokens)
        _check_layers(setup, scorer)
        # vLLM's noise is of the same kind and as repeatable, and its sampler makes it at no cost on a GPU.
        if own["exact_noise"] is None and device != "cpu" and setup.has_seeded_noise:
            setup.use_vllm_noise()
        core = _start(setup, own_process)
    info = setup.info(model, {"torch": package_version("torch") or "unknown"})
    engine = VllmEngine(core, info, tokenizer, remembers=isinstance(scorer, HistoryScorer))
    if own["self_check"]:
        _check(engine, setup.vocab_size)
    return engine


def _check(engine: VllmEngine, vocab_size: int) -> None:
    if not fits(engine):
        warnings.warn(
            "the KV budget is too small for vLLM's self-check, which is left out", GambitWarning, stacklevel=4
        )
        return
    try:
        self_check(engine, vocab_size)
    except BaseException:
        engine.close()
        raise


def _check_scorer(scorer: Scorer) -> None:
    """Where a thought ends is known in the scheduler, which gets scores but no states."""
    is_in_one = not isinstance(scorer, SplitScorer)
    if is_in_one and scorer.info.needs_confidence and scorer.info.hidden_size is not None:
        raise UserError(f"the scorer {scorer.info.architecture!r} wants states and confidences together: the vllm "
                        "engine needs one that takes them in turn (`part`, `whole`), use --engine local")  # fmt: skip


def _check_layers(setup: EngineSetup, scorer: Scorer) -> None:
    choice = LayerChoice.of(scorer.info.layers, setup.num_layers)
    if choice.inner and not setup.gives_inner_states:
        raise UserError(f"the scorer reads layers {list(scorer.info.layers)}: vLLM gives those of {setup.architecture} "
                        "in the last one (-1) only; use --engine local, or a scorer of the last layer")  # fmt: skip


def _check_device(wanted: str, found: str) -> None:
    if wanted != "auto" and wanted.partition(":")[0] != found:
        raise UserError(f"device {wanted!r}: this vLLM is built for {found!r}")


def _prepare_environment() -> None:
    """Before vLLM is imported; what the user has set stays."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _attention(wish: object, options: Mapping[str, Any], *, is_tested: bool) -> DecodeAttention:
    """Forest attention by wish, or where nothing speaks against it; stock attention otherwise."""
    if wish not in list(DecodeAttention):
        raise UserError(f"engine option attention={wish!r}: choose one of {', '.join(DecodeAttention)}")
    attention = DecodeAttention(str(wish))
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


def _is_tested(version: str, device: str) -> bool:
    if (note := note_on(version, device)) is not None:
        warnings.warn(note, GambitWarning, stacklevel=3)
    return note is None


def _wants_own_process(wish: bool | None) -> bool:
    """In this process unless asked: nothing then happens between two steps, and a seed gives the same tree again."""
    return _unless_said(wish, os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1")


def _unless_said(wish: bool | None, usual: bool) -> bool:
    return usual if wish is None else bool(wish)


@contextmanager
def _multiprocessing(own_process: bool) -> Iterator[None]:
    """vLLM reads from its environment where the core lives and how its process begins.

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
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _options(config: EngineConfig, model: str, gambit: GambitConfig, is_cpu: bool) -> dict[str, Any]:
    given = {name: value for name, value in config.engine_options.items() if name not in OWN_OPTIONS}
    _refuse(given)
    options: dict[str, Any] = {
        "dtype": "float32" if is_cpu and config.dtype == "auto" else config.dtype,
        "skip_tokenizer_init": True,  # vLLM gets and gives token ids
        "disable_log_stats": True,
        "use_tqdm_on_load": False,  # our own display has the terminal
        "gpu_memory_utilization": config.memory_ratio,
    }
    if gambit.attention is not DecodeAttention.STOCK:
        from gambit.engines.vllm.compat import forest

        options |= forest.attention_options()
    if is_cpu:
        options |= {"block_size": CPU_BLOCK_TOKENS, "enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES}
    return (
        options
        | given
        | {
            "model": model,
            "additional_config": gambit,
            "worker_cls": WORKER,
            "scheduler_cls": _scheduler_name(is_async=given.get("async_scheduling", not is_cpu) is not False),
            "scheduling_policy": "priority",
            "enable_prefix_caching": True,
        }
    )


def _scheduler_name(*, is_async: bool) -> str:
    return f"{COMPAT}.scheduler.Gambit{'Async' if is_async else ''}Scheduler"


def _refuse(given: dict[str, Any]) -> None:
    for name in _OURS:
        if name in given:
            raise UserError(f"engine option {name!r} is set by Gambit itself: leave it out")
    for name, reason in _REFUSED.items():
        if given.get(name) not in (None, 1):
            raise UserError(f"engine option {name}={given[name]!r} cannot be used: {reason}")


def _build(options: dict[str, Any], kv_budget_tokens: int | None) -> EngineSetup:
    from gambit.engines.vllm.compat.core import EngineSetup

    try:
        return EngineSetup(options, kv_budget_tokens)
    except (TypeError, ValueError) as error:
        raise UserError(f"vLLM refuses these options: {_reason(error)}") from error


def _start(setup: EngineSetup, own_process: bool) -> VllmCore:
    from gambit.engines.vllm.compat.core import VllmCore

    try:
        return VllmCore(setup, own_process=own_process)
    except Exception as error:
        raise EngineError(f"vLLM does not start: {first_line(error)}") from error


def _reason(error: Exception) -> str:
    """vLLM's configs are pydantic's, whose first line only counts the errors."""
    if not isinstance(error, ValidationError):
        return first_line(error)
    return "; ".join(each["msg"].partition("\n")[0] for each in error.errors())


# -- weights ---------------------------------------------------------------------------------------------------------


_INDEX = "model.safetensors.index.json"  # where there is one, vLLM reads what it names and nothing else


def weights_folder(model: str) -> str:
    """`model` itself, or a folder of links to everything in it but the scorer.

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
    """In the cache, or in the folder for temporary files where the cache cannot be written."""
    digest = hashlib.sha256(str(source).encode()).hexdigest()[:12]
    parts = ("models", f"{source.name}-{digest}")
    try:
        view = cache_folder(*parts)
        view.mkdir(parents=True, exist_ok=True)
        if os.access(view, os.W_OK):
            return view
    except (OSError, UserError):
        pass
    view = Path(tempfile.gettempdir(), "gambit", *parts)
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


@dataclass(slots=True)
class _Seen:
    reports: list[StepReport] = field(default_factory=list)
    evicted: list[Eviction] = field(default_factory=list)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of those that finished
    inherited: dict[int, int] = field(default_factory=dict)  # by branch


def fits(engine: VllmEngine) -> bool:
    """A budget of a few blocks cannot hold the check itself."""
    return engine.info.kv_capacity_tokens >= 3 * len(SCORES) * max(engine.info.block_tokens, NEW_TOKENS)


def self_check(engine: VllmEngine, vocab_size: int) -> None:
    """Run greedy traces with different texts; let one allocation fail on the way, then branch from the others."""
    seen = _generate(engine, vocab_size)
    reasons = [*_wrong_states(seen.reports), *_wrong_eviction(seen.evicted), *_wrong_branches(seen)]
    if reasons:
        versions = ", ".join(f"{name} {version}" for name, version in engine.info.versions.items())
        raise EngineError(f"Gambit does not work inside this vLLM ({versions}): {'; '.join(reasons)}")


def _generate(engine: VllmEngine, vocab_size: int) -> _Seen:
    engine.open(SearchSpec(SEARCH, (1 % vocab_size,), _NO_RULE, frozenset()))
    engine.submit([_spec(trace, vocab_size) for trace in range(len(SCORES))], is_check=True)
    seen = _Seen()
    while engine.progress(SEARCH) and len(seen.reports) < MOST_STEPS:
        report, steps = engine.step_report()
        seen.reports.append(report)
        if SEARCH in steps:
            seen.evicted += steps[SEARCH].evicted
            seen.tokens |= {done.trace: done.tokens for done in steps[SEARCH].finished}
        if seen.evicted and not seen.inherited:
            branches = _branches(engine)
            seen.inherited = {spec.key.trace: spec.inherited for spec in branches}
            engine.submit(branches, is_check=True)
    engine.close_search(SEARCH)
    return seen


def _spec(trace: int, vocab_size: int) -> TraceSpec:
    prefix = tuple((7 + 13 * trace + 5 * position) % vocab_size for position in range(trace + 2))
    return replace(_bare_spec(trace, trace), inherited=len(prefix), prefix=prefix)


def _branches(engine: VllmEngine) -> list[TraceSpec]:
    progress = engine.progress(SEARCH)
    return [
        replace(_bare_spec(branch, trace), inherited=progress[trace].num_tokens, parent=TraceKey(SEARCH, trace))
        for branch, trace in BRANCHES.items()
        if trace in progress
    ]


def _bare_spec(trace: int, like: int) -> TraceSpec:
    score = SCORES[like]
    return TraceSpec(
        TraceKey(SEARCH, trace),
        Sampling(temperature=0.0, top_p=1.0, top_k=0),
        _length(like),
        OnPressure(PressureAction.GHOST),
        score=RunningScore(1, score, score, score),
    )


def _length(trace: int) -> int:
    return trace + 2 + NEW_TOKENS


def _wrong_states(reports: list[StepReport]) -> list[str]:
    checked, mismatches = sum(r.checked for r in reports), sum(r.mismatches for r in reports)
    if checked == 0:
        return ["the worker gave no states"]
    if mismatches > MOST_MISMATCHES * checked:
        return [f"{mismatches} of {checked} states do not make the token that was sampled for their row"]
    return []


def _wrong_eviction(evicted: list[Eviction]) -> list[str]:
    if [(lost.trace, lost.action) for lost in evicted] == [(VICTIM, PressureAction.GHOST)]:
        return []
    victims = ", ".join(f"{lost.trace} ({lost.score})" for lost in evicted) or "nobody"
    return [f"when an allocation failed, {victims} had to go instead of trace {VICTIM}, the lowest-scoring one"]


def _wrong_branches(seen: _Seen) -> list[str]:
    lengths = {trace: len(said) for trace, said in seen.tokens.items()}
    expected = {trace: _length(parent) for branch, parent in BRANCHES.items() for trace in (branch, parent)}
    if lengths != expected:
        return [f"traces of {expected} tokens were asked for, {lengths} came"]
    # One token more than they inherited, and most of them: half precision has ties here too.
    same = sum(
        seen.tokens[branch][: seen.inherited[branch] + 1] == seen.tokens[parent][: seen.inherited[branch] + 1]
        for branch, parent in BRANCHES.items()
    )
    if 2 * same <= len(BRANCHES):
        return [f"only {same} of {len(BRANCHES)} greedy branches go on like the trace they come from"]
    return []
