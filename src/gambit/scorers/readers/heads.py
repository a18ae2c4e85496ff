"""What turns a verifier's hidden state into a probability, read from its weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gambit.errors import UserError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Linear:
    """W·h + b."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        out = states @ self.weight.T
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class Head:
    """Linear layers with ReLU between them; the last gives one logit.

    A head of two classes gives the difference of both: its sigmoid is the softmax of the second.
    """

    layers: tuple[Linear, ...]

    def probability(self, states: torch.Tensor) -> torch.Tensor:
        """[n] of [n, hidden]."""
        for layer in self.layers[:-1]:
            states = layer(states).relu()
        return self.layers[-1](states)[:, 0].sigmoid()

    def to(self, device: torch.device) -> Head:
        """In float32: it is small, and scores are compared."""
        return Head(tuple(
            Linear(each.weight.to(device).float(), None if each.bias is None else each.bias.to(device).float())
            for each in self.layers
        ))  # fmt: skip


def difference(layer: Linear, yes: int, no: int) -> Linear:
    """The logit of one output against another."""
    bias = None if layer.bias is None else (layer.bias[yes] - layer.bias[no])[None]
    return Linear((layer.weight[yes].float() - layer.weight[no].float())[None], bias)


def as_one_logit(layer: Linear, folder: str) -> Linear:
    """One label as it is, the second of two against the first."""
    num_labels = len(layer.weight)
    if num_labels > 2:
        raise UserError(f"{folder}: its head has {num_labels} classes: which is the good one cannot be told; use a "
                        "classifier with one or two")  # fmt: skip
    return layer if num_labels == 1 else difference(layer, yes=1, no=0)


def shifted(layer: Linear, offset: float) -> Linear:
    """With a constant added to its output."""
    if offset == 0.0:
        return layer
    bias = layer.weight.new_full((1,), offset).float() + (0.0 if layer.bias is None else layer.bias.float())
    return Linear(layer.weight, bias)


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Single tensors of a model folder; those it lacks are left out."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in _files_with(folder, names):
        with safe_open(file, framework="pt") as tensors:
            for name in set(names).intersection(tensors.keys()):
                found[name] = tensors.get_tensor(name)
    return found


def _files_with(folder: Path, names: Sequence[str]) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no weights in safetensors files")
        return files
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return sorted({folder / places[name] for name in names if name in places})


def has_tensor(folder: Path, name: str) -> bool:
    return bool(read_tensors(folder, (name,)))


def read_output_layer(folder: Path) -> torch.Tensor:
    """[vocabulary, hidden]; a model with tied weights has its embedding for it."""
    names = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
    found = read_tensors(folder, names)
    if not found:
        raise UserError(f"{folder}: its weights have none of {', '.join(names)}")
    return next(found[name] for name in names if name in found)


def read_linear(folder: Path, name: str) -> Linear:
    """A layer by its name in the weights."""
    found = read_tensors(folder, (f"{name}.weight", f"{name}.bias"))
    if f"{name}.weight" not in found:
        raise UserError(f"{folder}: its weights have no {name}.weight, which the head of this format is made of")
    return Linear(found[f"{name}.weight"], found.get(f"{name}.bias"))
