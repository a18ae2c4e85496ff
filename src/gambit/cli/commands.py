"""Typer's commands with the help we want: flags without a type, and advanced options shown by `--help-all` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

ADVANCED = "Advanced"  # how the title of a panel begins that `--help` leaves out


class PlainCommand(TyperCommand):
    """Without `<bool>` beside its flags, and with options whose value may be left out."""

    def get_params(self, ctx):  # type: ignore[no-untyped-def] # typer's own classes move between releases
        return without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        return super().parse_args(ctx, with_values(args))


class PlainGroup(TyperGroup):
    """The same for a group."""

    def get_params(self, ctx):  # type: ignore[no-untyped-def]
        return without_flag_types(super().get_params(ctx))


def without_flag_types(params: list[Any]) -> list[Any]:
    for each in params:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return params


MAY_STAND_ALONE = ("--ray",)  # which typer does not provide for


def with_values(args: list[str]) -> list[str]:
    """With an empty value for every option that may stand alone and does."""
    end = args.index("--") if "--" in args else len(args)
    found = []
    for place, arg in enumerate(args):
        found.append(arg)
        is_alone = place + 1 >= end or args[place + 1].startswith("-")
        if arg in MAY_STAND_ALONE and place < end and is_alone:
            found.append("")
    return found


class BriefCommand(PlainCommand):
    """`--help` shows the basic options, `--help-all` the advanced ones too; both kinds can be completed by a shell."""

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


def made_command(function: Callable[..., None], name: str, kind: type[TyperCommand] = PlainCommand) -> object:
    """The command of a function, as `LazyGroup` takes it."""
    full = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    full.command(name=name, cls=kind)(function)
    return typer.main.get_command(full)
