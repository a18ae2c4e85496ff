"""The paper's history-aware scorer: a small causal transformer over a trace's thoughts."""

import copy
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

import torch
from pydantic import AliasChoices, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from gambit.errors import UserError
from gambit.scorers.base import PastThoughts, ScorerInfo, ThoughtBatch
from gambit.scorers.checkpoint import FIX
from gambit.storage.files import record_in
from gambit.types import Aggregation

ARCHITECTURE = "sequence"
SHAPE = "shape"  # its place in the metadata
_GATHERED = 1 << 25  # numbers, of keys or values of one layer: 128 MiB


class ShapeError(UserError, ValueError):
    """A network that cannot be built. A ValueError too, so that pydantic names its place in a file."""


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """The sizes of the network.

    `max_thoughts` bounds the cost of a thought: it attends to itself and to the `max_thoughts - 1` thoughts before it,
    in training and in a search alike. Positions are relative (RoPE), so that a longer trace is scored as well. Earlier
    thoughts reach it through the layers below only.
    """

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid")

    features: int  # of a state; several layers concatenated count together
    width: int = 256
    layers: int = 2
    heads: int = 4
    max_thoughts: Annotated[int, Field(validation_alias=AliasChoices("max_thoughts", "max_steps"))] = 1024
    mlp_width: int | None = None  # None: two thirds of four times the width, as SwiGLU has three matrices
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        given = [value for value in dataclasses.astuple(self) if value is not None]
        if not min(given) >= 1 or not math.isfinite(self.rope_base) or self.width % (2 * self.heads):
            raise ShapeError(f"{self}: everything must be positive, and width a multiple of twice the heads")

    @property
    def inner_width(self) -> int:
        """The width between the matrices of a block's MLP, by default a multiple of eight."""
        return self.mlp_width or -(-self.width * 8 // 24) * 8


class SequenceNetwork(nn.Module):
    """x = GELU(W·LN(h)); blocks with RoPE and SwiGLU; logit = w·LN(z). All in float32, as scorers are."""

    def __init__(self, shape: SequenceShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.input_norm = nn.LayerNorm(shape.features)
        self.input = nn.Linear(shape.features, shape.width)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.output_norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Returns logits [batch, thoughts] of states [batch, thoughts, features], each after the thoughts up to it.

        It is causal, so that zeros on the right of a shorter trace change nothing on their left.
        """
        index = torch.arange(states.shape[1], device=states.device)
        rotation = Rotation.at(index, self.shape)
        distance = index[:, None] - index
        mask = (distance >= 0) & (distance < self.shape.max_thoughts)  # where the row's thought may look
        x = self.embed(states)
        for block in self.blocks:
            x = block(x, rotation, mask)
        return self.read(x)

    def advance(self, states: Tensor, memory: Tensor, past: PastThoughts) -> Tensor:
        """Returns logits [n] of n traces' next thoughts, states [n, features]; stores keys and values in `past.own`."""
        rotation = Rotation.at(past.positions[:, None], self.shape)
        # The thought itself is the last column, which is always seen.
        mask = torch.cat((past.mask, past.mask.new_ones(len(states), 1)), dim=1)[:, None, None]
        slots = torch.cat((past.slots, past.own[:, None]), dim=1)
        x = self.embed(states)[:, None]
        for block, store in zip(self.blocks, memory, strict=True):
            assert isinstance(block, Block)
            x = block.advance(x, rotation, mask, store, slots)
        return self.read(x)[:, 0]

    def embed(self, states: Tensor) -> Tensor:
        return nn.functional.gelu(self.input(self.input_norm(states.float())))

    def read(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.output_norm(x))
        return logits.squeeze(-1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE at given thoughts: pairs (i, i + half) of a head's numbers are turned by thought · base^(-i/half)."""

    cos: Tensor  # [thoughts, half], or [batch, 1, 1, half]
    sin: Tensor

    @classmethod
    def at(cls, thoughts: Tensor, shape: SequenceShape) -> Self:
        """Returns the rotation at [thoughts], alike for all of a batch, or at [batch, 1]."""
        half = shape.width // shape.heads // 2
        speeds = shape.rope_base ** (-torch.arange(half, device=thoughts.device, dtype=torch.float32) / half)
        angles = thoughts.float()[..., None] * speeds
        angles = angles if thoughts.dim() == 1 else angles[:, None]
        return cls(angles.cos(), angles.sin())

    def turn(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)


class Block(nn.Module):
    """Attention over the thoughts so far, then SwiGLU; the norm comes first in both."""

    def __init__(self, shape: SequenceShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)  # in training alone
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.mix = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.gate_up = nn.Linear(shape.width, 2 * shape.inner_width, bias=False)
        self.down = nn.Linear(shape.inner_width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor) -> Tensor:
        query, key, value = self._project(x, rotation)
        return self._combine(x, self._attended(query, key, value, mask))

    def advance(self, x: Tensor, rotation: Rotation, mask: Tensor, store: Tensor, slots: Tensor) -> Tensor:
        """Attends to a store [2, slots, width] of this layer's keys, turned to their positions, and values."""
        query, key, value = self._project(x, rotation)
        own = slots[:, -1]
        store[0, own], store[1, own] = _joined(key)[:, 0], _joined(value)[:, 0]
        # One flat selection of rows: six times as fast on a CPU as indexing by the matrix.
        flat = slots.flatten()
        keys, values = (self._split(side.index_select(0, flat).view(*slots.shape, side.shape[1])) for side in store)
        return self._combine(x, self._attended(query, keys, values, mask))

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        dropout = self.dropout.p if self.training else 0.0
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)

    def _project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        joined = self.query_key_value(self.attention_norm(x))
        query, key, value = map(self._split, joined.chunk(3, dim=-1))
        return rotation.turn(query), rotation.turn(key), value

    def _split(self, x: Tensor) -> Tensor:
        """Turns [batch, thoughts, width] into [batch, heads, thoughts, width of a head]."""
        return x.view(*x.shape[:-1], self.heads, x.shape[-1] // self.heads).transpose(1, 2)

    def _combine(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.dropout(self.mix(_joined(attended)))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.dropout(self.down(self.dropout(silu(gate) * up)))
        return out


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


@dataclass(frozen=True, slots=True)
class SequenceScorer:
    """The sigmoid of the network's logit at the last thought. Engines keep the thoughts before it (`HistoryScorer`)."""

    info: ScorerInfo
    network: SequenceNetwork

    @property
    def max_past(self) -> int:
        return self.network.shape.max_thoughts - 1

    def to(self, device: torch.device) -> "SequenceScorer":
        """Returns a copy: the network may still be in training, and must not be frozen or moved."""
        network = copy.deepcopy(self.network).to(device).eval().requires_grad_(False)
        return SequenceScorer(self.info, network)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.network.state_dict())

    @property
    def shape_metadata(self) -> dict[str, object]:
        return {SHAPE: dataclasses.asdict(self.network.shape)}

    def memory(self, num_slots: int) -> Tensor:
        shape = self.network.shape
        weight = self.network.output.weight
        return torch.zeros(shape.layers, 2, num_slots, shape.width, dtype=weight.dtype, device=weight.device)

    def score(self, thoughts: ThoughtBatch) -> Tensor:
        """Scores each thought as if it were the first of its trace."""
        logits: Tensor = self.network(thoughts.states[:, None])
        return logits.squeeze(1).sigmoid()

    def score_next(self, thoughts: ThoughtBatch, memory: Tensor, past: PastThoughts) -> Tensor:
        """Scores in several batches if histories are long, so that attention never gathers much of them at once."""
        size = max(_GATHERED // (self.network.shape.width * (past.slots.shape[1] + 1)), 1)
        batches = zip(torch.split(thoughts.states, size), past.split(size), strict=True)
        return torch.cat([self.network.advance(states, memory, rows) for states, rows in batches]).sigmoid()


def sequence_info(shape: SequenceShape, info: ScorerInfo | None = None) -> ScorerInfo:
    """Returns the metadata of a sequence scorer for one layer's states; other fields of `info` stay."""
    base = info or ScorerInfo(ARCHITECTURE, hidden_size=shape.features)
    return dataclasses.replace(base, architecture=ARCHITECTURE, aggregation=Aggregation.LAST)


def load_sequence(
    path: Path, info: ScorerInfo, metadata: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> SequenceScorer:
    """Returns the scorer in a checkpoint, its shapes checked against its own metadata."""
    described = json.dumps(metadata.get(SHAPE))
    shape = record_in(SequenceShape, described, f"the {SHAPE} in {path}", "a sequence scorer's", FIX)
    return sequence_scorer(f"{path}", info, shape, tensors)


def sequence_scorer(
    where: str, info: ScorerInfo, shape: SequenceShape, tensors: Mapping[str, Tensor]
) -> SequenceScorer:
    """Returns a scorer of these weights; raises if they do not fit the shape."""
    network = SequenceNetwork(shape)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: the weights are not those of {shape}: {reason}; {FIX}") from error
    return SequenceScorer(info, network.eval().requires_grad_(False))
