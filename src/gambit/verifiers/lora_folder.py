"""Verifiers that Gambit trains, on disk: `verifier.json`, and the adapter with its head in safetensors files."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field
from safetensors import SafetensorError

from gambit.config.trust import ScorerTrust
from gambit.errors import UserError
from gambit.scorers.base import MadeFor
from gambit.stats import Floats, all_sigmoids
from gambit.storage.files import files_hash, read_record, write_whole
from gambit.types import Aggregation

if TYPE_CHECKING:
    import torch
INFO_FILE = "verifier.json"
WEIGHTS = "weights-*.safetensors"
HEAD = "head.weight"
ALL_LINEAR = "all-linear"
WHAT = "a verifier's description"
FIX = "give a folder that `gambit scorer train --architecture verifier` wrote"


class Platt(BaseModel, frozen=True, extra="forbid"):
    """The calibration of a verifier: sigmoid(slope × logit + offset) is the chance that the trace ends right."""

    slope: float = 1.0
    offset: float = 0.0

    def chances(self, logits: Floats) -> Floats:
        """Returns the chances that traces with these logits end right."""
        return all_sigmoids(self.slope * logits + self.offset)


class LoraInfo(BaseModel, frozen=True, extra="forbid"):
    """The description of a verifier on disk: its origin, its shape, and how to read its scores."""

    format: Literal[1] = 1
    architecture: str = "verifier"
    base_model: str
    base_model_hash: str | None
    hidden_size: int
    boundary_rule: str = "blank-line"
    rank: int = 16
    alpha: float = 16.0
    targets: str = ALL_LINEAR  # names of the linear layers with an adapter, joined by commas, or all of them
    aggregation: Aggregation = Aggregation.LAST  # of a trace's thoughts: the logit of the latest one, or their mean
    calibration: Platt = Platt()
    training: dict[str, Any] = Field(default_factory=dict)  # data, recipe, division
    trust: ScorerTrust | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)  # on held-out problems

    def made_for(self, name: str = "the verifier") -> MadeFor:
        return MadeFor(name, self.hidden_size, self.boundary_rule, self.base_model_hash, self.base_model)


def is_verifier(path: str | Path) -> bool:
    """Returns whether a path is a checkpoint folder; an exported verifier has no adapter of its own."""
    return (Path(path) / INFO_FILE).is_file() and any(Path(path).glob(WEIGHTS))


def read_info(folder: Path) -> LoraInfo:
    return read_record(LoraInfo, folder / INFO_FILE, WHAT, FIX)


def write_info(folder: Path, info: LoraInfo) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / INFO_FILE, f"{info.model_dump_json(indent=1)}\n".encode())


def write_weights(folder: Path, tensors: Mapping[str, "torch.Tensor"]) -> Path:
    """Writes the weights to one file; those of an earlier verifier in this folder are removed."""
    from safetensors.torch import save

    for old in folder.glob(WEIGHTS):
        old.unlink()
    path = folder / "weights-00001-of-00001.safetensors"
    write_whole(path, save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}))
    return path


def read_weights(folder: Path) -> dict[str, "torch.Tensor"]:
    """Reads the weights, also of earlier versions, which wrote several files."""
    from safetensors.torch import load_file

    paths = sorted(folder.glob(WEIGHTS))
    if not paths or len(paths) != int(paths[0].stem.rpartition("-")[2]):
        raise UserError(f"{folder} holds {len(paths)} files {WEIGHTS}, not as many as their names say: copy it again")
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            found |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read as safetensors ({error}): copy it again") from error
    return found


def identity(folder: Path) -> str:
    """Returns a hash of the adapter and its description."""
    return files_hash(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]))[-16:]
