"""The two-layer scorer of STEP, by itself and blended with token confidence, in safetensors files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gambit.config.trust import read_trust
from gambit.errors import UserError
from gambit.scorers.base import ScorerInfo, ThoughtBatch, TwoLayers
from gambit.types import Aggregation, StatePosition

if TYPE_CHECKING:
    import torch

METADATA_KEY = "gambit"  # where the JSON metadata lives in a safetensors header
FORMAT = 1
TENSORS = ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")  # STEP's own names
BLEND = "mlp+confidence"
SLOPE = "confidence.weight"


@dataclass(frozen=True, slots=True)
class MlpScorer:
    """sigmoid(W₂·relu(W₁·h + b₁) + b₂), in float32 whatever the model's dtype; on a CPU in float64."""

    info: ScorerInfo
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    is_recordable: ClassVar[bool] = True

    def to(self, device: torch.device) -> MlpScorer:
        w1, b1, w2, b2 = (tensor.to(device) for tensor in self.weights)
        return MlpScorer(self.info, (w1, b1, w2, b2))

    @property
    def two_layers(self) -> TwoLayers:
        return TwoLayers(*self.weights, is_logit=True)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        import torch
        from torch.nn.functional import linear, relu

        # On a CPU float32 sums depend on how many rows there are. The same thought must score the same in every batch:
        # traces that say the same are equal, and which of them goes is decided by their ids and not by rounding.
        dtype = torch.float64 if states.device.type == "cpu" else torch.float32
        w1, b1, w2, b2 = (tensor.to(dtype) for tensor in self.weights)
        return linear(relu(linear(states.to(dtype), w1, b1)), w2, b2).squeeze(-1).float()

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return _sigmoid(self.logits(thoughts.states))


@dataclass(frozen=True, slots=True)
class BlendScorer:
    """sigmoid(W₂·relu(W₁·h + b₁) + b₂ + a·c): what the state says and how sure the model was of the thought.

    A sum, so that an engine can compute each part where its input is: states on the device, confidences where it is
    known which tokens are a thought.
    """

    info: ScorerInfo
    mlp: MlpScorer
    slope: float  # a
    is_recordable: ClassVar[bool] = True

    def to(self, device: torch.device) -> BlendScorer:
        return BlendScorer(self.info, self.mlp.to(device), self.slope)

    @property
    def two_layers(self) -> TwoLayers:
        return TwoLayers(*self.mlp.weights, is_logit=False)  # of its part

    def part(self, states: torch.Tensor) -> torch.Tensor:
        return self.mlp.logits(states)

    def whole(self, parts: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
        return _sigmoid(parts + self.slope * confidences)

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return self.whole(self.part(thoughts.states), thoughts.confidences)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """On a CPU by way of float64 too: in float32 a vector's last elements are computed in another way than the rest."""
    return logits.double().sigmoid().float() if logits.device.type == "cpu" else logits.sigmoid()


def load_mlp(path: Path) -> MlpScorer:
    """The scorer in a checkpoint, its shapes checked against its own metadata."""
    info, (w1, b1, w2, b2) = _read(path, "mlp", TENSORS)
    return MlpScorer(info, (w1, b1, w2, b2))


def load_blend(path: Path) -> BlendScorer:
    info, (w1, b1, w2, b2, slope) = _read(path, BLEND, (*TENSORS, SLOPE))
    return BlendScorer(info, MlpScorer(info, (w1, b1, w2, b2)), float(slope))


def _read(path: Path, architecture: str, names: Sequence[str]) -> tuple[ScorerInfo, list[torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            info = read_info(path, file.metadata() or {}, architecture)
            missing = [name for name in names if name not in file.keys()]  # noqa: SIM118 (safe_open is no mapping)
            if missing:
                raise UserError(f"{path}: not an MLP scorer, tensors missing: {', '.join(missing)}")
            tensors = [file.get_tensor(name).float() for name in names]
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as a safetensors scorer ({error})") from error
    check_finite(path, dict(zip(names, tensors, strict=True)))
    takes = tensors[0].shape[1]
    if takes != (info.hidden_size or 0) * len(info.layers):
        layers = f" times {len(info.layers)} layers" if len(info.layers) > 1 else ""
        raise UserError(f"{path}: metadata says hidden size {info.hidden_size}{layers}, the weights take {takes}")
    return info, tensors


def save_mlp(scorer: MlpScorer | BlendScorer, path: Path, extra: dict[str, object] | None = None) -> None:
    """Write a checkpoint; `extra` (training data, metrics) joins the metadata."""
    import torch
    from safetensors.torch import save_file

    metadata = {"format": FORMAT, **info_json(scorer.info), **(extra or {})}
    mlp = scorer.mlp if isinstance(scorer, BlendScorer) else scorer
    tensors = dict(zip(TENSORS, (t.contiguous() for t in mlp.weights), strict=True))
    if isinstance(scorer, BlendScorer):
        tensors[SLOPE] = torch.tensor(scorer.slope)
    save_file(tensors, path, metadata={METADATA_KEY: json.dumps(metadata)})


def check_finite(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not numbers: every score would be NaN, or the same."""
    for name, tensor in tensors.items():
        if wrong := int((~tensor.isfinite()).sum()):
            raise UserError(f"{path}: {wrong:,} of the {tensor.numel():,} values of tensor {name} are NaN or infinite: "
                            "use another checkpoint, or train the scorer again")  # fmt: skip


def info_json(info: ScorerInfo) -> dict[str, object]:
    """Plain values, for a checkpoint's header."""
    trust = None if info.trust is None else info.trust.to_json()
    return dataclasses.asdict(info) | {"trust": trust}


def read_info(path: Path, header: dict[str, str], architecture: str) -> ScorerInfo:
    """The metadata in a safetensors header, for a scorer of this architecture and no other."""
    try:
        raw = json.loads(header[METADATA_KEY])
        if raw["format"] != FORMAT or raw["architecture"] != architecture:
            found = f"format {raw['format']}, architecture {raw['architecture']!r}"
            raise UserError(f"{path}: {found}; this reads {FORMAT}, {architecture!r}")
        known = {f.name for f in dataclasses.fields(ScorerInfo)}
        fields = {key: value for key, value in raw.items() if key in known}
        fields["state_position"] = StatePosition(raw["state_position"])
        fields["aggregation"] = Aggregation(raw["aggregation"])
        fields["trust"] = read_trust(raw.get("trust"), path)
        fields["layers"] = tuple(raw.get("layers", [raw.get("layer", -1)]))  # "layer" is how the first ones wrote it
        return ScorerInfo(**fields)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: no Gambit metadata in this checkpoint ({error!r}); "
            "it must name hidden_size, state_position, boundary_rule and aggregation"
        ) from error
