"""`gambit merge`: one bench run out of its shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gambit.cli.session import sole_writer
from gambit.cli.terminal import OK, say


def merge(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="The folders of the shards.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the whole run.")],
) -> int:
    """Put the shards of a bench run together."""
    from gambit.bench.folder import merge_shards
    from gambit.storage.run_folder import check_writable

    check_writable(out)
    with sole_writer(out):
        notes = merge_shards(folders, out)
    for note in notes:
        say(note)
    return OK
