"""Finds the scorer of hidden states that a user names, or the one that belongs to a model."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from gambit.config import registry
from gambit.errors import GambitError, GambitWarning
from gambit.models import files as models
from gambit.scorers import published
from gambit.scorers.authors import SUFFIXES as TORCH_SUFFIXES
from gambit.scorers.base import MadeFor, Scorer, ScorerInfo, check_fit, made_for
from gambit.scorers.checkpoint import CHECKPOINT, load_checkpoint

AUTO = "auto"
GUIDE = "thoughts are ranked by the model's token confidence, a weak guide"
NO_SCORER = (
    "no scorer is known for {model}: {guide}. Train one (`gambit scorer --help`) and pass it with --scorer FILE."
)


def load_scorer(name: str, source: str, model: str) -> Scorer:
    """Loads a checkpoint file, one on the hub, another scorer of the model's own or a registered one.

    `auto` is the scorer beside the model's weights, else the one that is published for them, else token confidence.
    """
    if name == AUTO:
        if (own := model_scorer(source)) is not None:
            return own
        warning = NO_SCORER.format(model=model, guide=GUIDE)
        try:
            if published.row_for(source) is not None:
                return published.published_scorer(source)
        except GambitError as error:
            warning = f"{error}; {GUIDE}"
        warnings.warn(warning, GambitWarning, stacklevel=3)
        name = "confidence"
    if name == published.NAME:
        return published.published_scorer(source)
    if name.startswith(models.SCHEME):
        return load_checkpoint(models.fetched_file(name, models.SCORER_FILE))
    if is_checkpoint_file(name):
        return load_checkpoint(Path(name))
    if not registry.knows("gambit.scorers", name) and (path := models.own_scorer(source, name)) is not None:
        return load_checkpoint(path)
    factory = cast("Callable[[], Scorer]", registry.load("gambit.scorers", name))
    return factory()


def is_checkpoint_file(name: str) -> bool:
    """Returns True if a scorer's name is the path of a checkpoint."""
    return name.endswith((CHECKPOINT, *TORCH_SUFFIXES)) or Path(name).is_file()


def model_scorer(source: str) -> Scorer | None:
    """Loads the scorer that lies beside a model's weights; None if there is none."""
    path = models.side_file(source, models.SCORER_FILE)
    return None if path is None else load_checkpoint(path)


def scorer_file(name: str, source: str) -> Path | None:
    """Returns the checkpoint that a scorer's name stands for; None if it is not on this disk."""
    if name.startswith(models.SCHEME):
        return models.cached_file(name, models.SCORER_FILE)
    own = models.scorer_file(source, name) if name != published.NAME else None
    return published.cached_file(source) if own is None and name in (AUTO, published.NAME) else own


def fetch_published(name: str, source: str) -> None:
    """Fetches the scorer that a search with this name would use; errors are left to the loading of the scorer."""
    if name in (AUTO, published.NAME) and models.scorer_file(source, AUTO) is None:
        with suppress(GambitError):
            published.fetched_file(source)


def scorer_to_send(name: str, source: str, model: str) -> Scorer | None:
    """Returns the scorer that engines on other machines get from this one; None if its name leads them to it."""
    is_published = name in (AUTO, published.NAME) and published.row_for(source) is not None
    return load_scorer(name, source, model) if is_published and model_scorer(source) is None else None


def warn_of_other_weights(info: ScorerInfo, source: str, model: str) -> None:
    """Warns if a scorer was trained on the states of other weights. Each search looks at its adapter itself."""
    if info.base_model_hash is None:
        return
    made = replace(made_for(info), weights=info.base_model_hash.partition("+")[0])
    warning = check_fit(made, MadeFor(model, weights=models.weight_hash(source)))
    if warning is not None:
        warnings.warn(f"{warning}; silence this with --any-weights", GambitWarning, stacklevel=3)
