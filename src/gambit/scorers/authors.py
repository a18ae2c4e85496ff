"""Checkpoints as STEP and the authors of Gambit write them: torch files, read without running anything in them."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gambit.errors import UserError, reason_of
from gambit.scorers.base import MadeFor, Scorer, ScorerInfo, check_fit
from gambit.scorers.checkpoint import check_finite, check_names, mlp_weights
from gambit.scorers.mlp import DEEP, KINDS, TENSORS, MlpScorer

if TYPE_CHECKING:
    import torch

    from gambit.scorers.sequence import SequenceShape

SUFFIXES = (".pt", ".pth")
SEQUENCE = "sequence_transformer"

USUAL_HEADS, USUAL_BASE, USUAL_LENGTH = 4, 10_000.0, 4096  # where their file does not say
# Their names of a sequence scorer's tensors, and ours; in each layer gate and up are one tensor of ours.
OUTER = {"input_proj.0": "input_norm", "input_proj.1": "input", "norm": "output_norm", "head": "output"}
INNER = {
    "norm1.weight": "attention_norm.weight", "norm1.bias": "attention_norm.bias", "attn.qkv.weight":
    "query_key_value.weight", "attn.out_proj.weight": "mix.weight", "norm2.weight": "mlp_norm.weight",
    "norm2.bias": "mlp_norm.bias", "ffn.down.weight": "down.weight",
}  # fmt: skip


class TorchFile(NamedTuple):
    """The weights in a torch file, in float32, and what its writer says of their shape."""

    path: Path
    state: dict[str, torch.Tensor]
    config: Mapping[str, Any]


def is_torch_file(name: str | Path) -> bool:
    """Returns whether a name is that of a torch file."""
    return Path(name).suffix.lower() in SUFFIXES


def blob_hash(content: bytes) -> str:
    """Returns git's hash of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def load_torch_scorer(path: Path, info: ScorerInfo | None = None, content: bytes | None = None) -> Scorer:
    """Returns the scorer in a torch file; its `content` need not be on the disk.

    `info` adds what the file does not say. By default that is what all of them share: states of boundary tokens, and
    the mean of a trace's thoughts. Their engine takes the mean of a sequence scorer too.
    """
    file = read_torch_file(path, content)
    info = info or ScorerInfo("")
    is_sequence = file.config.get("type") == SEQUENCE or file.config.get("arch") == "encoder"
    scorer = _sequence(file, info) if is_sequence or "input_proj.1.weight" in file.state else _mlp(file, info)
    fix = "name the model it was trained for with --base-model"
    check_fit(MadeFor(f"{path}", scorer.info.hidden_size), MadeFor(f"{info.base_model}", info.hidden_size), fix)
    return scorer


class _Unread:
    """Placeholder for pickled numpy scalars, which are ignored."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


# The names in pickles of what makes a numpy scalar, before numpy 2 and since.
NUMPY_SCALARS = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


def read_torch_file(path: Path, content: bytes | None = None) -> TorchFile:
    """Reads a state dict, or a dict that holds one as `model_state_dict`.

    Loads weights only: a pickle that wants to do more than make tensors is refused before it does anything. The metrics
    beside the weights may be numpy scalars (scikit-learn returns them), which are not made.
    """
    import torch

    unread: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [(_Unread, name) for name in NUMPY_SCALARS]
    try:
        with torch.serialization.safe_globals(unread):
            source = path if content is None else io.BytesIO(content)
            found = torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason_of(error)}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not a torch file of plain weights; nothing in it was executed") from error
    state = found.get("model_state_dict", found) if isinstance(found, Mapping) else None
    if not isinstance(state, Mapping):
        raise UserError(f"{path}: holds a {type(found).__name__}, not a state dict")
    config = found.get("model_config")
    values = {
        str(name): value.float() if isinstance(value, torch.Tensor) else torch.empty(0) for name, value in state.items()
    }
    return TorchFile(path, values, config if isinstance(config, Mapping) else {})


def _mlp(file: TorchFile, info: ScorerInfo) -> MlpScorer:
    """Returns an MLP of two to four layers; two are STEP's."""
    weights = mlp_weights(file.path, file.state)
    architecture = MlpScorer.architecture if len(weights) == len(TENSORS) else DEEP
    info = dataclasses.replace(info, architecture=architecture, hidden_size=int(weights[0].shape[1]))
    return MlpScorer(info, weights)


def _sequence(file: TorchFile, info: ScorerInfo) -> Scorer:
    """Returns a `sequence_transformer` as a sequence scorer of ours."""
    from gambit.scorers.sequence import ARCHITECTURE, sequence_scorer

    shape = _sequence_shape(file)
    info = dataclasses.replace(info, architecture=ARCHITECTURE, hidden_size=shape.features)
    check_finite(file.path, file.state)
    return sequence_scorer(f"{file.path}", info, shape, _renamed(file, shape))


def _sequence_shape(file: TorchFile) -> SequenceShape:
    from gambit.scorers.sequence import SequenceShape, ShapeError

    needed = ("input_proj.1.weight", "layers.0.ffn.gate.weight")
    if missing := [name for name in needed if name not in file.state or file.state[name].dim() != 2]:
        raise UserError(f"{file.path}: not a sequence scorer; no matrix {missing[0]}")
    first, gate = (file.state[name] for name in needed)
    layers = {name.split(".")[1] for name in file.state if name.startswith("layers.")}
    try:
        shape = SequenceShape(
            features=first.shape[1],
            width=first.shape[0],
            layers=len(layers),
            heads=int(file.config.get("nhead", USUAL_HEADS)),
            max_thoughts=int(file.config.get("max_len", USUAL_LENGTH)),
            mlp_width=len(gate),
            rope_base=float(file.config.get("rope_base", USUAL_BASE)),
        )
    except (ShapeError, TypeError, ValueError) as error:
        raise UserError(f"{file.path}: its model_config fits no sequence scorer: {error}") from error
    _check_rotation(file, shape)
    return shape


def _check_rotation(file: TorchFile, shape: SequenceShape) -> None:
    """Raises where the angles in the file are not those of its `rope_base`: scores would differ without a trace."""
    import torch

    half = shape.width // shape.heads // 2
    speeds = shape.rope_base ** (-torch.arange(half) / half)
    for name, stored in file.state.items():
        if name.endswith(".attn.inv_freq") and (
            stored.shape != speeds.shape or not torch.allclose(stored, speeds, rtol=1e-4, atol=0.0)
        ):
            raise UserError(f"{file.path}: {name} is not that of {shape.heads} heads and rope_base "
                            f"{shape.rope_base:g}, which its model_config names")  # fmt: skip


def _renamed(file: TorchFile, shape: SequenceShape) -> dict[str, torch.Tensor]:
    """Returns the tensors under our names; raises where one is missing or left over."""
    import torch

    ours = {f"{theirs}.{kind}": f"{name}.{kind}" for theirs, name in OUTER.items() for kind in KINDS}
    joined, unused = {}, set()
    for layer in map(str, range(shape.layers)):
        ours |= {f"layers.{layer}.{theirs}": f"blocks.{layer}.{name}" for theirs, name in INNER.items()}
        joined[f"blocks.{layer}.gate_up.weight"] = [f"layers.{layer}.ffn.{part}.weight" for part in ("gate", "up")]
        unused.add(f"layers.{layer}.attn.inv_freq")
    needed = {*ours, *(name for pair in joined.values() for name in pair)}
    check_names(file.path, file.state, needed | (unused & set(file.state)), "a sequence")
    found = {name: file.state[theirs] for theirs, name in ours.items()}
    return found | {name: torch.cat([file.state[part] for part in pair]) for name, pair in joined.items()}
