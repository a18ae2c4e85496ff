"""`gambit export`: training data from the event logs of runs."""

from pathlib import Path
from typing import Annotated

import typer

from gambit.answers import Grader
from gambit.cli.terminal import OK, put
from gambit.errors import UserError
from gambit.export import Exporter, Purpose, push, sources_of, test_sets, write_samples


def export(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or bench runs, or logs.", show_default=False)
    ],
    purpose: Annotated[
        Purpose,
        typer.Option(
            "--as",
            metavar="TEXT",
            help="sft: best traces; dpo: pairs from one branch point; prm: labelled thoughts; grpo: groups.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="A new .jsonl, or a new folder for `datasets`.")],
    allow_test: Annotated[bool, typer.Option("--allow-test", help="Export runs on test sets too.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Folder or hub name, where the one that the log names is not at hand."),
    ] = None,
    push_to: Annotated[
        str | None, typer.Option("--push", metavar="TEXT", help="Upload the folder as a new dataset, private.")
    ] = None,
    is_public: Annotated[bool, typer.Option("--public", help="Make the uploaded dataset public.")] = False,
) -> int:
    """Make training data of runs: best traces, pairs, labelled thoughts or groups."""
    if push_to is not None and out.suffix == ".jsonl":
        raise UserError(f"--push uploads a folder with a card: give --out the name of a folder instead of {out}")
    sources = list(sources_of(runs))
    if (tests := test_sets(sources)) and not allow_test:
        raise UserError(f"{', '.join(tests)}: models are tested on this, and must not be trained on it; give "
                        "--allow-test to export it all the same")  # fmt: skip
    with Grader() as grader:
        exporter = Exporter(purpose, grader, tokenizer)
        count = write_samples((row for source in sources for row in exporter.rows(source)), out, purpose)
    put(f"{count:,} rows from {len(sources):,} searches: {out}")
    if push_to is not None:
        put(push(out, push_to, is_public=is_public))
    return OK
