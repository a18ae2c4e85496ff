"""Text -> answer, canonical form, equivalence, grading with a hard deadline; never runs symbolic maths in-process."""

import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Self

from gambit.core.errors import EngineError, UserError

Extractor = Callable[[str], str | None]


class AnswerKind(StrEnum):
    BOXED = "boxed"
    CHOICE = "choice"
    NUMBER = "number"
    TEXT = "text"


def extractor_for(kind: AnswerKind | Extractor) -> Extractor:
    if callable(kind):
        return kind
    extractors: dict[AnswerKind, Extractor] = {
        AnswerKind.BOXED: extract_boxed,
        AnswerKind.CHOICE: extract_choice,
        AnswerKind.NUMBER: extract_number,
        AnswerKind.TEXT: extract_text,
    }
    if kind not in extractors:
        raise UserError(f"unknown answer kind {kind!r}: use one of {', '.join(AnswerKind)} or a function of the text")
    return extractors[kind]


THINK_END = "</think>"
BOX_PARTS = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)"
    r"|\\(?:boxed|fbox)\s*(?P<bare>[-+]?[0-9][0-9.,/]*|(?<=\s)[A-Za-z](?![A-Za-z]))"
    r"|(?P<open>\{)|(?P<close>\})|\\.",
    re.DOTALL,
)


def extract_boxed(text: str) -> str | None:
    r"""The last non-empty, brace-balanced \boxed{...}: after the thinking if there is one, else anywhere."""
    return _last_box(_final_part(text)) or _last_box(text)


def _final_part(text: str) -> str:
    return text.rpartition(THINK_END)[2]


def _last_box(text: str) -> str | None:
    """One pass with a stack, so that a text of ten thousand unclosed boxes costs no more than any other."""
    last_start, last = -1, None
    opened: list[int | None] = []  # content start of an open box, None for any other brace
    for part in BOX_PARTS.finditer(text):
        start, content = part.start("bare"), part.group("bare")
        if part.lastgroup in ("box", "open"):
            opened.append(part.end() if part.lastgroup == "box" else None)
        elif part.lastgroup == "close" and opened and (closed := opened.pop()) is not None:
            start, content = closed, text[closed : part.start()]
        if content and content.strip(" \n\t.,~$") and start > last_start:
            last_start, last = start, content.strip().rstrip(".,")
    return last


EMPHASIS = r"[\s*_`\"'$\[{]{0,5}(?:\\(?:text|textbf|mathrm|mathbf)\{)?"  # bounded: several in a row backtrack
CHOICE_IN_BOX = re.compile(r"\(?([A-D])(?:\)|[.:,]|$)")
CHOICE_AFTER_ANSWER = re.compile(
    rf"(?i:\b(?:answer|correct (?:choice|option))\b){EMPHASIS}(?:(?i:is)\b)?{EMPHASIS}[:=]?{EMPHASIS}"
    rf"(?:(?i:choice|option)\b)?{EMPHASIS}"
    r"(?:\(([A-Da-d])\)|([A-D])(?![A-Za-z0-9'’])|([a-d])(?=[\s.*)]*$))",
    re.MULTILINE,
)
CHOICE_ALONE = re.compile(rf"{EMPHASIS}\(?([A-D])[).:\s*_`}}$]*")
ARTICLE = re.compile(r"\s+(?!because\b|since\b|as\b|for\b|with\b)[a-z]")
PARENTHESISED_CHOICE = re.compile(r"\(([A-D])\)")


def extract_choice(text: str) -> str | None:
    box = extract_boxed(text)
    match = CHOICE_IN_BOX.match(canonical(box)) if box else None
    return match.group(1) if match else _stated_choice(_final_part(text))


def _stated_choice(text: str) -> str | None:
    stated = [match for match in CHOICE_AFTER_ANSWER.finditer(text) if not _is_article(match)]
    if stated:
        return next(group for group in stated[-1].groups() if group).upper()
    line = _last_line(text) or ""
    if alone := CHOICE_ALONE.fullmatch(line):
        return alone.group(1)
    parenthesised = PARENTHESISED_CHOICE.findall(line)
    return parenthesised[-1] if parenthesised else None


def _is_article(match: re.Match[str]) -> bool:
    """In "the answer is A circle" the A is a word; B, C and D are none."""
    return match.group(2) == "A" and ARTICLE.match(match.string, match.end()) is not None


def _last_line(text: str) -> str | None:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


PLAIN_NUMBER = re.compile(
    r"(?<![\w./^])(?:(?<![)\]}])[-+−])?\\?\$?"
    r"(?:\\[dt]?frac\{-?[0-9]+\}\{[0-9]+\}"
    r"|(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?|\.[0-9]+)"
    r"(?![0-9]|[.,/][0-9]|(?:st|nd|rd|th)\b)(?:\s?\\?%)?"
)
CURRENCY = re.compile(r"\\?\$")
COUNTED_NOUN = re.compile(rf"({PLAIN_NUMBER.pattern})\s[A-Za-z][A-Za-z ]+")


def extract_number(text: str) -> str | None:
    """The last box, else the last number of the final part as it is written there (sign, separators, percent)."""
    if box := extract_boxed(text):
        noun = COUNTED_NOUN.fullmatch(box)
        return noun.group(1) if noun else box
    numbers = PLAIN_NUMBER.findall(_final_part(text))
    return CURRENCY.sub("", numbers[-1]) if numbers else None


ANSWER_PHRASE = re.compile(r"\banswer\b[*_]*\s*(?:is\b|:)[*_:\s]*(\S.*)", re.IGNORECASE)


def extract_text(text: str) -> str | None:
    final = _final_part(text)
    phrases = ANSWER_PHRASE.findall(final)
    found = extract_boxed(text) or (phrases[-1] if phrases else _last_line(final))
    return found.strip().strip('*_`"').rstrip(".").strip() or None if found else None


VULGAR_FRACTIONS = (
    ("½", "1/2"), ("⅓", "1/3"), ("⅔", "2/3"), ("¼", "1/4"), ("¾", "3/4"), ("⅕", "1/5"), ("⅖", "2/5"), ("⅗", "3/5"),
    ("⅘", "4/5"), ("⅙", "1/6"), ("⅚", "5/6"), ("⅛", "1/8"), ("⅜", "3/8"), ("⅝", "5/8"), ("⅞", "7/8"),
)  # fmt: skip
UNITS = (
    "degrees?|dollars?|cents?|percent|units?|square units?|cubic units?|inches|inch|feet|foot|miles?|yards?|meters?"
    "|cm|mm|km|kg|hours?|minutes?|seconds?|days?|weeks?|months?|years?|points?"
)
REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"−", "-"),
        (r"⁄", "/"),
        (r"π", r"\\pi "),
        (r"∞", r"\\infty "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[()\[\]]|\\?\$", ""),
        (r"\{,\}|,\s*\\!\s*", ","),
        (r"(?<!\\)\\[,!]", ""),
        (r"(?<!\\)\\[;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|°|\\degree(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<=[0-9}])\s*\\(?:text|mathrm|mbox|textrm)\{[^{}]*\}(?:\^\{?[23]\}?)?\s*\.?$", ""),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\{([^{}]*)\}", r" \1 "),
        (r"\\(frac|sqrt)\s+(?=[0-9{\\])", r"\\\1"),
        (r"\\(frac|sqrt)([0-9])", r"\\\1{\2}"),
        (r"(\\frac\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
        (rf"(?<=[0-9}}])\s*(?:{UNITS})\.?$", ""),
        (r"\s*\\?%$", ""),
        (r"^[\s*]+|[\s*]+$|[\s.,;:]+$", ""),
        (r"(?<![A-Za-z0-9,])\s+|\s+(?![A-Za-z0-9\s])", ""),
        (r"\s+", " "),
    )
)
COMMA = re.compile(r"\s*,\s*")
CHOICE = re.compile(r"\(?([A-Da-d])\)?|\(([E-Je-j])\)")


MAX_ANSWER_LENGTH = 2000  # a longer "answer" is prose; also keeps a request within one pipe buffer, so no write blocks


@lru_cache(maxsize=65_536)  # a vote asks for the same answers again and again
def canonical(answer: str) -> str:
    """A cheap, idempotent normal form: equal forms mean equal answers, unequal ones may still be equivalent."""
    text = " ".join(answer.split())
    if len(text) > MAX_ANSWER_LENGTH:
        return text
    while (simpler := _simplify(text)) != text:
        text = simpler
    return text


def _simplify(text: str) -> str:
    for glyph, fraction in VULGAR_FRACTIONS:
        text = text.replace(glyph, f" {fraction} ")
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    if choice := CHOICE.fullmatch(text):
        return (choice.group(1) or choice.group(2)).upper()
    number = _rational(text)
    # A list keeps one space after each comma: "1, 234" must not turn into the number 1,234 when seen again.
    return COMMA.sub(", ", text) if number is None else str(number)


MAX_NUMBER_LENGTH = 400  # beyond it int() gets slow, and from 4,300 digits on it refuses
NUMBER = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
DECIMAL = re.compile(rf"([-+]?{NUMBER}(?:[eE][-+]?[0-9]{{1,2}})?)")
SLASHED = re.compile(rf"(?P<sign>[-+]?)(?:(?P<whole>[0-9]+) )?(?P<top>{NUMBER})/(?P<bottom>{NUMBER})")
STACKED = re.compile(rf"(?P<sign>[-+]?)(?P<whole>[0-9]*) ?\\frac\{{(?P<top>[-+]?{NUMBER})\}}\{{(?P<bottom>{NUMBER})\}}")


def _rational(text: str) -> Fraction | None:
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    if DECIMAL.fullmatch(text):
        return _fraction(text)
    match = SLASHED.fullmatch(text) or STACKED.fullmatch(text)
    if match is None or (bottom := _fraction(match["bottom"])) == 0:
        return None
    value = _fraction(match["whole"] or "0") + _fraction(match["top"]) / bottom  # 3\frac{1}{2} is a mixed number
    return -value if match["sign"] == "-" else value


def _fraction(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))


class Grader:
    """Decides whether two answers are equal, from any thread, and never hangs on them.

    Symbolic comparison runs in one long-lived child process, because nothing inside this process can stop a runaway
    power or simplification. It is a fresh interpreter speaking JSON lines and not a fork, which would copy torch's
    threads and locks; its stdin ends with us however we end, and so does it. Signals are not used: they would reach
    the main thread only, and it belongs to someone else.
    """

    def __init__(self, deadline_seconds: float = 5.0, startup_seconds: float = 120.0, cache_size: int = 65536) -> None:
        if not deadline_seconds > 0:
            raise UserError(f"deadline_seconds is {deadline_seconds}: a comparison needs a positive deadline")
        self._deadline_seconds = deadline_seconds
        self._startup_seconds = startup_seconds
        self._cache_size = cache_size
        self._cache: OrderedDict[tuple[str, str], bool] = OrderedDict()
        self._worker: _Worker | None = None
        self._lock = threading.Lock()
        self._num_given_up = 0

    @property
    def num_given_up(self) -> int:
        """Comparisons that ran into the deadline or crashed the worker, and so counted as not equal."""
        return self._num_given_up

    def grade(self, answer: str | None, gold: str) -> bool:
        return answer is not None and self.equivalent(answer, gold)

    def equivalent(self, first: str, second: str) -> bool:
        known = _known_equality(first, second)
        if known is not None:
            return known
        with self._lock:
            return self._remembered(min(first, second), max(first, second))

    def close(self) -> None:
        with self._lock:
            self._drop_worker()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remembered(self, first: str, second: str) -> bool:
        key = (first, second)
        if key not in self._cache:
            self._cache[key] = self._compared(first, second)
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def _compared(self, first: str, second: str) -> bool:
        try:
            return self._running_worker().equal(first, second, self._deadline_seconds)
        except LOST:
            self._num_given_up += 1
            self._drop_worker()
            return False

    def _running_worker(self) -> "_Worker":
        if self._worker is not None and not self._worker.is_alive():
            self._drop_worker()  # ended while idle, so the next comparison is not to blame
        if self._worker is None:
            self._worker = _start_worker(self._startup_seconds)
        return self._worker

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


def _known_equality(first: str, second: str) -> bool | None:
    """What needs no symbolic comparison: equal forms, blank answers, two numbers far apart, and prose."""
    left, right = canonical(first), canonical(second)
    if not left or not right:
        return False
    if left == right:
        return True
    if _are_different_numbers(left, right) and "%" not in first + second:  # 9% is 9 as well as 0.09: a convention
        return False
    return False if max(len(first), len(second)) > MAX_ANSWER_LENGTH else None


CLEAR_DIFFERENCE = Fraction(1, 1000)  # relative: what is nearer may be a rounded form of the same number


def _are_different_numbers(left: str, right: str) -> bool:
    first, second = _rational(left), _rational(right)
    if first is None or second is None:
        return False
    if first.denominator == second.denominator == 1:
        return first != second
    return abs(first - second) > CLEAR_DIFFERENCE * max(abs(first), abs(second), Fraction(1))


LOST = (OSError, EOFError, ValueError)  # too late (TimeoutError is an OSError), gone, or talking nonsense


class _Worker:
    """One grading process and its two pipes; never retries, never judges."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        # A session of its own keeps Ctrl-C away from it: we decide when it ends.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True
        )
        self.stop = weakref.finalize(self, _end, self._process)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def equal(self, first: str, second: str, deadline_seconds: float) -> bool:
        assert self._process.stdin is not None
        request = {"first": first, "second": second, "deadline_seconds": deadline_seconds}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return self.receive(deadline_seconds).get("equal") is True

    def receive(self, seconds: float) -> dict[str, bool | str]:
        line = _read_line(self._process, time.monotonic() + seconds)
        reply: dict[str, bool | str] = json.loads(line)
        return reply


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert process.stdout is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                raise EOFError
            line += chunk
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _start_worker(startup_seconds: float) -> _Worker:
    worker = _Worker(_worker_command())
    try:
        reply = worker.receive(startup_seconds)
    except LOST as error:
        worker.stop()
        raise EngineError(f"the grading process did not start within {startup_seconds} s ({error!r})") from error
    if "failed" in reply:
        worker.stop()
        raise EngineError(f"the grading process cannot work ({reply['failed']}): pip install math-verify==0.9.0")
    return worker


def _worker_command() -> list[str]:
    # -P: without it Python would put this folder first on the path, and our types.py before the standard one.
    return [sys.executable, "-P", str(Path(__file__).with_name("_grader_worker.py"))]
