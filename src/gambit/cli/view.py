"""`gambit view`: where the page goes and whether a browser opens; the page itself is made in gambit.view."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gambit.cli.terminal import OK, exit_with


def view(
    run: Annotated[Path, typer.Argument(help="The folder that `gambit solve` wrote, or its log.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="The page (default: tree.html beside the log).")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub name, where the one that the log names is not at hand.")
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
) -> None:
    """Write one HTML page that shows what a search did: its tree, its texts, its vote."""

    def body() -> int:
        from gambit.view import write_page
        from gambit.view.history import find_log

        log = find_log(run)
        page = out or log.parent / "tree.html"
        write_page(log, page, tokenizer)
        typer.echo(page)
        if is_opened:
            typer.launch(page.resolve().as_uri())
        return OK

    exit_with(body)
