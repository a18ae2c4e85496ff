"""Starts vLLM with Gambit's scheduler and worker, and refuses options and scorers that cannot work there."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gambit.config.options import EngineConfig
from gambit.engines.states import LayerChoice
from gambit.engines.vllm.check import fits, self_check
from gambit.engines.vllm.engine import VllmEngine
from gambit.engines.vllm.messages import DecodeAttention, GambitConfig
from gambit.engines.vllm.versions import note_on
from gambit.engines.vllm.weights import weights_folder
from gambit.errors import EngineError, GambitWarning, UserError, first_line
from gambit.scorers.base import HistoryScorer, Scorer, SplitScorer
from gambit.storage.versions import package_version
from gambit.text.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from gambit.engines.vllm.compat.config import EngineSetup
    from gambit.engines.vllm.compat.core import VllmCore

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
    from gambit.engines.vllm.compat import config as vllm_build  # here: vLLM takes seconds to import

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
    from gambit.engines.vllm.compat import forest_backend

    chosen = [name for name in ATTENTION_OPTIONS if options.get(name) is not None]
    reason = f"{chosen[0]}={options[chosen[0]]!r} is given" if chosen else forest_backend.why_not()
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
        from gambit.engines.vllm.compat import forest_backend

        options |= forest_backend.attention_options()
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
    from gambit.engines.vllm.compat.config import EngineSetup

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
