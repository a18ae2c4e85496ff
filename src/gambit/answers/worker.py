"""Grading process: compares LaTeX expressions with math-verify, in a child of its own that may be killed at any time.

Run as a script, so it imports nothing of gambit. Requests and replies are JSON lines on stdin and stdout. The process
that talks to the grader never does algebra: it forks a child that does, ends it when its time is up, and forks the
next within milliseconds, where a new interpreter would take seconds to load sympy.
"""

import json
import logging
import math
import os
import re
import selectors
import signal
import sys
import time
import zlib
from collections.abc import Iterable
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from sympy import Basic, Expr

MEMORY_LIMIT_BYTES = 1024**3
EXACT_TOLERANCE = 1e-12
FLOAT_TOLERANCE = 1e-5  # wide enough for 0.333333 = 1/3, which math-verify accepts
CLEAR_DIFFERENCE = 1e-3  # relative: far more than what passes for rounding above
INFINITE = 1e300
LARGE = 1e290
REWRITES = (
    (re.compile(r"([0-9.]+|[a-z]|\\[a-z]+|\{[^{}]*\}|\([^()]*\))\^\\circ(?![A-Za-z])"), r"(\1\\cdot\\pi/180)"),
    (re.compile(r"([0-9]+!|[A-Za-z]!)\^"), r"(\1)^"),
    (re.compile(r"\\l(?:and|or)(?![A-Za-z])"), ","),
    (re.compile(r"(?<![A-Za-z\\_])(?<!_\{)i(?![A-Za-z])"), " i "),  # imaginary, which 2i alone would not be taken for
)


def main() -> None:
    replies = _claim_stdout()
    logging.disable(logging.CRITICAL)
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_AS", MEMORY_LIMIT_BYTES)
    try:
        # Pays for the imports and the parser's tables once, before the first deadline and the first fork.
        compare("(x+1)^{2}", r"x^{2}+2x+\frac{2}{2}")
    except ImportError as error:
        _write(replies, {"failed": str(error)})
        return
    _write(replies, {"ready": True})
    serve(sys.stdin.buffer, replies)


def serve(requests: Iterable[bytes], replies: BinaryIO) -> None:
    """Answers until stdin is closed by the grader, or by the kernel when the grader's process is killed."""
    child: _Child | None = None
    for line in requests:
        child = child or _Child(replies)
        reply = child.ask(line, json.loads(line)["seconds"])
        if reply is None:
            reply = {"gave_up": child.end()}
            child = None
        _write(replies, reply)


STAGES = ("first", "second", "both")  # which expression is to blame when time or memory ends


class _Child:
    """A fork that does the algebra, and its progress."""

    def __init__(self, replies: BinaryIO) -> None:
        requests, self._requests = os.pipe()
        self._progress, progress = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            for descriptor in (0, replies.fileno(), self._requests, self._progress):
                os.close(descriptor)
            _do_algebra(os.fdopen(requests, "rb"), os.fdopen(progress, "wb", buffering=0))
        os.close(requests)
        os.close(progress)
        self._num_stages = 0

    def ask(self, request: bytes, seconds: float) -> dict[str, bool | str] | None:
        """Returns the reply; None if the child gave none in time."""
        self._num_stages = 0
        os.write(self._requests, request)
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._progress, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                news = os.read(self._progress, 1)
                if news in (b"=", b"!"):
                    return {"equal": news == b"="}
                if not news:
                    return None
                self._num_stages += 1
        return None

    def end(self) -> str:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._requests)
        os.close(self._progress)
        return STAGES[self._num_stages]


def _do_algebra(requests: BinaryIO, progress: BinaryIO) -> None:
    """Runs in the child: writes a dot for each expression read, then = or !. Ends when its parent's pipe closes."""
    status = 0
    try:
        for line in requests:
            request = json.loads(line)
            _limit_cpu(request["seconds"])
            progress.write(b"=" if _compare_in_stages(request["first"], request["second"], progress) else b"!")
    except BaseException:  # a process edge: out of memory, or the parent is gone
        status = 1
    os._exit(status)


def _compare_in_stages(first: str, second: str, progress: BinaryIO) -> bool:
    try:
        for expression in (first, second):
            _readings(expression)
            progress.write(b".")
        return compare(first, second)
    except MemoryError:
        raise
    except Exception:  # whatever a parser makes of a model's output, it is "not shown equal"
        return False


class _Reading(NamedTuple):
    """One way to read an expression."""

    expression: "Basic"
    values: tuple[complex, ...] | None  # of its parts, where symbols have made-up values; None: it has none


def compare(first: str, second: str) -> bool:
    """Returns whether either direction verifies: math-verify follows the gold's form, and a vote has no gold."""
    return any(
        _verifies(gold.expression, other.expression)
        for left in _readings(first)
        for right in _readings(second)
        if not _clearly_differ(left.values, right.values)
        for gold, other in ((left, right), (right, left))
    )


@lru_cache(maxsize=8192)  # a vote compares each answer with many
def _readings(expression: str) -> tuple[_Reading, ...]:
    return tuple(_Reading(parsed, _values(parsed)) for parsed in _parse(expression))


def _verifies(gold: "Basic", other: "Basic") -> bool:
    from math_verify import verify

    same = _same_number(gold, other)
    return same if same is not None else bool(verify(gold, other, timeout_seconds=None)) and _agrees(gold, other)


def _parse(expression: str) -> "list[Basic]":
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import nan, zoo

    # Units are off: math-verify takes the t of 3t for one.
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    config = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)
    latex = f"${_to_latex(expression)}$"
    parsed: list[Basic] = parse(latex, [config], fallback_mode="no_fallback", parsing_timeout=None)
    return [_as_meant(expression) for expression in parsed if not expression.has(zoo, nan)]  # 1/0 is no value


def _as_meant(expression: "Basic") -> "Basic":
    """Returns an expression with real odd roots of negative numbers, and with i for the imaginary unit in numbers.

    Beside other symbols i may be a unit vector or an index.
    """
    from sympy import I, Pow
    from sympy.concrete.expr_with_limits import ExprWithLimits

    def is_odd_root(part: "Basic") -> bool:
        is_power = isinstance(part, Pow) and part.exp.is_Rational and part.exp.q % 2 == 1 and part.exp.q > 1
        return bool(is_power and part.base.is_number and part.base.is_negative)

    if [symbol.name for symbol in expression.free_symbols] == ["i"] and not expression.has(ExprWithLimits):
        expression = expression.subs(expression.free_symbols.pop(), I)
    return expression.replace(is_odd_root, lambda part: (-1) ** part.exp.p * (-part.base) ** part.exp)


def _to_latex(expression: str) -> str:
    """Drops dollar signs, which would end the formula, and rewrites degrees and more for math-verify's parser."""
    latex = expression.replace("$", "")
    for pattern, replacement in REWRITES:
        latex = pattern.sub(replacement, latex)
    return latex


def _clearly_differ(first: tuple[complex, ...] | None, second: tuple[complex, ...] | None) -> bool:
    """Returns whether a part on one side is far from every part on the other: no algebra makes these equal.

    Most answers that a vote compares differ so, and simplifying their difference takes math-verify 10 to 30 ms.
    """
    if first is None or second is None:
        return False
    return any(_is_far(a, second) for a in first) or any(_is_far(b, first) for b in second)


def _is_far(value: complex, others: tuple[complex, ...]) -> bool:
    return all(abs(value - other) > CLEAR_DIFFERENCE * max(abs(value), abs(other), 1.0) for other in others)


def _values(expression: "Basic") -> tuple[complex, ...] | None:
    """Returns numbers that equal answers share whatever their form; None if math-verify compares by other means."""
    from sympy import Expr

    values = [_value(part) if isinstance(part, Expr) else None for part in _parts(expression)]
    return None if None in values else tuple(value for value in values if value is not None)


def _value(expression: "Expr") -> complex | None:
    """Evaluates with a fixed number for each symbol; None for a possible word, or if it costs too much."""
    from sympy import Derivative, Integral, Limit, Product, Sum

    if expression.is_infinite and expression.is_extended_real:
        return complex(INFINITE if expression.is_extended_positive else -INFINITE)
    if expression.is_Symbol or expression.has(Derivative, Integral, Limit, Product, Sum):
        return None
    # Positive, where roots and logarithms obey the rules that simplification assumes; case is for math-verify to judge.
    points = {s: 0.5 + zlib.crc32(str(s).lower().encode()) / 2**32 for s in expression.free_symbols}
    try:
        value = _as_complex(expression.evalf(15, subs=points))
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        return None
    return value if math.isfinite(value.real) and math.isfinite(value.imag) else None


def _as_complex(number: "Expr") -> complex:
    """Returns the number; one beyond the floats becomes as large as its logarithm, so that it differs from others."""
    from sympy import log

    size = abs(number)
    if size.is_Float and size > INFINITE:
        return complex(number / size) * LARGE * float(log(size))
    return complex(number)


def _agrees(first: "Basic", second: "Basic") -> bool:
    """Returns whether each number on one side has an equal on the other.

    math-verify subtracts, evaluates to 15 digits and chops, so that it takes 10^{-30} for 10^{-31}, and a third for a
    sixth if both are fractions of huge powers. Numbers that it calls equal are checked once more.
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

    if (same := _same_number(first, second)) is not None:
        return same
    ratio = N(first, 30) / N(second, 30)
    tolerance = FLOAT_TOLERANCE if first.has(Float) or second.has(Float) else EXACT_TOLERANCE
    return not ratio.is_finite or abs(complex(ratio) - 1) < tolerance


def _same_number(first: "Basic", second: "Basic") -> bool | None:
    """Compares exact numbers by evaluation, None for others: simplifying large powers takes seconds.

    A decimal is taken as written, for 0.1 + 0.2 is 0.3; if that does not make it equal, it may still be a rounded one.
    """
    from sympy import Expr, Float, Rational

    if not all(isinstance(part, Expr) and part.is_number for part in (first, second)):
        return None
    left, right = (part.replace(lambda x: x.is_Float, lambda x: Rational(str(x))).doit() for part in (first, second))
    if left == right:
        return True
    is_exact = not first.has(Float) and not second.has(Float)
    return False if is_exact and left.is_Rational and right.is_Rational else None


def _claim_stdout() -> BinaryIO:
    """Returns the pipe for replies, and points stdout elsewhere, so that a library that prints cannot garble them."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return replies


def _write(replies: BinaryIO, message: dict[str, bool | str]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")


def _limit_cpu(seconds: float) -> None:
    """Has the kernel end this process, even if the parent is gone and one big power holds the interpreter."""
    _limit("RLIMIT_CPU", math.ceil(time.process_time() + seconds) + 1)


def _limit(name: str, value: int) -> None:
    """Sets a soft limit, but not above the hard one, which the system may have set lower."""
    import resource

    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main()
