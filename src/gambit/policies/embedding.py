"""Texts -> vectors of length 1 by a sentence-transformers model, where that package is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from gambit.errors import UserError

Vector = tuple[float, ...]
Embed = Callable[[Sequence[str]], Sequence[Vector]]
PACKAGE = "sentence_transformers"


def lacking_for(name: str) -> str | None:
    """What is missing on this machine to load a sentence model with."""
    if find_spec(PACKAGE) is not None:
        return None
    return (f"embedder = {name!r}: {PACKAGE} is not installed: pip install sentence-transformers, "
            "or use embedder=states")  # fmt: skip


@functools.lru_cache(maxsize=1)
def load_embedder(name: str) -> Embed:
    """The embedder behind a hub name or a folder; it stays loaded for the next search."""
    if (missing := lacking_for(name)) is not None:
        raise UserError(missing)
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the sentence model {name!r}: {str(error).partition(chr(10))[0]}") from error

    def embed(texts: Sequence[str]) -> list[tuple[float, ...]]:
        vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return [tuple(map(float, vector)) for vector in vectors]

    return embed
