"""Finds the scorer of hidden states that a user names, or the one that belongs to a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

from gambit.config import registry
from gambit.errors import GambitWarning
from gambit.models import files as models
from gambit.scorers.base import MadeFor, Scorer, ScorerInfo, check_fit, made_for
from gambit.scorers.checkpoint import load_checkpoint

NO_SCORER = (
    "no scorer is known for {model}: thoughts are ranked by the model's token confidence, a weak guide. "
    "Train one (`gambit scorer --help`) and pass it with --scorer FILE."
)
CHECKPOINT = ".safetensors"


def load_scorer(name: str, source: str, model: str) -> Scorer:
    """Loads a checkpoint file, another scorer of the model's own or a registered one; `auto` is the model's scorer."""
    if name == "auto":
        if (own := model_scorer(source)) is not None:
            return own
        warnings.warn(NO_SCORER.format(model=model), GambitWarning, stacklevel=3)
        name = "confidence"
    if is_checkpoint_file(name):
        return load_checkpoint(Path(name))
    if name not in registry.names("gambit.scorers") and (path := models.own_scorer(source, name)) is not None:
        return load_checkpoint(path)
    factory = cast("Callable[[], Scorer]", registry.load("gambit.scorers", name))
    return factory()


def is_checkpoint_file(name: str) -> bool:
    """Returns True if a scorer's name is the path of a checkpoint."""
    return name.endswith(CHECKPOINT) or Path(name).is_file()


def model_scorer(source: str) -> Scorer | None:
    """Loads the scorer that lies beside a model's weights; None if there is none."""
    path = models.side_file(source, models.SCORER_FILE)
    return None if path is None else load_checkpoint(path)


def warn_of_other_weights(info: ScorerInfo, source: str, model: str) -> None:
    """Warns if a scorer was trained on the states of other weights."""
    if info.base_model_hash is None:
        return
    warning = check_fit(made_for(info), MadeFor(model, weights=models.weight_hash(source)))
    if warning is not None:
        warnings.warn(f"{warning}; silence this with --any-weights", GambitWarning, stacklevel=3)
