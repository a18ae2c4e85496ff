r"""The structure of an answer (value, list, tuple, set, interval, union, matrix), and when two are equal by it.

`canonical` is the normal spelling of an answer and `read` its structure. Equal spellings mean equal answers; of unequal
ones `are_equal` compares the structures, and leaves single expressions to a function that does algebra.

A name or a unit must agree where both answers have it, and may be left out: 12 cm is 12, but not 12 m; x = 5 is 5, but
not y = 5; 1, 2 is (1, 2), but (2, 1) is not; 28 % is 28 as well as 0.28. This makes equality no equivalence relation:
12 is 12 cm and 12 m. A number in another base is another answer, whatever its value.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from itertools import chain

from gambit.answers.spelling import (
    DATE,
    are_compatible,
    number_form,
    numeral_form,
    same_number,
    split_unit,
    tidy,
    ungrouped,
)

MAX_ANSWER_LENGTH = 2000  # a longer "answer" is prose; also keeps a request within one pipe buffer, so no write blocks
JSON = ('{"', '[{"')  # begin answers that are spelled in one way only (structured.py)
MAX_ROUNDS = 20  # of rewriting; what has not settled by then is hostile
MAX_DEPTH = 6


class Kind(StrEnum):
    """The kinds of single values."""

    NUMBER = "number"
    WORD = "word"  # compared by its spelling: a choice, a name, a time of day, a numeral in some base
    EXPRESSION = "expression"


@dataclass(frozen=True, slots=True)
class Value:
    """A single value, such as a number, a word or an expression, with its unit and its name."""

    body: str
    kind: Kind = Kind.EXPRESSION
    unit: str = ""
    name: str = ""  # x in "x = 5"

    def __str__(self) -> str:
        signs = {"percent": "%", "degree": r"^\circ", "'": "'", "''": "''"}
        sign = signs.get(self.unit, f" {self.unit}" if self.unit else "")
        return f"{self.name}{'=' if self.name else ''}{self.body}{sign}"


@dataclass(frozen=True, slots=True)
class Group:
    r"""Several things: a list (no brackets), a set (\{ \}), a tuple or interval (other brackets), or a union."""

    items: tuple["Form", ...]
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
    """A matrix or a vector, row by row."""

    rows: tuple[tuple["Form", ...], ...]
    name: str = ""

    def __str__(self) -> str:
        inside = r"\\".join("&".join(map(str, row)) for row in self.rows)
        return f"{self.name}{'=' if self.name else ''}\\begin{{pmatrix}}{inside}\\end{{pmatrix}}"


Form = Value | Group | Matrix


# -- brackets: the content of the outermost ones, and the text outside -----------------------------------------


BRACKETS = re.compile(r"\\[{}\\]|\\(?:begin|end)\{[a-zA-Z]*+\*?\}|\\[lr]angle(?![A-Za-z])|[(){}\[\]]")
OPENING = frozenset(("(", "[", "{", r"\{", r"\langle"))


def split_outside(text: str, separator: re.Pattern[str]) -> list[str]:
    """Splits at separators outside all brackets; returns the whole text if the brackets do not match."""
    ranges = outermost_ranges(text)
    if ranges is None:
        return [text]
    parts, start = [], 0
    for match in separator.finditer(text):
        while ranges and ranges[0][1] <= match.start():
            ranges.pop(0)
        if not ranges or match.start() < ranges[0][0]:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def inside_brackets(text: str) -> tuple[str, str, str] | None:
    """Returns opening bracket, content and closing bracket if one pair encloses everything."""
    if outermost_ranges(text) != [(0, len(text))] or text.startswith(r"\begin"):
        return None
    first, *_, last = BRACKETS.finditer(text)
    return first[0], text[first.end() : last.start()].strip(), last[0]


def outermost_ranges(text: str) -> list[tuple[int, int]] | None:
    """Returns the ranges of the outermost brackets, None if they do not match; any kind closes any other: (0, 1]."""
    ranges: list[tuple[int, int]] = []
    depth = start = 0
    for match in BRACKETS.finditer(text):
        if match[0] == r"\\":
            continue
        is_opening = match[0] in OPENING or match[0].startswith(r"\begin")
        start = match.start() if is_opening and depth == 0 else start
        depth += 1 if is_opening else -1
        if depth < 0:
            return None
        if depth == 0:
            ranges.append((start, match.end()))
    return ranges if depth == 0 else None


# -- inequalities with constant bounds as sets: x < 5 is (-\infty, 5) ------------------------------------------


GREEK = r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|sigma|ell)(?![A-Za-z])"
LETTER = rf"(?:[A-Za-z]|{GREEK})(?: ?_(?:\{{[^{{}}]*\}}|[A-Za-z0-9]))?'{{0,3}}"
VARIABLE = re.compile(LETTER)
CONSTANT = re.compile(r"(?:[^A-Za-z\\=]|\\(?:frac|sqrt|cdot|times|binom|pi|infty)(?![A-Za-z])|[ei](?![A-Za-z]))++")
RELATION = re.compile(r" ?(<|>|\\(?:le|ge|ne)(?![A-Za-z])) ?")
TURNED = {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le", r"\ne": r"\ne"}
HALF_LINES = {
    "<": r"(-\infty, {0})", r"\le": r"(-\infty, {0}]", ">": r"({0}, \infty)", r"\ge": r"[{0}, \infty)",
    r"\ne": r"(-\infty, {0})\cup({0}, \infty)",
}  # fmt: skip


def solution_of(text: str) -> tuple[str, str] | None:
    r"""Returns variable and set of an inequality: x, (-\infty, 5) for `x < 5`; None for any other text."""
    parts = RELATION.split(text)
    if len(parts) == 3:
        return _half_line(*parts) or _half_line(parts[2], TURNED[parts[1]], parts[0])
    if len(parts) == 5:
        return _interval(*parts) or _interval(*(TURNED.get(part, part) for part in reversed(parts)))
    return None


def _half_line(variable: str, relation: str, bound: str) -> tuple[str, str] | None:
    if not VARIABLE.fullmatch(variable) or not CONSTANT.fullmatch(bound):
        return None
    return variable, HALF_LINES[relation].format(bound)


def _interval(low: str, first: str, variable: str, second: str, high: str) -> tuple[str, str] | None:
    is_between = VARIABLE.fullmatch(variable) and CONSTANT.fullmatch(low) and CONSTANT.fullmatch(high)
    if not is_between or not {first, second} <= {"<", r"\le"}:
        return None
    return variable, f"{'(' if first == '<' else '['}{low}, {high}{')' if second == '<' else ']'}"


# -- reading ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65_536)  # a vote asks for the same answers again and again
def canonical(answer: str) -> str:
    """Returns the normal spelling, which is its own normal spelling."""
    if answer.startswith(JSON):
        return answer
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
    """Returns the structure of an answer's normal spelling."""
    form = canonical(answer)
    is_short = len(form) <= MAX_ANSWER_LENGTH and not form.startswith(JSON)
    return _read(tidy(form)) if is_short else Value(form, Kind.WORD)


SEPARATOR = re.compile(r"(?:[,;]|\\l(?:and|or)(?![A-Za-z])) ?")
INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")


def _read(text: str, depth: int = 0) -> Form:
    """Reads the outermost structure, then its parts."""
    if depth > MAX_DEPTH:
        return Value(text)
    text = ungrouped(text)
    is_conjunction = r"\land" in text and INEQUALITY.search(text)
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
    """Makes a union of the intervals of `x < 1 or x > 2`; a list of anything else."""
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
INTEGER = re.compile(r"-?[0-9]{1,99}")
TERM = rf"(?:10*)?{LETTER}"
SUM = re.compile(rf"{TERM}(?:[-+]{TERM})+")  # what a problem asks for, as in m+n = 279
NAME = re.compile(rf"{LETTER}|{WORDS}|{SEGMENT}|{CALL}|\({LETTER}(?:, ?{LETTER})+\)")


def _split_name(text: str) -> tuple[str, str]:
    """Splits `x = 5` and `x = 2 + 3 = 5` into x and 5; `2 + 3 = 5` is 5. Any other equation stays whole."""
    parts = split_outside(text, EQUALS)
    if len(parts) < 2 or not parts[-1]:
        return "", text
    if NAME.fullmatch(parts[0]):
        return parts[0].replace(", ", ","), parts[-1]
    if len(parts) == 2 and SUM.fullmatch(parts[0]) and CONSTANT.fullmatch(parts[1]) and parts[1] != "0":
        return parts[0], parts[1]
    if not all(CONSTANT.fullmatch(part) for part in parts[:-1]):
        return "", text
    if len(parts) == 2 and VARIABLE.fullmatch(parts[1]) and not CONSTANT.fullmatch(parts[1]):  # 5 = x
        return parts[1], parts[0]
    is_contradiction = len({int(part) for part in parts if INTEGER.fullmatch(part)}) > 1  # 1 = 2
    return "", text if is_contradiction else parts[-1]


UNION = re.compile(r"\\cup(?![A-Za-z]) ?")


def _read_unnamed(text: str, depth: int) -> Form:
    if (matrix := MATRIX.fullmatch(text)) is not None:
        rows = [row.split("&") for row in matrix["cells"].split(r"\\") if row.strip()]
        return Matrix(tuple(tuple(_read(cell.strip(), depth + 1) for cell in row) for row in rows))
    parts = split_outside(text, UNION)
    if len(parts) > 1:
        return Group(_distinct(_read(part, depth + 1) for part in parts), is_union=True)
    return _bracketed(text, depth) or _plus_minus(text, depth) or _value(text)


MATRIX = re.compile(r"\\begin\{(?P<kind>[pbB]?matrix)\}(?P<cells>(?:(?!\\begin|\\end).)*+)\\end\{(?P=kind)\}")


COMMA = re.compile(" ?[,;] ?")
SAME_BRACKET = {r"\langle": "(", r"\rangle": ")", "{": r"\{", "}": r"\}"}


def _bracketed(text: str, depth: int) -> Form | None:
    """Reads a tuple, set or interval; in brackets that only group, a single thing is that thing."""
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
    r"""Reads 3 \pm \sqrt{2} as a list of two."""
    if len(PLUS_MINUS.findall(text)) != 1:
        return None
    plus = PLUS_MINUS.sub(lambda match: "+" if match.start() else "", text)
    return _list(_distinct(_read(sign, depth + 1) for sign in (plus, PLUS_MINUS.sub("-", text))))


CHOICE = re.compile(
    r"(?:(?i:option|choice) ?)?(?:\(?(?P<early>[A-Da-d])\)?|\((?P<middle>[E-Je-j])\)|\((?P<late>[K-Z])\))"
    r"|(?i:option|choice) (?P<named>[A-Z])"
)
CLOCK = re.compile(r"[0-9]{1,2}:[0-5][0-9]")
LABEL = re.compile(r"[A-Z]{2,4}")  # a segment or an angle, by its points
PROSE = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]+(?:[ '’-][A-Za-z]+)*+")


def _value(text: str) -> Value:
    if (choice := CHOICE.fullmatch(text)) is not None:
        return Value(choice[choice.lastgroup or 0].upper(), Kind.WORD)
    if (numeral := numeral_form(text)) is not None:
        return Value(numeral, Kind.NUMBER if number_form(numeral) else Kind.WORD)
    if DATE.fullmatch(text):  # no sum and no fraction; zeros before days and months are not compared
        return Value(re.sub("(?<![0-9-])0+(?=[0-9]+/)", "", text), Kind.WORD)
    if LABEL.fullmatch(text) or PROSE.fullmatch(text):
        return Value(text if text.isupper() else text.casefold(), Kind.WORD)
    body, unit = split_unit(text)
    if (number := number_form(body)) is not None:
        return Value(number, Kind.NUMBER, unit)
    return Value(body, Kind.WORD if CLOCK.fullmatch(body) else Kind.EXPRESSION, unit)


# -- equality --------------------------------------------------------------------------------------------------


Algebra = Callable[[str, str], bool]  # of two LaTeX expressions, the first answer's first
MAX_SEARCHED = 40  # items of a list in any order; a longer list is compared by its spelling


def are_equal(first: Form, second: Form, algebra: Algebra) -> bool:
    if first == second:
        return True
    if _are_equations(first, second):
        are_constant = all(
            isinstance(form, Value) and CONSTANT.fullmatch(form.body) and not SUM.fullmatch(form.name)
            for form in (first, second)
        )
        return not are_constant and algebra(str(first), str(second))
    left, right = replace(first, name=""), replace(second, name="")
    if isinstance(left, Value) and isinstance(right, Value):
        return _same_value(left, right, algebra)
    if isinstance(left, Group) and isinstance(right, Group):
        return _same_group(left, right, algebra)
    if isinstance(left, Matrix) and isinstance(right, Matrix):
        return len(left.rows) == len(right.rows) and all(
            _same_in_order(*rows, algebra) for rows in zip(left.rows, right.rows, strict=True)
        )
    return _same_kind_of_thing(left, right, algebra)


def _are_equations(first: Form, second: Form) -> bool:
    """Returns whether the names differ, or one is not solved for its name: y = 2x, x = y/2 and 2x - y = 0."""
    if first.name and second.name:
        return first.name != second.name
    return any(a.name and isinstance(b, Value) and "=" in b.body for a, b in ((first, second), (second, first)))


def _same_value(first: Value, second: Value, algebra: Algebra) -> bool:
    if not are_compatible(first.unit, second.unit):
        return False
    if _same_body(first, second, algebra):
        return True
    is_one_percentage = (first.unit == "percent") != (second.unit == "percent")
    return is_one_percentage and _same_body(_hundredth(first), _hundredth(second), algebra)


def _hundredth(value: Value) -> Value:
    """Returns 28 % as 0.28, and any other value as it is."""
    if value.unit != "percent":
        return value
    is_number = value.kind is Kind.NUMBER
    body = str(Fraction(value.body) / 100) if is_number else rf"\frac{{{value.body}}}{{100}}"
    return Value(body, value.kind)


def _same_body(first: Value, second: Value, algebra: Algebra) -> bool:
    if first.body == second.body:
        return True
    kinds = {first.kind, second.kind}
    if Kind.WORD in kinds or _is_equation(first.body) != _is_equation(second.body):
        return False
    if kinds == {Kind.NUMBER}:
        return same_number(first.body, second.body)
    return algebra(first.body, second.body)


def _is_equation(body: str) -> bool:
    """Returns False where the sign stands in braces, as below a sum."""
    return len(split_outside(body, EQUALS)) > 1


def _same_group(first: Group, second: Group, algebra: Algebra) -> bool:
    if first.is_union or second.is_union:
        return _same_union(first, second, algebra)
    if first.is_ordered and second.is_ordered:
        brackets = {(group.opening, group.closing) for group in (first, second)}
        return len(brackets) == 1 and _same_in_order(first.items, second.items, algebra)
    if first.is_ordered or second.is_ordered:
        are_list_and_tuple = {(group.opening, group.closing) for group in (first, second)} == {("", ""), ("(", ")")}
        return are_list_and_tuple and _same_in_order(first.items, second.items, algebra)
    return _same_in_any_order(first.items, second.items, algebra)


def _same_union(first: Group, second: Group, algebra: Algebra) -> bool:
    """Compares unions part by part, or as sets of numbers: [0, 1] and [1, 2] together are [0, 2]."""
    if any(not group.opening and not group.is_union for group in (first, second)):
        return False
    if first.is_union and second.is_union and _same_in_any_order(first.items, second.items, algebra):
        return True
    return algebra(str(first), str(second))


def _same_in_order(first: Sequence[Form], second: Sequence[Form], algebra: Algebra) -> bool:
    return len(first) == len(second) and all(map(are_equal, first, second, [algebra] * len(first)))


def _same_in_any_order(first: Sequence[Form], second: Sequence[Form], algebra: Algebra) -> bool:
    if len(first) != len(second) or len(first) > MAX_SEARCHED:
        return {*map(str, first)} == {*map(str, second)}
    left = list(second)
    for item in first:
        partner = next((other for other in left if are_equal(item, other, algebra)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _same_kind_of_thing(first: Form, second: Form, algebra: Algebra) -> bool:
    r"""Compares different structures that may mean the same: a vector and a tuple, \{5\} and 5, a described set."""
    first, second = _plain(first), _plain(second)
    if type(first) is type(second):
        return are_equal(first, second, algebra)
    is_described = any(isinstance(form, Value) and form.kind is Kind.EXPRESSION for form in (first, second))
    return is_described and algebra(str(first), str(second))


def _plain(form: Form) -> Form:
    """Returns a column or row as a tuple, and a set of one as its element."""
    if isinstance(form, Matrix) and 1 in (len(form.rows), *map(len, form.rows)):
        return Group(tuple(chain.from_iterable(form.rows)), "(", ")")
    return form.items[0] if isinstance(form, Group) and form.is_set and len(form.items) == 1 else form
