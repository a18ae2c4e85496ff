"""How many tokens of a verifier's training a GPU holds at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gambit.verifiers.lora import LoraVerifier

USED_SHARE = 0.85  # of what is free: passes of other lengths leave gaps
FEWEST_TOKENS = 8_192  # below which a pass waits for the host rather than for memory: better compute twice
ROUND_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """What was measured, and what follows from it."""

    bytes_per_token: int
    free_bytes: int
    pass_tokens: int
    recomputes: bool

    def __str__(self) -> str:
        again = "computed again on the way back" if self.recomputes else "kept"
        return (f"a token takes {self.bytes_per_token / 2**20:.2f} MiB and {self.free_bytes >> 30} GiB are free: "
                f"{self.pass_tokens:,} tokens a pass, activations are {again}")  # fmt: skip


def fit_to_memory(
    verifier: LoraVerifier, one_pass: Callable[[], object], num_tokens: int, wanted: int, recomputes: bool | None
) -> MemoryFit:
    """`one_pass` goes forwards and back over so many tokens; `recomputes` None: only where too few tokens fit."""
    if recomputes:
        recompute(verifier)
    fitted = _measured(verifier.device, one_pass, num_tokens, wanted, bool(recomputes))
    if recomputes is None and fitted.pass_tokens < min(wanted, FEWEST_TOKENS):
        recompute(verifier)
        return _measured(verifier.device, one_pass, num_tokens, wanted, True)
    return fitted


def _measured(
    device: torch.device, one_pass: Callable[[], object], num_tokens: int, wanted: int, recomputes: bool
) -> MemoryFit:
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
    return MemoryFit(per_token, free, max(ROUND_TOKENS, min(wanted, fitting)), recomputes)


def recompute(verifier: LoraVerifier) -> None:
    """Keep only what enters each block, and compute the rest again on the way back."""
    network: Callable[..., object] = verifier.network.enable_input_require_grads  # type: ignore[assignment]
    network()
    enable: Callable[..., object] = verifier.network.gradient_checkpointing_enable  # type: ignore[assignment]
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
