"""Assembles the `gambit` command; each command is imported when it is called.

Exit codes: 0 done, 1 a failure (also an event log that became incomplete), 2 the user's mistake, 3 not one problem got
an answer, 130 after Ctrl-C and 143 after SIGTERM, with the best vote so far printed.
"""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer

from gambit.cli.commands import HELP_FLAGS, PlainGroup, made_command
from gambit.cli.terminal import OK, exit_code
from gambit.errors import check_host


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command as `gambit --help` lists it; its function or app is imported when it is called."""

    target: str  # module of this package:name
    panel: str
    about: str

    def made(self, name: str) -> Any:
        module, _, attribute = self.target.partition(":")
        found = getattr(importlib.import_module(f"gambit.cli.{module}"), attribute)
        return typer.main.get_command(found) if isinstance(found, typer.Typer) else made_command(found, name)


COMMANDS: Mapping[str, LazyCommand] = {
    "solve": LazyCommand("solve:solve", "Search", "Search for the answer to a problem, or to each of a file."),
    "demo": LazyCommand("demo:demo", "Search", "Solve a puzzle that the bundled model has not seen."),
    "serve": LazyCommand("serve:serve", "Search", "Serve a model behind OpenAI's API, with a live page."),
    "policies": LazyCommand("policies:policies", "Search", "List the search methods with their options."),
    "runs": LazyCommand("run_list:runs", "Runs", "List the newest runs in runs/, with their answers."),
    "view": LazyCommand("runs:view", "Runs", "Write one HTML page that shows what a search did."),
    "replay": LazyCommand("runs:replay", "Runs", "Rebuild a run's result from its event log alone."),
    "export": LazyCommand("export:export", "Runs", "Make training data of runs."),
    "bench": LazyCommand("bench:bench", "Benchmarks", "Compare search methods on benchmarks."),
    "compare": LazyCommand(
        "compare:compare", "Benchmarks", "Compare voting and Gambit at equal tokens on your problems."
    ),
    "report": LazyCommand("bench:report", "Benchmarks", "Make tables, figures and a page of a bench run."),
    "merge": LazyCommand("bench:merge", "Benchmarks", "Put the shards of a bench run together."),
    "prefix-value": LazyCommand("bench:prefix_value", "Benchmarks", "Measure what the best prefixes gain."),
    "scorer": LazyCommand("scorer:app", "Set-up", "Make a scorer for a model."),
    "doctor": LazyCommand("doctor:doctor", "Set-up", "List the engines and devices that are here, what is missing."),
}


class LazyGroup(PlainGroup):
    """A group that imports a command when it is called, so that `gambit --help` is quick."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def] # typer's context class moves between releases
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in COMMANDS:
            command = COMMANDS[name].made(name)
        return name, command, rest


app = typer.Typer(
    cls=LazyGroup,
    name="gambit",
    help="Thought-level beam search for reasoning LLMs.",
    no_args_is_help=True,
    context_settings=HELP_FLAGS,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 failure, 2 your input, 3 no answer found, 130 interrupted.",
)


def _listed_only() -> NoReturn:
    raise AssertionError("listed by `gambit --help` only; LazyGroup puts the real command in its place")


for _name, _lazy in COMMANDS.items():
    app.command(name=_name, help=_lazy.about, rich_help_panel=_lazy.panel)(_listed_only)


def main() -> None:
    """The entry point of the `gambit` command."""
    sys.exit(exit_code(lambda: app(prog_name="gambit")))  # also of typer's own: a help that cannot be printed


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from gambit import __version__

        typer.echo(f"gambit {__version__}")
        raise typer.Exit(OK)


@app.callback()
def _root(
    is_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    check_host()
