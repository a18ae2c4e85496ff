"""The final answer of a text: from its last box, its last stated choice, its last number, or its last line.

Every pattern here is linear in the length of the text: repetitions are bounded, or possessive (`++`) so that they are
not tried again shorter, and no match can begin in the middle of a run that a failed match has read.
"""

import re
from collections.abc import Callable
from enum import StrEnum

from gambit.answers.forms import MAX_ANSWER_LENGTH, canonical
from gambit.answers.structured import THINK_END, extract_json
from gambit.errors import UserError

Extractor = Callable[[str], str | None]


class AnswerKind(StrEnum):
    """The place of an answer in a text."""

    BOXED = "boxed"
    CHOICE = "choice"
    NUMBER = "number"
    TEXT = "text"
    JSON = "json"


def extractor_for(kind: AnswerKind | Extractor) -> Extractor:
    if callable(kind):
        return kind
    extractors: dict[AnswerKind, Extractor] = {
        AnswerKind.BOXED: extract_boxed, AnswerKind.CHOICE: extract_choice, AnswerKind.NUMBER: extract_number,
        AnswerKind.TEXT: extract_text, AnswerKind.JSON: extract_json,
    }  # fmt: skip
    if kind not in extractors:
        raise UserError(f"unknown answer kind {kind!r}: use one of {', '.join(AnswerKind)} or a function of the text")
    return extractors[kind]


BOX_PARTS = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*+\{)"
    r"|\\(?:boxed|fbox)\s*+(?P<bare>[-+]?[0-9][0-9.,/]*+|(?<=\s)[A-Za-z](?![A-Za-z]))"
    r"|(?P<open>\{)|(?P<close>\})|\\.",
    re.DOTALL,
)


def extract_boxed(text: str) -> str | None:
    r"""Returns the last non-empty, balanced \boxed{...}: after the thinking if there is one, else anywhere.

    Without any box, not even one that was cut off, it is what the text after the thinking states: Final Answer: 48.
    """
    return _boxed(text) or _stated_answer(text)


def _boxed(text: str) -> str | None:
    return _last_box(_final_part(text)) or _last_box(text)


STATES_ANSWER = re.compile(r"\banswer\b[*_]*+\s*+(?:is\b|:)[*_:\s]*+", re.IGNORECASE)
BOX = re.compile(r"\\(?:boxed|fbox)")
DELIMITED = re.compile(r"\$\$?([^$]++)\$|\\\(((?:(?!\\\)).)++)\\\)|\\\[((?:(?!\\\]).)++)\\\]")
PROSE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
MOST_WORDS = 3  # as in 12 square centimeters; more are a sentence


def _stated_answer(text: str) -> str | None:
    """Returns the answer that the final part states in words; None inside the thinking, or where a box was begun."""
    _, end, final = text.rpartition(THINK_END)
    *_, last = [0, *(phrase.end() for phrase in STATES_ANSWER.finditer(final))]
    if not end or not last or BOX.search(final):
        return None
    said = final[last:].partition("\n")[0].strip()
    if (formula := DELIMITED.match(said)) is not None:
        return _short(formula[formula.lastindex or 0].strip())
    said = said.partition(". ")[0].strip(" .*_`")
    return _short(said) if len(PROSE_WORD.findall(said)) <= MOST_WORDS else None


def _final_part(text: str) -> str:
    return text.rpartition(THINK_END)[2]


def _last_box(text: str) -> str | None:
    """Finds the last box in one pass with a stack of open braces; skips a box longer than an answer can be."""
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # content start of an open box, None for any other brace
    for part in BOX_PARTS.finditer(text):
        span = None
        if part.lastgroup in ("box", "open"):
            opened.append(part.end() if part.lastgroup == "box" else None)
        elif part.lastgroup == "close" and opened and (start := opened.pop()) is not None:
            span = (start, part.start())
        elif part.lastgroup == "bare":
            span = part.span("bare")
        if span is not None and (last is None or span[0] > last[0]) and _is_answer(text, *span):
            last = span
    return None if last is None else text[slice(*last)].strip().rstrip(".,")


def _is_answer(text: str, start: int, end: int) -> bool:
    return end - start <= MAX_ANSWER_LENGTH and bool(text[start:end].strip(" \n\t.,~$"))


EMPHASIS = r"[\s*_`\"'$\[{]{0,5}+(?:\\(?:text|textbf|mathrm|mathbf)\{)?+"
CHOICE_IN_BOX = re.compile(r"(?:(?i:option|choice) ?\(?(?P<named>[A-Da-d])|\(?(?P<alone>[A-D]))(?:\)|[.:,]|$)")
CHOICE_AFTER_ANSWER = re.compile(
    rf"(?i:\b(?:answer|correct (?:choice|option))\b){EMPHASIS}(?:(?i:is)\b)?{EMPHASIS}[:=]?{EMPHASIS}"
    rf"(?:(?i:choice|option)\b)?{EMPHASIS}"
    r"(?:\(([A-Da-d])\)|([A-D])(?![A-Za-z0-9'’])|([a-d])(?=(?:[^\S\n]|[.*)])*+$))",
    re.MULTILINE,
)
CHOICE_ALONE = re.compile(rf"{EMPHASIS}\(?([A-D])[).:\s*_`}}$]*+")
ARTICLE = re.compile(r"\s++(?!because\b|since\b|as\b|for\b|with\b)[a-z]")
PARENTHESISED_CHOICE = re.compile(r"\(([A-D])\)")


def extract_choice(text: str) -> str | None:
    box = _boxed(text)
    match = CHOICE_IN_BOX.match(canonical(box)) if box else None
    return match[match.lastgroup or 0].upper() if match else _stated_choice(_final_part(text))


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
    """Returns whether the A is a word, as in "the answer is A circle"; B, C and D are none."""
    return match.group(2) == "A" and ARTICLE.match(match.string, match.end()) is not None


def _last_line(text: str) -> str | None:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


# Digits in groups of three are one number where they begin (not after "7,") and are at most a dozen; else a list.
GROUPED = r"(?<![0-9],)[0-9]{1,3}(?:,[0-9]{3}){1,12}+"
PLAIN_NUMBER = re.compile(
    r"(?<![\w./^])(?:(?<![)\]}])[-+−])?\\?\$?"
    r"(?:\\[dt]?frac\{-?[0-9]++\}\{[0-9]++\}"
    rf"|(?:{GROUPED}|[0-9]++)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?(?:/[0-9]++)?|\.[0-9]++)"
    r"(?![0-9]|[.,/][0-9]|(?:st|nd|rd|th)\b)(?:_(?:[0-9]{1,2}|\{[0-9]{1,2}\})(?!\w))?(?:\s?\\?%)?"
)
CURRENCY = re.compile(r"\\?\$")
COUNTED_NOUN = re.compile(rf"({PLAIN_NUMBER.pattern})\s[A-Za-z][A-Za-z ]+")


def extract_number(text: str) -> str | None:
    """Returns the last box, else the last number of the final part, as written (sign, separators, base, percent)."""
    if box := _boxed(text):
        noun = COUNTED_NOUN.fullmatch(box)
        return noun.group(1) if noun else box
    numbers = PLAIN_NUMBER.findall(_final_part(text))
    return _short(CURRENCY.sub("", numbers[-1])) if numbers else None


ANSWER_PHRASE = re.compile(rf"{STATES_ANSWER.pattern}(\S.*+)", re.IGNORECASE)


def extract_text(text: str) -> str | None:
    final = _final_part(text)
    phrases = ANSWER_PHRASE.findall(final)
    found = _boxed(text) or (phrases[-1] if phrases else _last_line(final))
    return _short(found.strip().rstrip(".").strip('*_`"').rstrip(".").strip()) if found else None


def _short(answer: str) -> str | None:
    """Returns the answer; None if it is empty or longer than an answer can be."""
    return answer if 0 < len(answer) <= MAX_ANSWER_LENGTH else None
