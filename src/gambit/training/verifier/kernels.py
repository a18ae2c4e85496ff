"""Makes a verifier's network fit for training: attention over packed rows, fused layers, passes as large as memory.

A pass of many small kernels waits for the host that launches them, so that it should hold as many tokens as memory
allows. Sorted by length and padded, such passes are either small or a third padding: here sequences of any length lie
one after the other, and each attends to itself alone.

A 1.5B model also spends about a third of a pass on moving what peft and transformers compute in between: each LoRA
layer multiplies and adds tensors as large as its output, each norm goes through float32 copies of its input.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gambit.errors import UserError
from gambit.verifiers.lora import LoraVerifier

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ATTENTION = "gambit-packed"
LENGTH_ROUNDING = 512  # kernels get a round number above the longest length: few shapes, little to compile
TOLERANCE = 2e-2  # of half precision, where both ways to compute attention are compared
USED_SHARE = 0.85  # of what is free: passes of other lengths leave gaps
FEWEST_TOKENS = 8_192  # below which a pass waits for the host rather than for memory: better compute twice
ROUND_TOKENS = 1_024


# -- packed rows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packing:
    """The sequences of a packed row."""

    starts: Tensor  # [sequence + 1] int32: where each begins, and the end of the last
    lengths: list[int]
    uses_flash: bool = False  # one kernel for sequences of all lengths, instead of one after the other

    @classmethod
    def of(cls, lengths: Sequence[int], uses_flash: bool = False) -> Self:
        """Lays out sequences of these lengths, on the CPU."""
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return cls(torch.from_numpy(starts), list(lengths), uses_flash)


Moved = TypeVar("Moved", bound="DataclassInstance")


def moved(record: Moved, move: Callable[[Tensor], Tensor]) -> Moved:
    """Returns a record with every tensor in it, and in records inside it, moved to other memory."""
    changes: dict[str, Any] = {}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Tensor):
            changes[each.name] = move(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes[each.name] = moved(value, move)
    return dataclasses.replace(record, **changes)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes causal attention within each sequence; without a packing these are rows, padded on the right."""
    longest = query.shape[2] if packing is None else max(packing.lengths)
    if softcap is not None or (sliding_window is not None and longest > sliding_window):
        raise UserError(f"a verifier cannot be trained on {type(module).__name__} with a capped softmax, or with a "
                        f"sliding window of {sliding_window} and traces of {longest} tokens")  # fmt: skip
    if packing is None:
        return _causal(query, key, value, scaling).transpose(1, 2).contiguous(), None
    if packing.uses_flash:
        return _flash(query, key, value, packing, scaling), None
    sequences = zip(*(torch.split(each, packing.lengths, dim=2) for each in (query, key, value)), strict=True)
    found = torch.cat([_causal(q, k, v, scaling) for q, k, v in sequences], dim=2)
    return found.transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped)


def _flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """Returns [1, token, head, feature] by torch's flash kernel for sequences of different lengths."""
    rows = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    most = -(-max(packing.lengths) // LENGTH_ROUNDING) * LENGTH_ROUNDING
    found: Tensor = torch.ops.aten._flash_attention_forward(
        *rows, packing.starts, packing.starts, most, most, 0.0, True, False, scale=scaling
    )[0]
    return found[None]


def flash_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether that kernel is here and agrees with the plain computation, forwards and backwards."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    generator = torch.Generator(device).manual_seed(0)
    parts = [
        torch.randn(1, heads, 230, 64, device=device, dtype=dtype, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]
    try:
        flash, plain = (attention_and_gradients(parts, uses_flash) for uses_flash in (True, False))
    except (RuntimeError, AttributeError):  # the kernel is not for this GPU; another torch has none of that name
        return False
    return all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) for a, b in zip(flash, plain, strict=True))


def attention_and_gradients(parts: Sequence[Tensor], uses_flash: bool) -> list[Tensor]:
    """Returns the attention of three sequences, 230 tokens in all, and its gradients."""
    packing = moved(Packing.of([100, 1, 129], uses_flash), lambda tensor: tensor.to(parts[0].device))
    query, key, value = parts
    found = packed_attention(nn.Identity(), query, key, value, None, packing=packing)[0]
    return [each.float() for each in (found, *torch.autograd.grad(found.float().square().sum(), parts))]


def use_packing(verifier: LoraVerifier) -> None:
    """Makes a verifier's network take packed rows too."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    base = verifier.network.get_base_model()  # type: ignore[operator]
    if not base._can_set_attn_implementation():
        raise UserError(f"{verifier.info.base_model}: {type(base).__name__} has no exchangeable attention, which "
                        "training a verifier needs")  # fmt: skip
    base.set_attn_implementation(ATTENTION)


# -- fused layers ----------------------------------------------------------------------------------------------


class FusedLora(torch.autograd.Function):
    """The product x W' + b + scale (x A') B', of which only x and x A' are kept; W and b are frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inner = rows @ a.t()
        found = F.linear(rows, weight, bias).addmm_(inner, b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, a, b, inner)
        ctx.scale = scale
        return found.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, inner = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        gradient = gradients[0].reshape(-1, weight.shape[0])
        of_inner = (gradient @ b).mul_(ctx.scale)
        of_b = (gradient.t() @ inner).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight).addmm_(of_inner, a).view_as(x)
        return of_x, None, None, of_inner.t() @ rows, of_b, None


def use_fused_layers(network: nn.Module) -> None:
    """Makes LoRA layers and RMS norms compute the same with fewer passes over memory."""
    for module in network.modules():
        if is_plain_lora(module):
            module.forward = _lora_forward(module)
        elif is_rms_norm(module):
            module.forward = functools.partial(_fused_norm, module)


def is_plain_lora(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer with one adapter, without dropout or variants."""
    from peft.tuners.lora import Linear

    if not isinstance(module, Linear) or list(module.lora_A) != ["default"]:
        return False
    base = module.base_layer
    has_extras = module.lora_bias["default"] or module.lora_variant
    is_plain = isinstance(module.lora_dropout["default"], nn.Identity) and not has_extras
    return is_plain and type(base) is nn.Linear and base.weight.dtype == module.lora_A["default"].weight.dtype


def is_rms_norm(module: nn.Module) -> bool:
    """Returns whether a module is a norm that multiplies by its weight as it is: Qwen's, Llama's, Mistral's."""
    name = type(module).__name__
    return name.startswith(("Qwen2", "Qwen3", "Llama", "Mistral")) and hasattr(module, "variance_epsilon")


def _lora_forward(module: Any) -> Callable[..., Tensor]:
    base, down, up = module.base_layer, module.lora_A["default"], module.lora_B["default"]
    scale = float(module.scaling["default"])

    def forward(x: Tensor, *_: object, **__: object) -> Tensor:
        found: Tensor = FusedLora.apply(x, base.weight, base.bias, down.weight, up.weight, scale)  # type: ignore[no-untyped-call]
        return found

    return forward


def _fused_norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


# -- memory ----------------------------------------------------------------------------------------------------


def fit_to_memory(
    verifier: LoraVerifier,
    one_pass: Callable[[], object],
    num_tokens: int,
    wanted: int,
    recomputes: bool | None,
    say: Callable[[str], None],
) -> int:
    """Returns how many tokens a pass may have, at most as many as wanted, and reports what was measured.

    `one_pass` goes forwards and back over `num_tokens`. `recomputes` None: activations are computed again on the way
    back only where too few tokens fit.
    """
    if recomputes:
        recompute(verifier)
    fitting, measured = _fitting_tokens(verifier.device, one_pass, num_tokens, wanted)
    if recomputes is None and fitting < min(wanted, FEWEST_TOKENS):
        recompute(verifier)
        recomputes = True
        fitting, measured = _fitting_tokens(verifier.device, one_pass, num_tokens, wanted)
    again = "computed again on the way back" if recomputes else "kept"
    say(f"{measured}: {fitting:,} tokens a pass, activations are {again}")
    return fitting


def _fitting_tokens(
    device: torch.device, one_pass: Callable[[], object], num_tokens: int, wanted: int
) -> tuple[int, str]:
    """Returns how many tokens the free memory holds, and the measurement in words."""
    one_pass()  # libraries take memory of their own at the first one
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    one_pass()
    torch.cuda.synchronize(device)
    per_token = max(1, (torch.cuda.max_memory_allocated(device) - before) // num_tokens)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    fitting = int(USED_SHARE * free / per_token) // ROUND_TOKENS * ROUND_TOKENS
    measured = f"a token takes {per_token / 2**20:.2f} MiB and {free >> 30} GiB are free"
    return max(ROUND_TOKENS, min(wanted, fitting)), measured


def recompute(verifier: LoraVerifier) -> None:
    """Keeps only what enters each block, and computes the rest again on the way back."""
    network: Any = verifier.network
    network.enable_input_require_grads()
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
