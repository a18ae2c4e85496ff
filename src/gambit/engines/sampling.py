"""Draws the next token of every row, with noise that depends on seed, trace and position only."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

CONFIDENCE_TOP = 20  # DeepConf: the top 20 tokens of the raw distribution
FORBIDDEN = 20.0  # minus the log-probability that a token counts with where a schema forbids it
_CANDIDATES = 1024  # sorted first when only top_p filters: a full sort of the vocabulary is rarely needed
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def noise_keys(seeds: Iterable[int], traces: Iterable[int]) -> npt.NDArray[np.uint64]:
    """Returns one 64-bit key per trace."""
    mixed = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64))
    return _mix((mixed ^ np.array([*traces], np.uint64)) + _GOLDEN)


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns one number in [0, 1) per row."""
    mixed = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Applies splitmix64's finaliser: a bijection whose every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Filters:
    """Sampling parameters, one entry per row."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    has_greedy: bool
    has_filters: bool
    most_top_k: int | None = None  # if every row has a top_k; kept here, so that the device is not read for it


def filters_of(rows: npt.NDArray[np.void], device: torch.device) -> Filters:
    """Reads the parameters from a row table with fields temperature, top_p, top_k, min_p."""
    names = ("temperature", "top_p", "top_k", "min_p")
    temperature, top_p, top_k, min_p = (torch.from_numpy(rows[name].copy()).to(device) for name in names)
    return Filters(
        temperature, top_p, top_k, min_p,
        has_greedy=bool((rows["temperature"] == 0).any()),
        has_filters=bool(((rows["top_p"] < 1) | (rows["top_k"] > 0) | (rows["min_p"] > 0)).any()),
        most_top_k=int(rows["top_k"].max()) if len(rows) and (rows["top_k"] > 0).all() else None,
    )  # fmt: skip


def sample(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> torch.Tensor:
    """Draws each row's token by inverting the distribution function in vocabulary order at `uniform`.

    The order does not depend on filters: a row must not draw another token because its neighbours are filtered.
    """
    temperature = filters.temperature.clamp(min=1e-6)
    scaled = logits.float() / temperature[:, None]
    if filters.has_filters:
        scaled.masked_fill_(scaled < _thresholds(scaled, filters)[:, None], float("-inf"))
    cumulative = torch.softmax(scaled, dim=-1).cumsum_(-1)  # in place: new memory of this size costs as much again
    total = cumulative[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # never a token of probability zero at the end
    target = torch.minimum(uniform[:, None].to(total.dtype) * total, below_total)
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    if filters.has_greedy:
        drawn = torch.where(filters.temperature == 0, logits.argmax(-1), drawn)
    return drawn


def _thresholds(scaled: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Returns the smallest scaled logit each row may draw: top_k first, then top_p of what is left, then min_p."""
    vocab = scaled.shape[-1]
    top_k = torch.where(filters.top_k > 0, filters.top_k, vocab).clamp(max=vocab)
    width = min(vocab, _CANDIDATES if filters.most_top_k is None else filters.most_top_k)
    while True:
        values = scaled.topk(width, dim=-1).values
        rank = torch.arange(width, device=scaled.device)
        in_top_k = rank < top_k[:, None]
        kept = values.masked_fill(~in_top_k, float("-inf"))
        # Where top_k cuts inside the candidates the mass is theirs alone, else that of the whole vocabulary.
        mass = torch.where(top_k <= width, kept.logsumexp(-1), scaled.logsumexp(-1))
        before = torch.softmax(kept, -1) * (kept.logsumexp(-1) - mass).exp()[:, None]
        before = before.cumsum(-1) - before
        if (
            width == vocab
            or filters.most_top_k is not None
            or bool((before[:, -1] >= filters.top_p).logical_or(top_k <= width).all())
        ):
            break
        width = vocab
    in_top_p = in_top_k & (before < filters.top_p[:, None])
    # A row without top_k and top_p keeps everything, also beyond the candidates.
    unbounded = (filters.top_p >= 1) & (filters.top_k <= 0)
    nucleus = values.masked_fill(~in_top_p, float("inf")).amin(-1).masked_fill(unbounded, float("-inf"))
    return torch.maximum(nucleus, values[:, 0] + filters.min_p.log())


def token_confidence(logits: torch.Tensor) -> torch.Tensor:
    """Returns minus the mean log-probability of the top tokens, before temperature (DeepConf)."""
    logits = logits.float()
    top, total = logits.topk(min(CONFIDENCE_TOP, logits.shape[-1]), dim=-1).values, logits.logsumexp(-1)
    top = torch.where(top.isneginf(), total[:, None] - FORBIDDEN, top)
    return total - top.mean(-1)
