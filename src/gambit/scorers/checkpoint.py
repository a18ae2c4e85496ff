"""Scorers by name, and their checkpoints: safetensors files with JSON metadata, and STEP's published torch files."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from pydantic import TypeAdapter

from gambit.config import registry
from gambit.config.trust import ScorerTrust
from gambit.errors import GambitWarning, UserError, reason_of
from gambit.events import Json
from gambit.models.files import SCORER_FILE, own_scorer, side_file, weight_hash
from gambit.scorers.base import MadeFor, Scorer, ScorerInfo, check_fit, made_for
from gambit.scorers.mlp import TENSORS, BlendScorer, MlpScorer, Weights
from gambit.storage.files import object_in, record_in, write_whole

if TYPE_CHECKING:
    import torch

METADATA_KEY = "gambit"  # where the JSON metadata lives in a safetensors header
FORMAT = 1
NEEDED = ("architecture", "hidden_size", "state_position", "boundary_rule", "aggregation")
NO_SCORER = (
    "no scorer is known for {model}: thoughts are ranked by the model's token confidence, a weak guide. "
    "Train one (`gambit scorer --help`) and pass it with --scorer FILE."
)
CHECKPOINT = ".safetensors"
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
    """Loads a scorer of any architecture, in float32."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    metadata = read_metadata(path)
    if metadata.get("format") != FORMAT or metadata["format"] is True:
        raise UserError(f"{path}: format {metadata.get('format')!r:.80}, this version reads {FORMAT}; {FIX}")
    if missing := [name for name in NEEDED if name not in metadata]:
        raise UserError(f"{path} is not {WHAT}: its metadata must name {', '.join(missing)}; {FIX}")
    info = record_in(ScorerInfo, json.dumps(metadata), f"{path}", WHAT, FIX)
    try:
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as a safetensors scorer ({error}); {FIX}") from error
    _check_finite(path, tensors)
    if info.architecture in (MlpScorer.architecture, BlendScorer.architecture):
        return _load_mlp(path, info, tensors)
    from gambit.scorers.sequence import ARCHITECTURE, load_sequence

    if info.architecture == ARCHITECTURE:
        return load_sequence(path, info, metadata, tensors)
    known = ", ".join((MlpScorer.architecture, BlendScorer.architecture, ARCHITECTURE))
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


def _check_finite(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises if weights are not numbers: every score would be NaN, or the same."""
    for name, tensor in tensors.items():
        if wrong := int((~tensor.isfinite()).sum()):
            raise UserError(f"{path}: {wrong:,} of the {tensor.numel():,} values of tensor {name} are NaN or infinite: "
                            "use another checkpoint, or train the scorer again")  # fmt: skip


def _load_mlp(path: Path, info: ScorerInfo, tensors: Mapping[str, torch.Tensor]) -> MlpScorer | BlendScorer:
    """Returns an MLP, or a blend of one with token confidence."""
    is_blend = info.architecture == BlendScorer.architecture
    names = (*TENSORS, BlendScorer.slope_name) if is_blend else TENSORS
    if missing := [name for name in names if name not in tensors]:
        raise UserError(f"{path}: not an MLP scorer, tensors missing: {', '.join(missing)}; {FIX}")
    weights = _checked_weights(path, tensors)
    if (takes := weights[0].shape[1]) != (info.hidden_size or 0) * len(info.layers):
        times = f" times {len(info.layers)} layers" if len(info.layers) > 1 else ""
        raise UserError(f"{path}: metadata has hidden size {info.hidden_size}{times}, the weights take {takes}; {FIX}")
    mlp = MlpScorer(info, weights)
    return BlendScorer(info, mlp, float(tensors[BlendScorer.slope_name])) if is_blend else mlp


# -- by name ------------------------------------------------------------------------------------------------------


def load_scorer(name: str, source: str, model: str) -> Scorer:
    """Loads a checkpoint file, another scorer of the model's own or a registered one; `auto` is the model's scorer."""
    if name == "auto":
        if (own := model_scorer(source)) is not None:
            return own
        warnings.warn(NO_SCORER.format(model=model), GambitWarning, stacklevel=3)
        name = "confidence"
    if is_checkpoint_file(name):
        return load_checkpoint(Path(name))
    if name not in registry.names("gambit.scorers") and (path := own_scorer(source, name)) is not None:
        return load_checkpoint(path)
    factory = cast("Callable[[], Scorer]", registry.load("gambit.scorers", name))
    return factory()


def is_checkpoint_file(name: str) -> bool:
    """Returns True if a scorer's name is the path of a checkpoint."""
    return name.endswith(CHECKPOINT) or Path(name).is_file()


def model_scorer(source: str) -> Scorer | None:
    """Loads the scorer beside a model's weights; None if there is none."""
    path = side_file(source, SCORER_FILE)
    return None if path is None else load_checkpoint(path)


def warn_of_other_weights(info: ScorerInfo, source: str, model: str) -> None:
    """Warns if a scorer was trained on the states of other weights."""
    if info.base_model_hash is None:
        return
    warning = check_fit(made_for(info), MadeFor(model, weights=weight_hash(source)))
    if warning is not None:
        warnings.warn(f"{warning}; silence this with --any-weights", GambitWarning, stacklevel=3)


# -- published ones --------------------------------------------------------------------------------------------


class _Unread:
    """Placeholder for pickled numpy scalars, which are ignored."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


# The names in pickles of the functions that make a numpy scalar, before numpy 2 and since.
NUMPY_SCALARS = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


def import_published(path: Path, info: ScorerInfo) -> MlpScorer:
    """Returns a published STEP scorer with the metadata that its file lacks."""
    weights = _read_published(path)
    takes = int(weights[0].shape[1])
    model = MadeFor(f"{info.base_model}", info.hidden_size)
    check_fit(MadeFor(f"{path}", takes), model, "name the model it was trained for with --base-model")
    return MlpScorer(dataclasses.replace(info, hidden_size=takes), weights)


def _read_published(path: Path) -> Weights:
    """Reads the weights in a STEP checkpoint: a state dict, or a dict that holds one as `model_state_dict`.

    Loads weights only: a pickle that does more than make tensors is refused before it runs. The metrics beside
    the weights may be numpy scalars (scikit-learn returns them), which are not made.
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
    weights = _checked_weights(path, tensors)
    _check_finite(path, tensors)
    return weights


def _checked_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Returns the weights of a two-layer network; raises if their shapes do not fit."""
    w1, b1, w2, b2 = (tensors[name] for name in TENSORS)
    width = b1.numel()
    if w1.dim() != 2 or w1.shape[0] != width or b1.shape != (width,) or w2.shape != (1, width) or b2.shape != (1,):
        shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in TENSORS)
        raise UserError(f"{path}: shapes do not fit a two-layer scorer: {shapes}")
    return w1, b1, w2, b2
