"""Checkpoints of scorers: safetensors files with JSON metadata. Imports STEP's published ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import TypeAdapter

from gambit.config.trust import ScorerTrust
from gambit.errors import UserError, reason_of
from gambit.events import Json
from gambit.scorers.base import MadeFor, Scorer, ScorerInfo, check_fit
from gambit.scorers.mlp import TENSORS, BlendScorer, MlpScorer
from gambit.storage.files import object_in, record_in, write_whole

if TYPE_CHECKING:
    import torch

METADATA_KEY = "gambit"  # where the JSON metadata lives in a safetensors header
FORMAT = 1
NEEDED = ("architecture", "hidden_size", "state_position", "boundary_rule", "aggregation")
WHAT, FIX = "a scorer's checkpoint", "give another file, or train the scorer again with `gambit scorer train`"


@runtime_checkable
class SavedScorer(Scorer, Protocol):
    """A scorer with a checkpoint format."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the weights by name."""

    @property
    def shape_metadata(self) -> dict[str, object]:
        """Returns what else the weights need to be read again."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint file, its metadata checked."""

    path: Path
    info: ScorerInfo
    metadata: dict[str, Any]
    tensors: dict[str, torch.Tensor]  # in float32, all values finite


def load_checkpoint(path: Path) -> Scorer:
    """Loads a scorer of any architecture."""
    content = read_checkpoint(path)
    if content.info.architecture in (MlpScorer.architecture, BlendScorer.architecture):
        return load_mlp(content)
    from gambit.scorers.sequence import ARCHITECTURE, load_sequence

    if content.info.architecture == ARCHITECTURE:
        return load_sequence(content)
    known = ", ".join((MlpScorer.architecture, BlendScorer.architecture, ARCHITECTURE))
    raise UserError(f"{path}: unknown architecture {content.info.architecture!r}, known are {known}; {FIX}")


def save_checkpoint(scorer: Scorer, path: Path, extra: Mapping[str, object] | None = None) -> None:
    """Writes a trained scorer. `extra` (training data, metrics) joins the metadata."""
    if not isinstance(scorer, SavedScorer):
        raise UserError(f"a scorer of type {type(scorer).__name__} has no checkpoint format")
    info = TypeAdapter(ScorerInfo).dump_python(scorer.info, mode="json")
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, scorer.tensors(), {"format": FORMAT, **info, **scorer.shape_metadata, **(extra or {})})


def read_checkpoint(path: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    metadata = read_metadata(path)
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path}: format {metadata.get('format')!r}, this version reads {FORMAT}; {FIX}")
    if missing := [name for name in NEEDED if name not in metadata]:
        raise UserError(f"{path} is not {WHAT}: its metadata must name {', '.join(missing)}; {FIX}")
    info = record_in(ScorerInfo, json.dumps(metadata), f"{path}", WHAT, FIX)
    try:
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as a safetensors scorer ({error}); {FIX}") from error
    check_finite(path, tensors)
    return Checkpoint(path, info, metadata, tensors)


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns everything that a checkpoint says about itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as a safetensors scorer ({error}); {FIX}") from error
    if METADATA_KEY not in header:
        raise UserError(f"{path} is not {WHAT}: it has no Gambit metadata; {FIX}")
    return object_in(header[METADATA_KEY], f"the metadata of {path}", "a JSON object", FIX)


def add_metrics(path: Path, metrics: Mapping[str, Json], trust: ScorerTrust | None = None) -> None:
    """Writes what a scorer reached into its own checkpoint. The weights stay as they are."""
    from safetensors.torch import load_file

    metadata = read_metadata(path)
    before = metadata.get("metrics")
    metadata["metrics"] = {**(before if isinstance(before, dict) else {}), **metrics}
    if trust is not None:
        metadata["trust"] = trust.to_json()
    _write(path, load_file(path), metadata)


def _write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, object]) -> None:
    from safetensors.torch import save

    content = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    write_whole(path, save(content, metadata={METADATA_KEY: json.dumps(metadata)}))


def check_finite(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises where weights are not numbers: every score would be NaN, or the same."""
    for name, tensor in tensors.items():
        if wrong := int((~tensor.isfinite()).sum()):
            raise UserError(f"{path}: {wrong:,} of the {tensor.numel():,} values of tensor {name} are NaN or infinite: "
                            "use another checkpoint, or train the scorer again")  # fmt: skip


def load_mlp(content: Checkpoint) -> MlpScorer | BlendScorer:
    """Returns an MLP, or a blend of one with token confidence."""
    path, info = content.path, content.info
    names = (*TENSORS, *((BlendScorer.slope_name,) if info.architecture == BlendScorer.architecture else ()))
    if missing := [name for name in names if name not in content.tensors]:
        raise UserError(f"{path}: not an MLP scorer, tensors missing: {', '.join(missing)}; {FIX}")
    layers = _checked_layers(path, content.tensors)
    if (takes := layers[0].shape[1]) != (info.hidden_size or 0) * len(info.layers):
        times = f" times {len(info.layers)} layers" if len(info.layers) > 1 else ""
        raise UserError(f"{path}: metadata says hidden size {info.hidden_size}{times}, the weights take {takes}; {FIX}")
    mlp = MlpScorer(info, layers)
    if info.architecture == MlpScorer.architecture:
        return mlp
    return BlendScorer(info, mlp, float(content.tensors[BlendScorer.slope_name]))


# -- published ones --------------------------------------------------------------------------------------------


class _Unread:
    """Placeholder for pickled numpy scalars, which are ignored."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


# The names in pickles of what makes a numpy scalar, before numpy 2 and since.
NUMPY_SCALARS = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


def import_published(path: Path, info: ScorerInfo) -> MlpScorer:
    """Returns a published STEP scorer with the metadata that its file lacks."""
    weights = read_published(path)
    takes = int(weights[0].shape[1])
    model = MadeFor(f"{info.base_model}", info.hidden_size)
    check_fit(MadeFor(f"{path}", takes), model, "name the model it was trained for with --base-model")
    return MlpScorer(dataclasses.replace(info, hidden_size=takes), weights)


def read_published(path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reads the weights in a STEP checkpoint: a state dict, or a dict that holds one as `model_state_dict`.

    Loads weights only: a pickle that wants to do more than make tensors is refused before it does anything. The metrics
    beside the weights may be numpy scalars (scikit-learn returns them), which are not made.
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
    if set(state) != set(TENSORS):
        names = set(map(str, state))
        missing, unknown = sorted(set(TENSORS) - names), sorted(names - set(TENSORS))
        raise UserError(f"{path}: not a STEP scorer; missing keys: {', '.join(missing) or 'none'}; "
                        f"unknown keys: {', '.join(unknown[:8]) or 'none'}")  # fmt: skip
    tensors = {
        name: value.float() if isinstance(value, torch.Tensor) else torch.empty(0) for name, value in state.items()
    }
    layers = _checked_layers(path, tensors)
    check_finite(path, tensors)
    return layers


def _checked_layers(
    path: Path, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns W₁, b₁, W₂, b₂ of a two-layer network."""
    w1, b1, w2, b2 = (tensors[name] for name in TENSORS)
    width = len(b1) if b1.dim() else 0
    if w1.dim() != 2 or w1.shape[0] != width or w2.shape != (1, width) or b2.shape != (1,):
        shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in TENSORS)
        raise UserError(f"{path}: shapes do not fit a two-layer scorer: {shapes}")
    return w1, b1, w2, b2
