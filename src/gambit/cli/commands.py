"""Typer's commands with another help: flags without a type, and advanced options shown by `--help-all` alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from gambit.cli.session import prepare_libraries
from gambit.cli.terminal import exit_code

ADVANCED = "Advanced"  # how the title of a panel begins that `--help` leaves out


class PlainCommand(TyperCommand):
    """A command without `<bool>` beside its flags, and with options whose value may be left out."""

    def get_params(self, ctx):  # type: ignore[no-untyped-def] # typer's own classes move between releases
        return without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        return super().parse_args(ctx, with_values(args))


class PlainGroup(TyperGroup):
    """A group without `<bool>` beside its flags."""

    def get_params(self, ctx):  # type: ignore[no-untyped-def]
        return without_flag_types(super().get_params(ctx))


def without_flag_types(params: list[Any]) -> list[Any]:
    """Takes the type from the help of flags."""
    for each in params:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return params


MAY_STAND_ALONE = ("--ray",)  # which typer does not provide for


def with_values(args: list[str]) -> list[str]:
    """Inserts an empty value after each option that may stand alone and does."""
    end = args.index("--") if "--" in args else len(args)
    found = []
    for place, arg in enumerate(args):
        found.append(arg)
        is_alone = place + 1 >= end or args[place + 1].startswith("-")
        if arg in MAY_STAND_ALONE and place < end and is_alone:
            found.append("")
    return found


class BriefCommand(PlainCommand):
    """A command whose `--help` leaves out the advanced options; `--help-all` shows them, and shells complete both."""

    def format_help(self, ctx, formatter):  # type: ignore[no-untyped-def]
        params: list[Any] = self.params
        advanced = [each for each in params if (each.rich_help_panel or "").startswith(ADVANCED)]
        for each in advanced:
            each.hidden = not ctx.meta.get(SHOWS_ALL)
        try:
            super().format_help(ctx, formatter)
        finally:
            for each in advanced:
                each.hidden = False


SHOWS_ALL = "gambit.help_all"


def _show_all_help(ctx: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        ctx.meta[SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", help="Show the advanced options too.", is_eager=True, callback=_show_all_help),
]


def runs(function: Callable[..., int]) -> Callable[..., None]:
    """Returns the function as typer calls it: it leaves with the exit code that the function returns."""

    @functools.wraps(function)
    def run(**values: object) -> None:
        prepare_libraries()
        raise typer.Exit(exit_code(lambda: function(**values)))

    return run


def made_command(function: Callable[..., int], name: str) -> object:
    """Makes the command of a function, as `LazyGroup` takes it."""
    full = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    kind = BriefCommand if getattr(function, "is_brief", False) else PlainCommand
    full.command(name=name, cls=kind)(runs(function))
    return typer.main.get_command(full)
