r"""The structure of an answer: values with name and unit, lists, tuples, sets, intervals, unions, matrices.

`canonical` is the normal spelling of an answer and `read` its structure. Equal spellings mean equal answers; unequal
ones may still be equal, which `equality` decides, and the grading process where it takes algebra.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from gambit.answers.brackets import inside_brackets, split_outside
from gambit.answers.notation import tidy
from gambit.answers.numbers import number_form, numeral_form, ungrouped
from gambit.answers.relations import CONSTANT, LETTER, solution_of
from gambit.answers.units import split_unit

MAX_ANSWER_LENGTH = 2000  # a longer "answer" is prose; also keeps a request within one pipe buffer, so no write blocks
MAX_ROUNDS = 20  # of rewriting; what has not settled by then is hostile
MAX_DEPTH = 6


class Kind(StrEnum):
    NUMBER = "number"
    WORD = "word"  # compared by its spelling: a choice, a name, a time of day, a numeral in some base
    EXPRESSION = "expression"


@dataclass(frozen=True, slots=True)
class Value:
    body: str
    kind: Kind = Kind.EXPRESSION
    unit: str = ""
    name: str = ""  # x in "x = 5"

    def __str__(self) -> str:
        sign = {"percent": "%", "degree": r"^\circ"}.get(self.unit, f" {self.unit}" if self.unit else "")
        return f"{self.name}{'=' if self.name else ''}{self.body}{sign}"


@dataclass(frozen=True, slots=True)
class Group:
    r"""Several things: a list (no brackets), a set (\{ \}), a tuple or interval (other brackets), or a union."""

    items: tuple[Form, ...]
    opening: str = ""
    closing: str = ""
    name: str = ""
    is_union: bool = False

    @property
    def is_set(self) -> bool:
        return (self.opening, self.closing) == (r"\{", r"\}")

    @property
    def is_ordered(self) -> bool:
        return bool(self.opening) and not self.is_set

    def __str__(self) -> str:
        inside = (r"\cup" if self.is_union else ", ").join(map(str, self.items))
        relation = "" if not self.name else r"\in" if self.opening or self.is_union else "="
        return f"{self.name}{relation}{self.opening}{inside}{self.closing}"


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Form, ...], ...]
    name: str = ""

    def __str__(self) -> str:
        inside = r"\\".join("&".join(map(str, row)) for row in self.rows)
        return f"{self.name}{'=' if self.name else ''}\\begin{{pmatrix}}{inside}\\end{{pmatrix}}"


Form = Value | Group | Matrix


@lru_cache(maxsize=65_536)  # a vote asks for the same answers again and again
def canonical(answer: str) -> str:
    """The normal spelling, which is its own normal spelling."""
    plain = text = " ".join(answer.split())
    for _ in range(MAX_ROUNDS):
        if len(text) > MAX_ANSWER_LENGTH:
            break
        simpler = str(_read(tidy(text)))
        if simpler == text:
            return text
        text = simpler
    return plain


@lru_cache(maxsize=8192)
def read(answer: str) -> Form:
    """The structure of an answer's normal spelling."""
    form = canonical(answer)
    return _read(tidy(form)) if len(form) <= MAX_ANSWER_LENGTH else Value(form, Kind.WORD)


SEPARATOR = re.compile(r"(?:[,;]|\\l(?:and|or)(?![A-Za-z])) ?")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")


def _read(text: str, depth: int = 0) -> Form:
    """The outermost structure, then what is inside."""
    if depth > MAX_DEPTH:
        return Value(text)
    text = ungrouped(text)
    is_conjunction = r"\land" in text and RELATION.search(text)
    parts = [text] if is_conjunction else [part for part in split_outside(text, SEPARATOR) if part]
    if len(parts) < 2:
        return _read_one(text, depth)
    items = _distinct(_read(part, depth + 1) for part in parts)
    return _list(items) if r"\lor" not in text else _alternatives(items)


def _distinct(forms: Iterable[Form]) -> tuple[Form, ...]:
    return tuple({str(form): form for form in forms}.values())


def _list(items: tuple[Form, ...]) -> Form:
    return Group(items) if len(items) > 1 else items[0]


def _alternatives(items: tuple[Form, ...]) -> Form:
    """`x < 1 or x > 2` is the union of two intervals."""
    names = {item.name for item in items if isinstance(item, Group) and item.is_ordered}
    if len(names) != 1 or "" in names or any(not isinstance(item, Group) or not item.name for item in items):
        return _list(items)
    return Group(tuple(replace(item, name="") for item in items), name=names.pop(), is_union=True)


def _read_one(text: str, depth: int) -> Form:
    name, value = solution_of(text) or _split_name(text)
    form = _read_unnamed(value, depth)
    return replace(form, name=name) if name and not form.name else form


EQUALS = re.compile(r"(?<![<>!:])=|\\approx(?![A-Za-z]) ?|\\in(?![A-Za-z]) ?")
WORDS = r"(?:[A-Z]{2,4}|[A-Za-z]{3,})(?: [A-Za-z]+)*"  # xy = 5 is an equation, AB = 5 a length
SEGMENT = r"(?:m ?)?\\(?:angle|overline|vec|bar|hat|triangle) ?\{?[A-Za-z]+\}?|\|[A-Z]{1,2}\||\[[A-Z]{3,6}\]"
CALL = rf"{LETTER}(?:\^\{{-1\}})?\([^()=]*\)"
NAME = re.compile(rf"{LETTER}|{WORDS}|{SEGMENT}|{CALL}|\({LETTER}(?:, ?{LETTER})+\)")


def _split_name(text: str) -> tuple[str, str]:
    """`x = 5` and `x = 2 + 3 = 5` -> x, 5; `2 + 3 = 5` -> 5; any other equation stays whole."""
    parts = split_outside(text, EQUALS)
    if len(parts) < 2 or not parts[-1]:
        return "", text
    if NAME.fullmatch(parts[0]):
        return parts[0].replace(", ", ","), parts[-1]
    is_sum = all(CONSTANT.fullmatch(part) for part in parts[:-1])
    return "", parts[-1] if is_sum else text


UNION = re.compile(r"\\cup(?![A-Za-z]) ?")


def _read_unnamed(text: str, depth: int) -> Form:
    if (matrix := MATRIX.fullmatch(text)) is not None:
        return _matrix(matrix["cells"], depth)
    parts = split_outside(text, UNION)
    if len(parts) > 1:
        return Group(_distinct(_read(part, depth + 1) for part in parts), is_union=True)
    return _bracketed(text, depth) or _plus_minus(text, depth) or _value(text)


MATRIX = re.compile(r"\\begin\{(?P<kind>[pbB]?matrix)\}(?P<cells>(?:(?!\\begin|\\end).)*+)\\end\{(?P=kind)\}")


def _matrix(cells: str, depth: int) -> Matrix:
    rows = [row for row in cells.split(r"\\") if row.strip()]
    return Matrix(tuple(tuple(_read(cell.strip(), depth + 1) for cell in row.split("&")) for row in rows))


COMMA = re.compile(" ?[,;] ?")
SAME_BRACKET = {r"\langle": "(", r"\rangle": ")", "{": r"\{", "}": r"\}"}


def _bracketed(text: str, depth: int) -> Form | None:
    """A tuple, set or interval; one thing in brackets that only group is that thing."""
    brackets = inside_brackets(text)
    if brackets is None or CHOICE.fullmatch(text):
        return None
    opening, inside, closing = brackets
    items = tuple(_read(part, depth + 1) for part in split_outside(inside, COMMA))
    if len(items) == 1 and opening != r"\{":
        return items[0] if (opening, closing) in (("(", ")"), ("{", "}")) else None
    group = Group(items, SAME_BRACKET.get(opening, opening), SAME_BRACKET.get(closing, closing))
    return replace(group, items=_distinct(items)) if group.is_set else group


PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z]) ?")


def _plus_minus(text: str, depth: int) -> Form | None:
    r"""3 \pm \sqrt{2} is a list of two."""
    if len(PLUS_MINUS.findall(text)) != 1:
        return None
    plus = PLUS_MINUS.sub(lambda match: "+" if match.start() else "", text)
    return _list(_distinct(_read(sign, depth + 1) for sign in (plus, PLUS_MINUS.sub("-", text))))


CHOICE = re.compile(r"\(?(?P<early>[A-Da-d])\)?|\((?P<middle>[E-Je-j])\)|\((?P<late>[K-Z])\)")
CLOCK = re.compile(r"[0-9]{1,2}:[0-5][0-9]")
LABEL = re.compile(r"[A-Z]{2,4}")  # a segment or an angle, by its points
PROSE = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]+(?:[ '’-][A-Za-z]+)*+")


def _value(text: str) -> Value:
    if (choice := CHOICE.fullmatch(text)) is not None:
        return Value(choice[choice.lastgroup or 0].upper(), Kind.WORD)
    if (numeral := numeral_form(text)) is not None:
        return Value(numeral, Kind.NUMBER if number_form(numeral) else Kind.WORD)
    if LABEL.fullmatch(text) or PROSE.fullmatch(text):
        return Value(text if text.isupper() else text.casefold(), Kind.WORD)
    return _quantity(*split_unit(text))


def _quantity(body: str, unit: str) -> Value:
    if (number := number_form(body)) is not None:
        return Value(number, Kind.NUMBER, unit)
    return Value(body, Kind.WORD if CLOCK.fullmatch(body) else Kind.EXPRESSION, unit)
