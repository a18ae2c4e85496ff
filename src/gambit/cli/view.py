"""`gambit view`: writes the page of a run and opens it in a browser if asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gambit.cli.session import prepare_libraries
from gambit.cli.terminal import OK


def view(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder that `gambit solve` wrote, or its log.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page (default: tree.html beside the log).")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Folder or hub name, where the one that the log names is not at hand."),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
) -> int:
    """Write one HTML page that shows what a search did: its tree, its texts, its vote."""

    from gambit.storage.run_folder import check_writable, find_log
    from gambit.view import write_page

    log = find_log(run)
    page = out or log.parent / "tree.html"
    check_writable(page.parent)
    prepare_libraries()
    write_page(log, page, tokenizer)
    typer.echo(page)
    if is_opened:
        typer.launch(page.resolve().as_uri())
    return OK
