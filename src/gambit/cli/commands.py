"""Typer's commands with another help: flags without a type, and rare options shown by `--help-all` alone."""

import functools
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from gambit.cli.session import prepare_libraries
from gambit.cli.terminal import exit_code

HELP_FLAGS = {"help_option_names": ["-h", "--help"]}


class PlainCommand(TyperCommand):
    """A command without `<bool>` beside its flags, and with options whose value may be left out.

    `--help` leaves out its rare options; `--help-all` shows them, and shells complete both.
    """

    rare: Collection[str] = ()

    def format_help(self, ctx, formatter):  # type: ignore[no-untyped-def]
        from typer import rich_utils

        rich_utils.RANGE_STRING = ""  # bounds of numbers, for which 80 columns have no room: errors name them
        params: list[Any] = self.params
        hidden = [] if ctx.meta.get(SHOWS_ALL) else [each for each in params if each.name in self.rare]
        for each in hidden:
            each.hidden = True
        try:
            super().format_help(ctx, formatter)
        finally:
            for each in hidden:
                each.hidden = False

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


SHOWS_ALL = "gambit.help_all"


def _show_all_help(ctx: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        ctx.meta[SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[bool, typer.Option("--help-all", help="Show all options.", is_eager=True, callback=_show_all_help)]


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
    full.command(name=name, cls=kind_of(function))(runs(function))
    return typer.main.get_command(full)


def kind_of(function: Callable[..., int]) -> type[PlainCommand]:
    """Returns the class of a function's command, which knows its rare options."""
    return type("PlainCommand", (PlainCommand,), {"rare": getattr(function, "rare", ())})
