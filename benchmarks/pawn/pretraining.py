"""Trains pawn's network on the corpus: AdamW, cosine schedule, loss on the traces only."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from benchmarks.pawn.corpus import Bucket
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    num_updates: int = 7500
    tokens_per_update: int = 65_536
    peak_rate: float = 2e-3
    warmup_updates: int = 200
    final_share: float = 0.02  # of the peak rate, at the end of the cosine
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    seed: int = 0

    def rate(self, update: int) -> float:
        progress = update / self.num_updates
        cosine = self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak_rate * min(1.0, (update + 1) / self.warmup_updates) * cosine


TINY_RECIPE = Recipe(num_updates=4, tokens_per_update=2048)


def train(model: "Qwen3ForCausalLM", corpus: list[Bucket], recipe: Recipe, report: Report) -> list[tuple[int, float]]:
    """Returns the loss curve: update and mean loss (nats per trace token) since the point before."""
    device = next(model.parameters()).device
    buckets = [(torch.from_numpy(b.tokens).to(device), torch.from_numpy(b.spans).to(device)) for b in corpus]
    if device.type == "cuda":
        _compile_layers(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=device.type == "cuda"
    )
    rng = np.random.default_rng(recipe.seed)
    shares = np.array([len(b.tokens) for b in corpus]) / sum(len(b.tokens) for b in corpus)
    curve, losses, start = [], [], time.monotonic()
    for update in range(recipe.num_updates):
        tokens, spans = _draw(buckets[rng.choice(len(buckets), p=shares)], recipe, rng)
        losses.append(_update(model, optimizer, tokens, spans, recipe, update))
        if (update + 1) % max(1, recipe.num_updates // 30) == 0:
            curve.append((update + 1, torch.stack(losses).mean().item()))
            losses.clear()
            report(f"update {update + 1} loss {curve[-1][1]:.4f} after {time.monotonic() - start:.0f} s")
    return curve


def _compile_layers(model: "Qwen3ForCausalLM") -> None:
    """Layer by layer: all layers share one graph per width, which compiles in seconds instead of minutes."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def _draw(bucket: tuple[Tensor, Tensor], recipe: Recipe, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    tokens, spans = bucket
    rows = torch.from_numpy(rng.integers(len(tokens), size=recipe.tokens_per_update // tokens.shape[1]))
    rows = rows.to(tokens.device)
    return tokens[rows].long(), spans[rows]


def _update(
    model: "Qwen3ForCausalLM",
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    spans: Tensor,
    recipe: Recipe,
    update: int,
) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(update)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = _trace_loss(logits.float(), tokens[:, 1:], spans)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
    optimizer.step()
    return loss.detach()


def _trace_loss(logits: Tensor, targets: Tensor, spans: Tensor) -> Tensor:
    """Prompts are random and teach nothing; right padding needs no mask under causal attention."""
    places = torch.arange(1, targets.shape[1] + 1, device=targets.device)
    counts = (places >= spans[:, :1]) & (places < spans[:, 1:])
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * counts.flatten()).sum() / counts.sum()
