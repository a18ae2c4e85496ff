"""Checkpoints of scorers: safetensors files with JSON metadata."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from gambit.config.trust import ScorerTrust
from gambit.errors import UserError, reason_of
from gambit.events import Json
from gambit.scorers.base import Scorer, ScorerInfo
from gambit.scorers.mlp import DEEP, BlendScorer, MlpScorer, Weights, tensor_names
from gambit.storage.files import object_in, record_in, write_whole

if TYPE_CHECKING:
    import torch

METADATA_KEY = "gambit"  # where the JSON metadata lives in a safetensors header
FORMAT = 1
NEEDED = ("architecture", "hidden_size", "state_position", "boundary_rule", "aggregation")
CHECKPOINT = ".safetensors"
MOST_LAYERS = 4  # of the authors' MLPs
WHAT, FIX = "a scorer's checkpoint", "give another file, or train the scorer again with `gambit scorer train`"


@runtime_checkable
class SavedScorer(Scorer, Protocol):
    """A scorer with a checkpoint format."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the weights by name."""

    @property
    def shape_metadata(self) -> dict[str, object]:
        """Further metadata, without which the weights cannot be read again."""


def load_checkpoint(path: Path) -> Scorer:
    """Loads a scorer of any architecture, in float32, also from a torch file of STEP's or of the authors'."""
    from safetensors.torch import load_file

    from gambit.scorers.authors import is_torch_file, load_torch_scorer

    if is_torch_file(path):
        return load_torch_scorer(path)
    metadata = read_metadata(path)
    if metadata.get("format") != FORMAT or metadata["format"] is True:
        raise UserError(f"{path}: format {metadata.get('format')!r:.80}, this version reads {FORMAT}; {FIX}")
    if missing := [name for name in NEEDED if name not in metadata]:
        raise UserError(f"{path} is not {WHAT}: its metadata must name {', '.join(missing)}; {FIX}")
    info = record_in(ScorerInfo, json.dumps(metadata), f"{path}", WHAT, FIX)
    if info.trust is not None and info.trust.is_published:  # not for a file to say
        info = dataclasses.replace(info, trust=info.trust.model_copy(update={"is_published": False}))
    try:
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as a safetensors scorer ({error}); {FIX}") from error
    check_finite(path, tensors)
    if info.architecture in (MlpScorer.architecture, BlendScorer.architecture, DEEP):
        return _load_mlp(path, info, tensors)
    from gambit.scorers.sequence import ARCHITECTURE, load_sequence

    if info.architecture == ARCHITECTURE:
        return load_sequence(path, info, metadata, tensors)
    known = ", ".join((MlpScorer.architecture, BlendScorer.architecture, ARCHITECTURE, DEEP))
    raise UserError(f"{path}: unknown architecture {info.architecture!r:.80}, known are {known}; {FIX}")


def save_checkpoint(scorer: Scorer, path: Path, extra: Mapping[str, object] | None = None) -> None:
    """Writes a trained scorer. `extra` (training data, metrics) joins the metadata."""
    if not isinstance(scorer, SavedScorer):
        raise UserError(f"a scorer of type {type(scorer).__name__} has no checkpoint format")
    info = TypeAdapter(ScorerInfo).dump_python(scorer.info, mode="json")
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, scorer.tensors(), {"format": FORMAT, **info, **scorer.shape_metadata, **(extra or {})})


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns all metadata of a checkpoint."""
    try:
        with path.open("rb"), safe_open(path, framework="pt") as file:  # the second says of all that they are not there
            header = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as a safetensors scorer ({reason_of(error)}); {FIX}") from error
    if METADATA_KEY not in header:
        raise UserError(f"{path} is not {WHAT}: it has no Gambit metadata; {FIX}")
    return object_in(header[METADATA_KEY], f"the metadata of {path}", "a JSON object", FIX)


def add_metrics(path: Path, metrics: Mapping[str, Json], trust: ScorerTrust | None = None) -> None:
    """Adds measured results to a scorer's checkpoint. The weights stay as they are."""
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
    """Raises if weights are not numbers: every score would be NaN, or the same."""
    for name, tensor in tensors.items():
        if wrong := int((~tensor.isfinite()).sum()):
            raise UserError(f"{path}: {wrong:,} of the {tensor.numel():,} values of tensor {name} are NaN or infinite: "
                            "use another checkpoint, or train the scorer again")  # fmt: skip


def _load_mlp(path: Path, info: ScorerInfo, tensors: Mapping[str, torch.Tensor]) -> MlpScorer | BlendScorer:
    """Returns an MLP, or a blend of one with token confidence."""
    slope = None
    if info.architecture == BlendScorer.architecture:
        slope = tensors.get(BlendScorer.slope_name)
        if slope is None:
            raise UserError(f"{path}: not an MLP scorer, tensors missing: {BlendScorer.slope_name}; {FIX}")
        tensors = {name: tensor for name, tensor in tensors.items() if name != BlendScorer.slope_name}
    weights = mlp_weights(path, tensors)
    if (takes := weights[0].shape[1]) != (info.hidden_size or 0) * len(info.layers):
        times = f" times {len(info.layers)} layers" if len(info.layers) > 1 else ""
        raise UserError(f"{path}: metadata has hidden size {info.hidden_size}{times}, the weights take {takes}; {FIX}")
    mlp = MlpScorer(info, weights)
    return mlp if slope is None else BlendScorer(info, mlp, float(slope))


def mlp_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Returns the weights of an MLP of two to four layers; raises if names or shapes do not fit."""
    num_layers = max((place + 1 for place in range(MOST_LAYERS) if f"net.{2 * place}.weight" in tensors), default=0)
    names = tensor_names(max(2, num_layers))
    check_names(path, tensors, {*names}, "an MLP")
    weights = tuple(tensors[name] for name in names)
    widths = [len(bias) if bias.dim() == 1 else 0 for bias in weights[1::2]]
    inputs = [weights[0].shape[-1] if weights[0].dim() == 2 else 0, *widths]
    if [tuple(weight.shape) for weight in weights[::2]] != list(zip(widths, inputs, strict=False)) or widths[-1] != 1:
        shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in names)
        raise UserError(f"{path}: shapes do not fit an MLP scorer: {shapes}")
    check_finite(path, tensors)
    return weights


def check_names(path: Path, tensors: Mapping[str, torch.Tensor], needed: set[str], kind: str) -> None:
    """Raises where a tensor is missing or left over."""
    missing, unknown = sorted(needed - tensors.keys()), sorted(tensors.keys() - needed)
    if missing or unknown:
        raise UserError(f"{path}: not {kind} scorer; missing keys: {', '.join(missing) or 'none'}; "
                        f"unknown keys: {', '.join(unknown[:8]) or 'none'}; {FIX}")  # fmt: skip
