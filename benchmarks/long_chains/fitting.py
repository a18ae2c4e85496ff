"""Fits scorers to thoughts: ridge, logistic regression, STEP's two layers, and a GRU over the thoughts of a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ARCHITECTURES = ("mlp", "ridge", "logistic", "gru")
EPOCHS = 12
BATCH_THOUGHTS = 4096
BATCH_TRACES = 256
PENALTIES = (1e2, 1e3, 1e4, 1e5)
RATES = {"mlp": 5e-4, "logistic": 1e-3, "gru": 5e-4}


@dataclass
class Cut:
    """The thoughts of a collection under one boundary rule, with the states of one layer."""

    states: Tensor  # all kept states of the layer
    row: np.ndarray  # [thought]: where its state stands
    trace: np.ndarray  # [thought]
    place: np.ndarray  # [thought]: its last token
    length: np.ndarray  # [thought]: tokens of its trace
    outcomes: np.ndarray  # [thought]: whether its trace is right
    unbroken: np.ndarray  # [thought]: whether no step was wrong by then
    log_probability: np.ndarray  # [thought]: mean of the tokens so far

    def features(self, rows: Tensor) -> Tensor:
        return self.states[rows].float()

    @property
    def rows(self) -> Tensor:
        return torch.from_numpy(self.row).to(self.states.device)


class Normal(nn.Module):
    """Shifts and scales features to the training thoughts' mean and deviation."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        rows = cut.rows
        sample = cut.features(rows[torch.randperm(len(rows), device=rows.device)[:65536]])
        self.register_buffer("mean", sample.mean(0))
        self.register_buffer("deviation", sample.std(0).clamp(min=1e-3))

    def forward(self, states: Tensor) -> Tensor:
        return (states - self.mean) / self.deviation


class Gru(nn.Module):
    """Reads the thoughts of a trace in order; a logit after each."""

    def __init__(self, features: int, width: int = 256) -> None:
        super().__init__()
        self.entry = nn.Linear(features, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.exit = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        out, _ = self.cell(torch.tanh(self.entry(states)))
        logits: Tensor = self.exit(out).squeeze(-1)
        return logits


class Fitted:
    """A fitted network as a function from a cut to probabilities of its thoughts."""

    def __init__(self, network: nn.Module, normal: Normal) -> None:
        self.network, self.normal = network.eval(), normal

    @property
    def weights(self) -> dict[str, Tensor]:
        found = {**self.network.state_dict(), "mean": self.normal.mean, "deviation": self.normal.deviation}
        return {name: value.detach().cpu() for name, value in found.items()}

    @torch.inference_mode()
    def __call__(self, cut: Cut) -> np.ndarray:
        if isinstance(self.network, Gru):
            return self._by_trace(cut)
        parts = [self.network(self.normal(cut.features(rows))).squeeze(-1) for rows in torch.split(cut.rows, 65536)]
        return torch.cat(parts).sigmoid().double().cpu().numpy()

    def _by_trace(self, cut: Cut) -> np.ndarray:
        found = np.zeros(len(cut.trace))
        for spans, rows, mask in padded(cut, np.unique(cut.trace), 512):
            logits = self.network(self.normal(cut.features(rows)) * mask[..., None]).sigmoid().double().cpu().numpy()
            for own, (first, last) in zip(logits, spans, strict=True):
                found[first:last] = own[: last - first]
        return found


Padded = tuple[list[tuple[int, int]], Tensor, Tensor]


def padded(cut: Cut, traces: np.ndarray, size: int) -> list[Padded]:
    """Returns batches of traces: the span of thoughts of each, their rows [trace, thought], and which are real."""
    firsts, lasts = np.searchsorted(cut.trace, traces, "left"), np.searchsorted(cut.trace, traces, "right")
    batches = []
    for start in range(0, len(traces), size):
        spans = list(zip(firsts[start : start + size].tolist(), lasts[start : start + size].tolist(), strict=True))
        longest = max(last - first for first, last in spans)
        index = np.array([np.minimum(np.arange(first, first + longest), last - 1) for first, last in spans])
        mask = np.array([np.arange(longest) < last - first for first, last in spans])
        device = cut.states.device
        rows, real = torch.from_numpy(cut.row[index]).to(device), torch.from_numpy(mask).float().to(device)
        batches.append((spans, rows, real))
    return batches


def fit_network(
    architecture: str, train: Cut, targets: np.ndarray, weights: np.ndarray, dev: Cut,
    chosen_by: Callable[[np.ndarray], float], seed: int,
) -> tuple[Fitted, float]:  # fmt: skip
    """Returns the network of the epoch that ranks development traces best, and how well it does."""
    torch.manual_seed(seed)
    device, features = train.states.device, train.states.shape[1]
    normal = Normal(train).to(device)
    network: nn.Module
    if architecture == "gru":
        network = Gru(features)
    elif architecture == "logistic":
        network = nn.Linear(features, 1)
    else:
        network = nn.Sequential(nn.Dropout(0.1), nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, 1))
    network = network.to(device)
    is_fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(network.parameters(), RATES[architecture], weight_decay=0.01, fused=is_fused)
    goals, counts = torch.from_numpy(targets).to(device), torch.from_numpy(weights).to(device)
    best, kept = -1.0, {}
    for _ in range(EPOCHS):
        network.train()
        epoch = _gru_epoch if architecture == "gru" else _epoch
        epoch(network, normal, train, goals, counts, optimizer)
        reached = chosen_by(Fitted(network, normal)(dev))
        if reached > best:
            best, kept = reached, {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(kept)
    return Fitted(network, normal), best


def _epoch(
    network: nn.Module, normal: Normal, cut: Cut, goals: Tensor, counts: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    rows = cut.rows
    for batch in torch.split(torch.randperm(len(rows), device=rows.device), BATCH_THOUGHTS):
        logits = network(normal(cut.features(rows[batch]))).squeeze(-1)
        _descend(F.binary_cross_entropy_with_logits(logits, goals[batch], counts[batch]), optimizer)


def _gru_epoch(
    network: nn.Module, normal: Normal, cut: Cut, goals: Tensor, counts: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    traces = np.random.default_rng(int(torch.randint(1 << 30, (1,)))).permutation(np.unique(cut.trace))
    for spans, rows, mask in padded(cut, traces, BATCH_TRACES):
        logits = network(normal(cut.features(rows)) * mask[..., None])
        index = torch.tensor([[min(first + i, last - 1) for i in range(mask.shape[1])] for first, last in spans])
        index = index.to(goals.device)
        losses = F.binary_cross_entropy_with_logits(logits, goals[index], counts[index], reduction="none")
        _descend((losses * mask).sum() / mask.sum(), optimizer)


def _descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def fit_ridge(
    train: Cut, targets: np.ndarray, dev: Cut, chosen_by: Callable[[np.ndarray], float]
) -> tuple[Fitted, float]:
    """Returns the straight line whose penalty ranks development traces best, and how well it does."""
    device, features = train.states.device, train.states.shape[1]
    normal = Normal(train).to(device)
    goals = torch.from_numpy(targets).to(device).double()
    mean = goals.mean()
    gram = torch.zeros(features, features, dtype=torch.float64, device=device)
    moment = torch.zeros(features, dtype=torch.float64, device=device)
    for rows, own in zip(torch.split(train.rows, 65536), torch.split(goals, 65536), strict=True):
        inputs = normal(train.features(rows)).double()
        gram += inputs.T @ inputs
        moment += inputs.T @ (own - mean)
    best: tuple[Fitted, float] | None = None
    for penalty in PENALTIES:
        weights = torch.linalg.solve(gram + penalty * torch.eye(features, device=device), moment)
        line = nn.Linear(features, 1).to(device)
        with torch.no_grad():
            line.weight.copy_(4 * weights[None])  # near one half a logit has four times the slope of a probability
            line.bias.copy_(torch.logit(mean).reshape(1))
        fitted = Fitted(line, normal)
        reached = chosen_by(fitted(dev))
        if best is None or reached > best[1]:
            best = fitted, reached
    assert best is not None
    return best
