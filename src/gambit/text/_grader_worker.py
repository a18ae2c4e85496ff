"""Grading subprocess: compares pairs of answers with math-verify over JSON lines; never imports the rest of gambit."""

import json
import logging
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Iterable
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from sympy import Basic, Expr

MEMORY_LIMIT_BYTES = 4 * 1024**3
EXACT_TOLERANCE = 1e-12
FLOAT_TOLERANCE = 1e-5  # wide enough for 0.333333 = 1/3, which math-verify accepts
CLEAR_DIFFERENCE = 1e-3  # relative: far more than what passes for rounding above
INFINITE = 1e300
PLAIN_FUNCTIONS = re.compile(r"(?<![\\A-Za-z])(pi|sin|cos|tan|cot|sec|csc|ln|log|exp|infty)(?![A-Za-z])")
DELIMITER_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])")
PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])\\?sqrt\(")
GROUP_END = re.compile(r"[()]")


def main() -> None:
    replies = _claim_stdout()
    logging.disable(logging.CRITICAL)
    _limit_memory()
    try:
        # Pays for the imports and the parser's tables before the first deadline.
        compare_answers("(x+1)^{2}", r"x^{2}+2x+\frac{2}{2}")
    except ImportError as error:
        _reply(replies, {"failed": str(error)})
        return
    _reply(replies, {"ready": True})
    serve(sys.stdin.buffer, replies)


def serve(requests: Iterable[bytes], replies: BinaryIO) -> None:
    """Answers until the parent closes our stdin, which the kernel also does when the parent is killed."""
    for line in requests:
        request = json.loads(line)
        _limit_cpu(request["deadline_seconds"])
        _reply(replies, {"equal": _compare_safely(request["first"], request["second"])})


class _Reading(NamedTuple):
    """One way to read an answer."""

    expression: "Basic"
    values: tuple[complex, ...] | None  # of its parts, where symbols have made-up values; None: it has none


def compare_answers(first: str, second: str) -> bool:
    """True if either direction verifies: math-verify follows the gold's form, and a vote has no gold."""
    return any(
        _verifies(gold.expression, other.expression)
        for left in _readings(first)
        for right in _readings(second)
        if not _clearly_differ(left.values, right.values)
        for gold, other in ((left, right), (right, left))
    )


@lru_cache(maxsize=8192)  # a vote compares each answer with many
def _readings(answer: str) -> tuple[_Reading, ...]:
    return tuple(_Reading(expression, _values(expression)) for expression in _parse(answer))


def _verifies(gold: "Basic", other: "Basic") -> bool:
    from math_verify import verify
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(gold, FiniteSet) and isinstance(other, (Interval, Tuple)):
        return False  # this direction ignores the tuple's order: 1, 2 would equal (2, 1)
    return bool(verify(gold, other, timeout_seconds=None)) and _agrees(gold, other)


def _parse(answer: str) -> "list[Basic]":
    from math_verify import LatexExtractionConfig, parse

    latex = f"${_to_latex(answer)}$"
    config = LatexExtractionConfig(boxed_match_priority=-1)
    parsed: list[Basic] = parse(latex, [config], fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


def _to_latex(answer: str) -> str:
    """One line without dollar signs; sqrt(2), pi and * as LaTeX, which the parser would read as products of letters."""
    line = " ".join(answer.replace(r"\$", "").replace("$", "").split())
    line = PLAIN_FUNCTIONS.sub(r"\\\1 ", DELIMITER_SIZE.sub("", line)).replace("**", "^").replace("*", r" \cdot ")
    while (root := PLAIN_ROOT.search(line)) is not None:
        end = _closing(line, root.end())
        if end is None:
            break
        line = line[: root.start()] + r"\sqrt{" + line[root.end() : end] + "}" + line[end + 1 :]
    return line


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for match in GROUP_END.finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return None


def _clearly_differ(first: tuple[complex, ...] | None, second: tuple[complex, ...] | None) -> bool:
    """Whether a part on one side is far from every part on the other: then no algebra makes them equal.

    Answers that a vote compares mostly do, and simplifying their difference takes math-verify 10 to 30 ms.
    """
    if first is None or second is None:
        return False
    return any(_is_far(a, second) for a in first) or any(_is_far(b, first) for b in second)


def _is_far(value: complex, others: tuple[complex, ...]) -> bool:
    return all(abs(value - other) > CLEAR_DIFFERENCE * max(abs(value), abs(other), 1.0) for other in others)


def _values(expression: "Basic") -> tuple[complex, ...] | None:
    """Numbers that equal answers share whatever their form; None where math-verify compares by other means."""
    from sympy import Eq, Expr, MatrixBase, Symbol

    if isinstance(expression, MatrixBase):
        parts = list(expression.flat())
    elif isinstance(expression, Eq) and isinstance(expression.lhs, Symbol) and expression.rhs.is_number:
        parts = [expression.rhs]  # x = 3 is 3; other equations are solved
    else:
        parts = _parts(expression)
    values = [_value(part) if isinstance(part, Expr) else None for part in parts]
    return None if None in values else tuple(value for value in values if value is not None)


def _value(expression: "Expr") -> complex | None:
    """With a number for each symbol, always the same one. None: it may be a word, a percentage, or too costly."""
    from sympy import Derivative, Integral, Limit, Product, Sum

    if expression.is_infinite and expression.is_extended_real:
        return complex(INFINITE if expression.is_extended_positive else -INFINITE)
    if expression.is_Symbol or _is_percent(expression) or expression.has(Derivative, Integral, Limit, Product, Sum):
        return None
    # Positive, where roots and logarithms obey the rules that simplification assumes; case is for math-verify to judge.
    points = {s: 0.5 + zlib.crc32(str(s).lower().encode()) / 2**32 for s in expression.free_symbols}
    try:
        value = complex(expression.evalf(15, subs=points))
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        return None
    return value if math.isfinite(value.real) and math.isfinite(value.imag) else None


def _agrees(first: "Basic", second: "Basic") -> bool:
    """False if a number on one side has no equal on the other.

    math-verify subtracts, evaluates to 15 digits and chops, so that it takes 10^{-30} for 10^{-31}, and a third for a
    sixth where both are fractions of huge powers. What it calls equal is checked once more, number by number.
    """
    left, right = _numbers(first), _numbers(second)
    if not left or not right:
        return True
    return all(any(map(_is_same, repeat(a), right)) for a in left) and all(
        any(map(_is_same, repeat(b), left)) for b in right
    )


def _numbers(expression: "Basic") -> "list[Expr]":
    from sympy import Expr

    return [part for part in _parts(expression) if isinstance(part, Expr) and part.is_number]


def _parts(expression: "Basic") -> "list[Basic]":
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(expression, Interval):
        return [expression.start, expression.end]
    return list(expression.args) if isinstance(expression, (FiniteSet, Tuple)) else [expression]


def _is_same(first: "Expr", second: "Expr") -> bool:
    from sympy import Float, N

    if first == second or _is_percent(first) != _is_percent(second):  # 9% is 9 as well as 0.09: a convention
        return True
    exact = [first.doit(), second.doit()]
    if all(number.is_Rational for number in exact):
        return bool(exact[0] == exact[1])
    ratio = N(first, 30) / N(second, 30)
    tolerance = FLOAT_TOLERANCE if first.has(Float) or second.has(Float) else EXACT_TOLERANCE
    return not ratio.is_finite or abs(complex(ratio) - 1) < tolerance


def _is_percent(expression: "Basic") -> bool:
    from sympy import UnevaluatedExpr

    return bool(expression.has(UnevaluatedExpr))


def _compare_safely(first: str, second: str) -> bool:
    try:
        return compare_answers(first, second)
    except Exception:  # a process edge: whatever a parser makes of a model's output, it is "not shown equal"
        return False


def _claim_stdout() -> BinaryIO:
    """Keeps the reply pipe to ourselves, so that a library that prints cannot garble it."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return replies


def _reply(replies: BinaryIO, message: dict[str, bool | str]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")


def _limit_memory() -> None:
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_AS", MEMORY_LIMIT_BYTES)


def _limit_cpu(deadline_seconds: float) -> None:
    """The kernel ends us even if the parent is gone and one big power holds the interpreter, where no thread could."""
    _limit("RLIMIT_CPU", math.ceil(time.process_time() + deadline_seconds) + 1)


def _limit(name: str, value: int) -> None:
    """Moves a soft limit, never above the hard one, which the system may have set lower."""
    if sys.platform == "win32":
        return
    import resource

    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main()
