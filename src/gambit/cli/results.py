"""Prints results of searches and says which exit code they make."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from gambit.cli.terminal import FAILURE, NO_ANSWER, OK, USER_MISTAKE, put

if TYPE_CHECKING:
    from gambit.results.result import SearchResult


@dataclass(frozen=True, slots=True)
class Shown:
    """A result and what is known of its right answer."""

    result: SearchResult
    gold: str | None = None
    is_right: bool | None = None

    def to_json(self) -> str:
        graded = {} if self.gold is None else {"expected": self.gold, "is_right": self.is_right}
        can_show_all = sys.stdout.encoding.lower() == "utf-8"  # elsewhere it must still be JSON
        return json.dumps({**self.result.to_json(), **graded}, ensure_ascii=not can_show_all)

    @property
    def verdict(self) -> str | None:
        return None if self.gold is None else f"{self.gold} ({'right' if self.is_right else 'wrong'})"


@dataclass(frozen=True, slots=True)
class Style:
    """How results are printed."""

    as_json: bool = False
    is_quiet: bool = False
    has_titles: bool = False  # of one of several problems

    def show(self, shown: Shown) -> None:
        result = shown.result
        if self.as_json:
            typer.echo(shown.to_json())
        elif self.is_quiet:
            title = f"{result.problem_id}\t" if self.has_titles else ""
            typer.echo(f"{title}{'' if result.answer is None else result.answer}")
        else:
            self._report(shown)

    def _report(self, shown: Shown) -> None:
        from gambit.cli.display import report

        title = shown.result.problem_id if self.has_titles else None
        put(report(shown.result, title=title, verdict=shown.verdict))
        if self.has_titles:
            put("")


@dataclass(slots=True)
class Tally:
    """What came of all problems."""

    codes: list[int] = field(default_factory=list)
    num_right: int = 0
    num_answered: int = 0

    def add(self, shown: Shown) -> None:
        self.codes.append(_code_of(shown.result))
        self.num_right += bool(shown.is_right)
        self.num_answered += shown.result.answer is not None

    @property
    def exit_code(self) -> int:
        """That of the worst; a run without one answer is no failure of the machine, but nothing to go on with."""
        found = [*self.codes, OK if self.num_answered or not self.codes else NO_ANSWER]
        return worst(found)


def _code_of(result: SearchResult) -> int:
    """A refused problem is the user's mistake; a log with holes is a failure even when the answer is there."""
    if result.log_error is not None:
        return FAILURE
    return USER_MISTAKE if result.error is not None else OK


def worst(codes: Iterable[int]) -> int:
    found = set(codes)
    return next(code for code in (FAILURE, USER_MISTAKE, NO_ANSWER, OK) if code in found)
