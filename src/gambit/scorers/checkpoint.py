"""Loads and saves scorer checkpoints, and imports STEP's published ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gambit.config.trust import ScorerTrust
from gambit.errors import UserError, reason_of
from gambit.events import Json
from gambit.scorers.base import Scorer, ScorerInfo
from gambit.scorers.mlp import (
    BLEND,
    METADATA_KEY,
    TENSORS,
    BlendScorer,
    MlpScorer,
    check_finite,
    load_blend,
    load_mlp,
    save_mlp,
)

if TYPE_CHECKING:
    import torch


def load_checkpoint(path: Path) -> Scorer:
    """The scorer in a file, whatever its architecture."""
    architecture = read_metadata(path).get("architecture", "mlp")
    if architecture == "sequence":
        from gambit.scorers.sequence import load_sequence

        return load_sequence(path)
    return load_blend(path) if architecture == BLEND else load_mlp(path)


def save_checkpoint(scorer: Scorer, path: Path, extra: dict[str, object] | None = None) -> None:
    """Write a trained scorer; `extra` (training data, metrics) joins the metadata."""
    from gambit.scorers.sequence import SequenceScorer, save_sequence

    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(scorer, MlpScorer | BlendScorer):
        save_mlp(scorer, path, extra)
    elif isinstance(scorer, SequenceScorer):
        save_sequence(scorer, path, extra)
    else:
        raise UserError(f"a scorer of type {type(scorer).__name__} has no checkpoint format")


def read_metadata(path: Path) -> dict[str, Json]:
    """All a checkpoint says about itself; empty where it says nothing."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        metadata: dict[str, Json] = json.loads(header.get(METADATA_KEY, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a safetensors scorer ({error})") from error
    return metadata


def add_metrics(path: Path, metrics: Mapping[str, Json], trust: ScorerTrust | None = None) -> None:
    """Write what a scorer reached into its own checkpoint; the weights stay as they are."""
    from safetensors.torch import load_file, save_file

    metadata = read_metadata(path)
    before = metadata.get("metrics")
    metadata["metrics"] = {**(before if isinstance(before, dict) else {}), **metrics}
    if trust is not None:
        metadata["trust"] = trust.to_json()
    save_file(load_file(path), path, metadata={METADATA_KEY: json.dumps(metadata)})


class _Unread:
    """Stands for a number that a file holds and nobody needs; takes what belongs to it, and forgets it."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


# How pickles name what makes a numpy scalar, before numpy 2 and since.
NUMPY_SCALARS = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


def read_published(path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weights in a published STEP checkpoint: a state dict, or a dict that holds one as `model_state_dict`.

    Read weights-only: a pickle that wants to do more than make tensors is refused before it does anything. The metrics
    beside the weights may be numpy scalars (scikit-learn returns them); nobody needs them, so they are not made.
    """
    import pickle

    import torch

    unread: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [(_Unread, name) for name in NUMPY_SCALARS]
    try:
        with torch.serialization.safe_globals(unread):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason_of(error)}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not a torch file of plain weights; nothing in it was executed") from error
    state = content.get("model_state_dict", content) if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__}, not a state dict")
    return _checked(path, {str(name): value for name, value in state.items()})


def _checked(path: Path, state: Mapping[str, object]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    if set(state) != set(TENSORS):
        missing, unknown = sorted(set(TENSORS) - set(state)), sorted(set(state) - set(TENSORS))
        raise UserError(f"{path}: not a STEP scorer; missing keys: {', '.join(missing) or 'none'}; "
                        f"unknown keys: {', '.join(unknown[:8]) or 'none'}")  # fmt: skip
    tensors = [state[name] for name in TENSORS]
    w1, b1, w2, b2 = (tensor.float() if isinstance(tensor, torch.Tensor) else torch.empty(0) for tensor in tensors)
    width = len(b1)
    if w1.dim() != 2 or w1.shape[0] != width or w2.shape != (1, width) or b2.shape != (1,):
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(TENSORS, (w1, b1, w2, b2), strict=True))
        raise UserError(f"{path}: shapes do not fit a two-layer scorer: {shapes}")
    check_finite(path, dict(zip(TENSORS, (w1, b1, w2, b2), strict=True)))
    return w1, b1, w2, b2


def import_published(path: Path, info: ScorerInfo) -> MlpScorer:
    """A published scorer with the metadata its file lacks."""
    weights = read_published(path)
    if info.hidden_size is not None and info.hidden_size != weights[0].shape[1]:
        raise UserError(f"{path}: the weights take hidden size {weights[0].shape[1]}, {info.base_model} has "
                        f"{info.hidden_size}: name the model it was trained for with --base-model")  # fmt: skip
    return MlpScorer(dataclasses.replace(info, hidden_size=int(weights[0].shape[1])), weights)
