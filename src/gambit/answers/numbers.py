r"""Numbers as people write them: 1,234 · 3\frac{1}{2} · 0.\overline{3} · 2.5 million · 4210_5."""

import re
from fractions import Fraction

MAX_NUMBER_LENGTH = 400  # beyond it int() gets slow, and from 4,300 digits on it refuses
ROUNDED_PLACES = 6  # a decimal with so many places may be a rounded value; one with fewer is meant exactly
ROUNDING = Fraction(1, 10**5)  # relative: more than this is no matter of rounding
UNSIGNED = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
DECIMAL = re.compile(rf"[-+]?{UNSIGNED}(?:[eE][-+]?[0-9]{{1,2}})?")
SLASHED = re.compile(rf"(?P<sign>[-+]?)(?:(?P<whole>[0-9]+) )?(?P<top>{UNSIGNED})/(?P<bottom>{UNSIGNED})")
STACKED = re.compile(
    rf"(?P<sign>[-+]?)(?P<whole>[0-9]*) ?\\frac\{{(?P<top>[-+]?{UNSIGNED})\}}\{{(?P<bottom>{UNSIGNED})\}}"
)
REPEATING = re.compile(r"(?P<sign>[-+]?)(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*)\\overline\{(?P<period>[0-9]+)\}")
MULTIPLES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
MULTIPLIED = re.compile(rf"(?P<number>.+?) ?(?P<multiple>{'|'.join(MULTIPLES)})", re.IGNORECASE)

# Digits in groups of three are one number, but neither in brackets, (1,234) being a pair, nor among others: 5,100,2.
GROUPED = re.compile(r"(?<![0-9,.(\[])(?<!\\\{)[0-9]{1,3}(?:,[0-9]{3})++(?!,?[0-9]|\)|\]|\\\})")
SPACED = re.compile(r"(?<![0-9A-Za-z.,] )(?<![0-9A-Za-z.,])[0-9]{1,3}(?: [0-9]{3})++(?! ?[0-9/])")


def ungrouped(text: str) -> str:
    """1,234 and 12 345 without their separators."""
    return SPACED.sub(_digits, GROUPED.sub(_digits, text))


def _digits(match: re.Match[str]) -> str:
    return re.sub("[ ,]", "", match[0])


def rational(text: str) -> Fraction | None:
    """The value of a number without separators; None where the text is anything else."""
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    if DECIMAL.fullmatch(text):
        return Fraction(text)
    if (match := REPEATING.fullmatch(text)) is not None:
        return _repeating(match)
    if (match := SLASHED.fullmatch(text) or STACKED.fullmatch(text)) is not None:
        return _quotient(match)
    match = MULTIPLIED.fullmatch(text)
    value = rational(match["number"]) if match else None
    return None if match is None or value is None else value * MULTIPLES[match["multiple"].lower()]


def _quotient(match: re.Match[str]) -> Fraction | None:
    if (bottom := Fraction(match["bottom"])) == 0:
        return None
    value = Fraction(match["whole"] or 0) + Fraction(match["top"]) / bottom  # 3\frac{1}{2} is a mixed number
    return -value if match["sign"] == "-" else value


def _repeating(match: re.Match[str]) -> Fraction:
    fixed, period = match["fixed"], match["period"]
    start = Fraction(int((match["whole"] or "0") + fixed), 10 ** len(fixed))
    value = start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return -value if match["sign"] == "-" else value


def number_form(text: str) -> str | None:
    """The normal form of a number: a fraction in lowest terms, but a long decimal, which may be rounded, as it is."""
    value = rational(text)
    if value is None:
        return None
    places = decimal_places(value)
    is_rounded = places is not None and places >= ROUNDED_PLACES and DECIMAL.fullmatch(text)
    return _decimal(value, places) if is_rounded and places is not None else str(value)


def decimal_places(value: Fraction) -> int | None:
    """How many places the number has as a decimal; None where they do not end."""
    twos, rest = _multiplicity(value.denominator, 2)
    fives, rest = _multiplicity(rest, 5)
    return max(twos, fives) if rest == 1 else None


def _multiplicity(number: int, prime: int) -> tuple[int, int]:
    count = 0
    while number % prime == 0:
        number, count = number // prime, count + 1
    return count, number


def _decimal(value: Fraction, places: int) -> str:
    digits = str(abs(value.numerator) * (10**places // value.denominator)).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def same_number(first: str, second: str) -> bool:
    """Whether two numbers in normal form are equal; 0.333333 is a third, as a decimal of six places may be rounded."""
    if first == second or not ("." in first or "." in second):
        return first == second
    left, right = Fraction(first), Fraction(second)
    is_near = abs(left - right) <= ROUNDING * max(abs(left), abs(right))
    return is_near and round(left, ROUNDED_PLACES) == round(right, ROUNDED_PLACES)


NUMERAL = r"(?P<sign>-?)\(?(?P<digits>(?=[A-Z., ]*[0-9])[0-9A-Z ,]*(?:\.[0-9A-Z]+)?)\)?"
BASE_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16,
}  # fmt: skip
BASE = rf"(?P<base>[0-9]{{1,2}}|{'|'.join(BASE_WORDS)})"
IN_BASE = re.compile(
    rf"{NUMERAL} ?(?:_ ?(?:\{{\(? ?{BASE} ?\)?\}}|{BASE.replace('<base>', '<plain>')})"
    rf"|(?:\(?(?:in )?base {BASE.replace('<base>', '<named>')}\)?))"
)


def numeral_form(text: str) -> str | None:
    """The normal form of a number whose base is named, as 4210_5: never its value, for the base is part of the answer.

    Base ten is the ordinary number. None where the text is anything else.
    """
    match = IN_BASE.fullmatch(text) if len(text) <= MAX_NUMBER_LENGTH else None
    if match is None:
        return None
    name = match["base"] or match["plain"] or match["named"]
    base = BASE_WORDS.get(name) or int(name)
    digits = re.sub("[ ,]", "", match["digits"])
    if base < 2 or any(letter.isalpha() and int(letter, 36) >= base for letter in digits):
        return None
    digits = digits.lstrip("0") or "0"
    numeral = match["sign"] + (f"0{digits}" if digits.startswith(".") else digits)
    return number_form(numeral) if base == 10 else f"{numeral}_{base}"
