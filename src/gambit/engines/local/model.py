"""Loads a causal LM and its tokenizer, and runs the model over the pool."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gambit.config.options import DTYPES
from gambit.engines.local.attention import AttentionPlan, DecodePlan, ForwardOutput, KvPool
from gambit.engines.local.caches import CacheSizes, ModelRunner, OwnCaches, choose_runner
from gambit.engines.local.fused import fused_if_alike
from gambit.engines.local.llama import LlamaModel, read_llama
from gambit.errors import GambitWarning, UserError, first_line
from gambit.models.files import weight_files
from gambit.text.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL_MODEL_BYTES, LARGE_MODEL_BYTES = 256 << 20, 512 << 20
BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16")
CPU_KV_BYTES = 4 << 30  # the KV cache on a device whose memory is the machine's


class PoolModel:
    """A model that computes the steps of a pool."""

    def __init__(self, model: PreTrainedModel | LlamaModel, name: str) -> None:
        self.name = name
        self.device = model.device
        self.dtype = model.dtype
        config = model.config.get_text_config()
        self.num_layers, self.hidden_size = int(config.num_hidden_layers), int(config.hidden_size)
        self.context_tokens = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        if isinstance(model, LlamaModel):
            token_bytes = 2 * self.num_layers * config.num_key_value_heads * config.head_dim * self.dtype.itemsize
            self._runner, self.cache_sizes = ModelRunner(model), CacheSizes(token_bytes)
        else:
            self._runner, self.cache_sizes = _chosen_runner(model, name)
        # Decode steps in our own operations; None: they run in the model's modules.
        self.fused = fused_if_alike(self._runner, self.context_tokens - 1)

    @property
    def is_compiled(self) -> bool:
        """True if decode steps run in the compiled step, whose results then were the model's own."""
        return self.fused is not None and self.fused.compiled is not None

    def new_pool(self) -> KvPool:
        """Returns an empty pool of keys, values and states."""
        return self._runner.new_pool()

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, inner: Sequence[int] = ()
    ) -> ForwardOutput:
        """Runs the model on [n, length] tokens. `inner`: layers whose states are returned too, lowest first."""
        if self.fused is not None and isinstance(plan, DecodePlan):
            return self.fused.forward(tokens, positions, plan, inner)
        return self._runner.run(tokens, positions, plan, inner)

    def kv_cache_tokens(self, memory_ratio: float, block_tokens: int) -> int:
        """Returns the tokens that fit into the memory that weights leave free on a GPU, or into a fixed size."""
        num_bytes, sizes = CPU_KV_BYTES, self.cache_sizes
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            num_bytes = free - int(total * (1 - memory_ratio))
        # Without keys and values a block is as large as a state.
        tokens = num_bytes // sizes.token_bytes if sizes.token_bytes else num_bytes * block_tokens // sizes.state_bytes
        if tokens <= 0:
            raise UserError(f"{self.name} leaves no GPU memory for keys and values at --memory-ratio {memory_ratio}")
        return tokens

    def close(self) -> None:
        self._runner.close()


def _chosen_runner(model: PreTrainedModel, name: str) -> tuple[ModelRunner, CacheSizes]:
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise UserError(f"{name}: {type(model).__name__} is no causal language model")
    runner, sizes = choose_runner(model.eval())
    if isinstance(runner, OwnCaches):
        how = "with a cache of its own" if runner.has_caches else "without a cache"
        warnings.warn(f"{name} runs {how}, one trace at a time: the local engine batches attention, windows, gated "
                      "DeltaNet, Mamba and mixtures of experts alone", GambitWarning, stacklevel=3)  # fmt: skip
    return runner, sizes


def pick_device(device: str) -> torch.device:
    """Returns the device. `auto` takes CUDA, then MPS, then the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"unknown device {device!r}: use auto, cpu, cuda, cuda:0 or mps") from error
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(picked.type, False):
        raise UserError(f"device {device!r} is not there: `gambit doctor` lists the devices of this machine")
    return picked


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """Returns the dtype. `auto` keeps the checkpoint's own on an accelerator.

    On a CPU it takes float32: rounded more coarsely, logits and with them tokens would change with the batch.
    """
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}: use {', '.join(DTYPES)}")
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    picked: torch.dtype = getattr(torch, dtype)
    return picked


def load_model(name: str, device: str = "auto", dtype: str = "auto") -> tuple[PoolModel, Tokenizer]:
    """Loads a model and its tokenizer from a folder or a hub name."""
    picked = pick_device(device)
    if dtype == "auto" and picked.type == "cpu" and _is_faster_in_half(name):
        warnings.warn(f"{name} runs in float32 on this CPU, where tokens do not change with the batch; "
                      "--dtype bfloat16 takes half the memory and is faster", GambitWarning, stacklevel=2)  # fmt: skip
    own_dtype = pick_dtype(dtype, picked)
    with _one_thread_if_small(name):
        model = read_llama(Path(name), own_dtype) if Path(name).is_dir() else None
        try:
            model, tokenizer = model or read_with_transformers(name, own_dtype), load_tokenizer(name)
        except (OSError, ValueError) as error:
            # transformers explains itself over many lines, the first of which names the reason.
            raise UserError(f"cannot load model {name!r}: {first_line(error)} Give a folder with a transformers model "
                            "or a hub name.") from error  # fmt: skip
        return PoolModel(model.to(picked), name), tokenizer


def _is_faster_in_half(name: str) -> bool:
    """Returns True if the model is large and the CPU multiplies bfloat16 itself."""
    found: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch has no such function
    return _num_weight_bytes(name) >= LARGE_MODEL_BYTES and any(found.get(unit) for unit in BFLOAT16_UNITS)


def _num_weight_bytes(name: str) -> int:
    return sum(file.stat().st_size for file in weight_files(name))


@contextmanager
def _one_thread_if_small(name: str) -> Iterator[None]:
    """Uses one thread for a small model: on a busy machine threads wait for each other longer than it takes to load."""
    threads = torch.get_num_threads()
    if 0 < _num_weight_bytes(name) < SMALL_MODEL_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def read_with_transformers(name: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """Loads any architecture, without transformers' progress bar."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    finally:
        if was_shown:
            logging.enable_progress_bar()
