"""Trains pawn's network on the corpus: AdamW, cosine schedule, loss on the traces only."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from benchmarks.pawn.corpus import Bucket
from benchmarks.pawn.probe import BLIND_LOSS, LEARNT_LOSS, Probe
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

Report = Callable[[str], None]

NUM_POINTS = 40  # of the learning curve
POINTS_PER_SAMPLE = 8  # sampling takes seconds
DECISION = 0.6
FAILING = (
    f"FAILING: products are not learnt ({DECISION:.0%} of the updates are done, the loss on their results is above "
    f"{LEARNT_LOSS}; guessing is {BLIND_LOSS:.2f}). Stop: does the run begin with a network that calculates (--start)?"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    num_updates: int = 4_000
    tokens_per_update: int = 65_536
    peak_rate: float = 1e-3
    warmup_updates: int = 200
    final_share: float = 0.02  # of the peak rate, at the end of the cosine
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    seed: int = 0

    @property
    def updates_per_point(self) -> int:
        return max(1, self.num_updates // NUM_POINTS)

    def rate(self, update: int) -> float:
        progress = update / self.num_updates
        cosine = self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak_rate * min(1.0, (update + 1) / self.warmup_updates) * cosine


TINY_RECIPE = Recipe(num_updates=4, tokens_per_update=2048)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The figures after an update."""

    update: int
    loss: float  # mean since the point before, nats per trace token
    product_loss: float  # nats per result of a product
    pass_at_1: float | None  # sampled at a few points only


def train(model: "Qwen3ForCausalLM", corpus: list[Bucket], recipe: Recipe, report: Report) -> list[CurvePoint]:
    """Returns the learning curve, each point of which is reported as it is reached."""
    device = next(model.parameters()).device
    buckets = [(torch.from_numpy(b.tokens).to(device), torch.from_numpy(b.spans).to(device)) for b in corpus]
    probe = Probe.of(model)
    if device.type == "cuda":
        _compile_layers(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=device.type == "cuda"
    )
    rng = np.random.default_rng(recipe.seed)
    shares = np.array([len(bucket.tokens) for bucket in corpus]) / sum(len(bucket.tokens) for bucket in corpus)
    curve, losses, start = [], [], time.monotonic()
    for update in range(recipe.num_updates):
        tokens, spans = _draw(buckets[rng.choice(len(buckets), p=shares)], recipe, rng)
        losses.append(_update(model, optimizer, tokens, spans, recipe, update))
        if (update + 1) % recipe.updates_per_point == 0:
            curve.append(_point(model, probe, update + 1, torch.stack(losses).mean().item(), recipe))
            losses.clear()
            report(f"{_told(curve[-1])} after {time.monotonic() - start:.0f} s")
            if is_failing(curve, recipe):
                report(FAILING)
    return curve


def _point(model: "Qwen3ForCausalLM", probe: Probe, update: int, loss: float, recipe: Recipe) -> CurvePoint:
    samples = update % (recipe.updates_per_point * POINTS_PER_SAMPLE) == 0
    return CurvePoint(update, loss, probe.product_loss(model), probe.pass_at_1(model) if samples else None)


def _told(point: CurvePoint) -> str:
    reached = "" if point.pass_at_1 is None else f", pass@1 {point.pass_at_1:.2f}"
    return f"update {point.update}: loss {point.loss:.4f}, products {point.product_loss:.3f}{reached}"


def is_failing(curve: Sequence[CurvePoint], recipe: Recipe) -> bool:
    """Returns whether the newest point is the first past DECISION of the updates, with products not learnt there."""
    *before, newest = curve
    decision = DECISION * recipe.num_updates
    is_due = newest.update >= decision and not any(point.update >= decision for point in before)
    return is_due and newest.product_loss > LEARNT_LOSS


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
