"""The work of `gambit scorer get`, `list` and `push`: scorers that others have published, and one's own for others."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.table import Table

from gambit.cli.session import only_our_warnings
from gambit.cli.terminal import OK, put, say
from gambit.errors import UserError
from gambit.models.files import OFFLINE, folder_on_disk, is_offline
from gambit.models.hub import SCHEME, repository_of
from gambit.scorers.card import card_of, push
from gambit.scorers.checkpoint import load_checkpoint
from gambit.scorers.published import PublishedScorer, fetch, known_row, misfit, published_scorers


def get(model: str, *, as_json: bool) -> int:
    row = known_row(model)
    if folder_on_disk(model) is not None and (reason := misfit(row, model)) is not None:
        raise UserError(reason)
    if is_offline() and not row.is_cached:
        raise UserError(f"{OFFLINE} is set: unset it to fetch the scorer of {row.model}")
    with only_our_warnings():
        fetch(row, say)
    typer.echo(json.dumps(_facts(row)) if as_json else f"{row.cache_file}")
    if not as_json:
        say(f"for {row.model}: `--scorer auto` uses it from now on ({_judged(row)})")
    return OK


def show_list(*, as_json: bool) -> int:
    table = Table("model", "trained on", "judged", "fetched", box=None, pad_edge=False)
    for row in published_scorers():
        if as_json:
            typer.echo(json.dumps(_facts(row)))
        table.add_row(row.model, row.trained_on, _judged(row), "yes" if row.is_cached else "no")
    if not as_json:
        put(table)
    return OK


def push_scorer(scorer: Path, repository: str, *, is_private: bool, only_card: bool) -> int:
    name, _ = repository_of(repository)
    if only_card:
        typer.echo(card_of(scorer, name))
        return OK
    with only_our_warnings():
        put(push(scorer, repository, is_private=is_private))
    say(f"to use it: --scorer {SCHEME}{name}")
    return OK


def _facts(row: PublishedScorer) -> dict[str, object]:
    """Returns what a script may want to know of a published scorer."""
    source = row.sources[0].url
    file = str(row.cache_file) if row.is_cached else None
    return {"model": row.model, "file": file, "source": source, "blob": row.blob, "trained_on": row.trained_on,
            "licence": row.licence, "judged": _judged(row)}  # fmt: skip


def _judged(row: PublishedScorer) -> str:
    trust = load_checkpoint(row.cache_file).info.trust if row.is_cached else None
    if trust is None or not trust.is_judged:
        return "published, not judged by us"
    return f"AUC {trust.halfway:.2f} on {trust.num_problems} problems"
