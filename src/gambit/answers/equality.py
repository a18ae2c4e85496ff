r"""Whether two answers are equal, by their structure; single expressions are left to a function that does algebra.

What both answers name must agree, and what one leaves out is granted: 12 cm is 12, but not 12 m; x = 5 is 5, but not
y = 5; 1, 2 is (1, 2), but (2, 1) is not; 28 % is 28 as well as 0.28. This makes equality no equivalence relation: 12 is
12 cm and 12 m. A number in another base is another answer, whatever its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from gambit.answers.forms import Form, Group, Kind, Matrix, Value
from gambit.answers.numbers import same_number
from gambit.answers.relations import CONSTANT
from gambit.answers.units import are_compatible

Algebra = Callable[[str, str], bool]  # of two LaTeX expressions, the first answer's first
MAX_SEARCHED = 40  # items of a list in any order; a longer list is compared by its spelling


def are_equal(first: Form, second: Form, algebra: Algebra) -> bool:
    if first == second:
        return True
    if _are_equations(first, second):
        return not _are_constant(first, second) and algebra(str(first), str(second))
    left, right = _unnamed(first), _unnamed(second)
    if isinstance(left, Value) and isinstance(right, Value):
        return _same_value(left, right, algebra)
    if isinstance(left, Group) and isinstance(right, Group):
        return _same_group(left, right, algebra)
    if isinstance(left, Matrix) and isinstance(right, Matrix):
        return _same_rows(left.rows, right.rows, algebra)
    return _same_kind_of_thing(left, right, algebra)


def _unnamed(form: Form) -> Form:
    return replace(form, name="") if form.name else form


def _are_equations(first: Form, second: Form) -> bool:
    """With different names on both sides, or one of them not solved for its name: y = 2x, x = y/2 and 2x - y = 0."""
    if first.name and second.name:
        return first.name != second.name
    return any(a.name and isinstance(b, Value) and "=" in b.body for a, b in ((first, second), (second, first)))


def _are_constant(*forms: Form) -> bool:
    return all(isinstance(form, Value) and CONSTANT.fullmatch(form.body) for form in forms)


def _same_value(first: Value, second: Value, algebra: Algebra) -> bool:
    if not are_compatible(first.unit, second.unit):
        return False
    if _same_body(first, second, algebra):
        return True
    is_one_percentage = (first.unit == "percent") != (second.unit == "percent")
    return is_one_percentage and _same_body(_hundredth(first), _hundredth(second), algebra)


def _hundredth(value: Value) -> Value:
    """28 % as 0.28; what is no percentage stays."""
    if value.unit != "percent":
        return value
    is_number = value.kind is Kind.NUMBER
    body = str(Fraction(value.body) / 100) if is_number else rf"\frac{{{value.body}}}{{100}}"
    return Value(body, value.kind)


def _same_body(first: Value, second: Value, algebra: Algebra) -> bool:
    kinds = {first.kind, second.kind}
    if first.body == second.body or Kind.WORD in kinds or ("=" in first.body) != ("=" in second.body):
        return first.body == second.body
    if kinds == {Kind.NUMBER}:
        return same_number(first.body, second.body)
    return algebra(first.body, second.body)


def _same_group(first: Group, second: Group, algebra: Algebra) -> bool:
    if first.is_union or second.is_union:
        return _same_union(first, second, algebra)
    if first.is_ordered and second.is_ordered:
        brackets = {(group.opening, group.closing) for group in (first, second)}
        return len(brackets) == 1 and _same_in_order(first.items, second.items, algebra)
    if first.is_ordered or second.is_ordered:
        return _are_list_and_tuple(first, second) and _same_in_order(first.items, second.items, algebra)
    return _same_in_any_order(first.items, second.items, algebra)


def _same_union(first: Group, second: Group, algebra: Algebra) -> bool:
    """Part by part, or as sets of numbers: [0, 1] and [1, 2] together are [0, 2]."""
    if any(not group.opening and not group.is_union for group in (first, second)):
        return False
    if first.is_union and second.is_union and _same_in_any_order(first.items, second.items, algebra):
        return True
    return algebra(str(first), str(second))


def _are_list_and_tuple(first: Group, second: Group) -> bool:
    return {(group.opening, group.closing) for group in (first, second)} == {("", ""), ("(", ")")}


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


def _same_rows(first: Sequence[Sequence[Form]], second: Sequence[Sequence[Form]], algebra: Algebra) -> bool:
    return len(first) == len(second) and all(map(_same_in_order, first, second, [algebra] * len(first)))


def _same_kind_of_thing(first: Form, second: Form, algebra: Algebra) -> bool:
    r"""Different structures that may mean the same: a vector and a tuple, \{5\} and 5, a set and its description."""
    first, second = _plain(first), _plain(second)
    if type(first) is type(second):
        return are_equal(first, second, algebra)
    is_described = any(isinstance(form, Value) and form.kind is Kind.EXPRESSION for form in (first, second))
    return is_described and algebra(str(first), str(second))


def _plain(form: Form) -> Form:
    """A column or row as a tuple, a set of one as its element."""
    if isinstance(form, Matrix) and 1 in (len(form.rows), *map(len, form.rows)):
        return Group(tuple(_flat(form.rows)), "(", ")")
    return form.items[0] if isinstance(form, Group) and form.is_set and len(form.items) == 1 else form


def _flat(rows: Iterable[Sequence[Form]]) -> list[Form]:
    return [cell for row in rows for cell in row]
