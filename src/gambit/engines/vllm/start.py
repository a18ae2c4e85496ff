"""Starts vLLM from a config, with Gambit's scheduler and worker in it, and refuses what cannot work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError

from gambit.config.options import EngineConfig
from gambit.core.errors import EngineError, GambitWarning, UserError
from gambit.engines.base import EngineInfo
from gambit.engines.shared.layers import LayerChoice
from gambit.engines.vllm.check import has_room, self_check
from gambit.engines.vllm.engine import VllmEngine
from gambit.engines.vllm.messages import GambitConfig, Order, Report
from gambit.engines.vllm.versions import is_tested, note_on
from gambit.engines.vllm.weights import weights_folder
from gambit.scorers.base import HistoryScorer, Scorer, SplitScorer
from gambit.text.tokenizers import Tokenizer, load_tokenizer

WORKER = "gambit.engines.vllm.inside.worker.GambitWorker"
CPU_KV_BYTES = 2 << 30  # the room for keys and values where memory is shared with everything else
CPU_BLOCK_TOKENS = 32  # vLLM's own default there, 128, recomputes up to 127 tokens per branch
OWN_OPTIONS = {"exact_noise": None, "own_process": None, "self_check": True, "short_cuts": None, "fused_scorer": None}
_KNOWN_PARAMS = 64  # ways to sample that are used at a time: one or two for each search
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
    from gambit.engines.vllm.compat import adapter

    _warn_if_untested(adapter)
    _check_device(config.device, adapter.current_platform.device_type)
    own = {name: config.engine_options.get(name, default) for name, default in OWN_OPTIONS.items()}
    is_cpu = adapter.current_platform.is_cpu()
    tokenizer = tokenizer or load_tokenizer(model)
    short_cuts = _unless_said(own["short_cuts"], is_tested(adapter.VERSION))
    fused_scorer = _unless_said(own["fused_scorer"], not is_cpu)
    gambit = GambitConfig(scorer, own["exact_noise"] is not False, config.kv_budget_tokens, short_cuts, fused_scorer)
    own_process = _wants_own_process(own["own_process"])
    with _multiprocessing(own_process):
        vllm_config = _build(adapter, _options(config, weights_folder(model), gambit, is_cpu), config.kv_budget_tokens)
        _check_layers(adapter, vllm_config, scorer)
        # Noise of the same kind and as repeatable, but from the kernel that samples anyway; not that of `local`.
        if own["exact_noise"] is None and not is_cpu and adapter.has_seeded_noise(vllm_config):
            gambit = vllm_config.additional_config = replace(gambit, exact_noise=False)
        core = _Core(adapter, vllm_config, gambit, own_process=own_process)
    info = _info(vllm_config, model, adapter)
    engine = VllmEngine(core, info, tokenizer, remembers=isinstance(scorer, HistoryScorer))
    if own["self_check"]:
        _check(engine, vllm_config.model_config.get_vocab_size())
    return engine


def _check(engine: VllmEngine, vocab_size: int) -> None:
    if not has_room(engine):
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
    """Where a thought ends is known in the scheduler, and states never go there."""
    is_in_one = not isinstance(scorer, SplitScorer)
    if is_in_one and scorer.info.needs_confidence and scorer.info.hidden_size is not None:
        raise UserError(f"the scorer {scorer.info.architecture!r} wants states and confidences together: the vllm "
                        "engine needs one that takes them in turn (`part`, `whole`), use --engine local")  # fmt: skip


def _check_layers(adapter: Any, vllm_config: Any, scorer: Scorer) -> None:
    choice = LayerChoice.of(scorer.info.layers, adapter.num_layers(vllm_config))
    if choice.inner and not adapter.gives_inner_states(vllm_config):
        architecture = vllm_config.model_config.architecture
        raise UserError(f"the scorer reads layers {list(scorer.info.layers)}: vLLM gives those of {architecture} in "
                        "the last one (-1) only; use --engine local, or a scorer of the last layer")  # fmt: skip


def _check_device(wanted: str, found: str) -> None:
    if wanted != "auto" and wanted.partition(":")[0] != found:
        raise UserError(f"device {wanted!r}: this vLLM is built for {found!r}")


def _prepare_environment() -> None:
    """Before vLLM is imported; what the user has set stays."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _warn_if_untested(adapter: Any) -> None:
    note = note_on(adapter.VERSION, adapter.current_platform.device_type)
    if note is not None:
        warnings.warn(note, GambitWarning, stacklevel=3)


def _wants_own_process(wish: bool | None) -> bool:
    """In this process unless asked: nothing then happens between two steps, and the same seed gives the same tree."""
    return _unless_said(wish, os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1")


def _unless_said(wish: bool | None, usual: bool) -> bool:
    return usual if wish is None else bool(wish)


@contextmanager
def _multiprocessing(own_process: bool) -> Iterator[None]:
    """vLLM reads from its environment where the core lives and how its process begins.

    Spawned, never forked: the front has used torch's threads, which hang in a forked child.
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
    return f"gambit.engines.vllm.inside.scheduler.Gambit{'Async' if is_async else ''}Scheduler"


def _refuse(given: dict[str, Any]) -> None:
    for name in _OURS:
        if name in given:
            raise UserError(f"engine option {name!r} is set by Gambit itself: leave it out")
    for name, reason in _REFUSED.items():
        if given.get(name) not in (None, 1):
            raise UserError(f"engine option {name}={given[name]!r} cannot be used: {reason}")


def _build(adapter: Any, options: dict[str, Any], kv_budget_tokens: int | None) -> Any:
    try:
        return adapter.build_config(options, kv_budget_tokens)
    except (TypeError, ValueError) as error:
        raise UserError(f"vLLM refuses these options: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """vLLM's configs are pydantic's, whose first line only counts the errors."""
    if not isinstance(error, ValidationError):
        return _first_line(error)
    return "; ".join(each["msg"].partition("\n")[0] for each in error.errors())


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _info(vllm_config: Any, model: str, adapter: Any) -> EngineInfo:
    block_tokens = int(vllm_config.cache_config.block_size)
    return EngineInfo(
        name="vllm",
        model=model,
        device=str(vllm_config.device_config.device_type),
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        hidden_size=int(vllm_config.model_config.get_hidden_size()),
        context_tokens=int(vllm_config.model_config.max_model_len),
        kv_capacity_tokens=adapter.num_blocks(vllm_config) * block_tokens,
        block_tokens=block_tokens,
        versions={"vllm": adapter.VERSION, "torch": _version("torch")},
        most_traces=int(vllm_config.scheduler_config.max_num_seqs),
        most_traces_option="max_num_seqs",
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


class _Core:
    """vLLM's engine core, spoken to in Gambit's terms."""

    def __init__(self, adapter: Any, vllm_config: Any, gambit: GambitConfig, *, own_process: bool) -> None:
        self._adapter = adapter
        self._exact_noise = gambit.exact_noise
        self._seeds_vllm = not gambit.exact_noise and adapter.has_seeded_noise(vllm_config)
        self._num_added = 0
        self._params = lru_cache(_KNOWN_PARAMS)(adapter.sampling_params)
        try:
            self._core = adapter.Core(vllm_config, own_process=own_process)
        except Exception as error:
            raise EngineError(f"vLLM does not start: {_first_line(error)}") from error

    def add(self, order: Order, request_id: str, tokens: list[int], max_tokens: int, stop_ids: list[int]) -> None:
        # With our own noise the token is decided before vLLM samples: it only has to take the highest logit.
        sampling = (0.0, 1.0, 0, 0.0) if self._exact_noise else order.sampling
        params = copy(self._params(*sampling, tuple(stop_ids)))  # vLLM takes its time to check each that is made
        params.max_tokens, params.extra_args = max_tokens, order.pack()
        if self._seeds_vllm:
            params.seed = order.noise_key >> 1  # signed there
        self._num_added += 1
        self._core.add(request_id, tokens, params, arrival=float(self._num_added))

    def abort(self, request_ids: list[str]) -> None:
        self._core.abort(request_ids)

    def step(self) -> Report | None:
        packed = self._core.step()
        return None if packed is None else Report.unpack(packed)

    def close(self) -> None:
        self._core.shutdown()
