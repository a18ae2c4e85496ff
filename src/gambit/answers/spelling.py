r"""The spelling of answers: one LaTeX notation for each thing, numbers, units of measure.

Notation covers plain and Unicode maths, too: 3/4, √2, ½. Numbers are read as people write them: 1,234 · 3\frac{1}{2} ·
0.\overline{3} · 2.5 million · 4210_5. Units stand at the end: 12\text{ cm}^2 · 90^\circ · 28\% · \$5 · 30 mph.
"""

import re
from decimal import Context, Decimal
from fractions import Fraction

# -- numbers ---------------------------------------------------------------------------------------------------


MAX_NUMBER_LENGTH = 400  # beyond it int() gets slow, and from 4,300 digits on it refuses
EXACT = Context(prec=MAX_NUMBER_LENGTH)
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
    """Drops the separators of 1,234 and 12 345."""
    for grouped in (GROUPED, SPACED):
        text = grouped.sub(lambda match: re.sub("[ ,]", "", match[0]), text)
    return text


def rational(text: str) -> Fraction | None:
    """Returns the value of a number without separators; None for any other text."""
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    if DECIMAL.fullmatch(text):
        return Fraction(text)
    if (match := REPEATING.fullmatch(text)) is not None:
        fixed, period = match["fixed"], match["period"]
        repeated = Fraction(int(period), 10 ** len(period) - 1)
        value = Fraction(int((match["whole"] or "0") + fixed) + repeated, 10 ** len(fixed))
    elif (match := SLASHED.fullmatch(text) or STACKED.fullmatch(text)) is not None:
        if (bottom := Fraction(match["bottom"])) == 0:
            return None
        value = Fraction(match["whole"] or 0) + Fraction(match["top"]) / bottom  # 3\frac{1}{2} is a mixed number
    elif (match := MULTIPLIED.fullmatch(text)) is not None:
        number = rational(match["number"])
        return None if number is None else number * MULTIPLES[match["multiple"].lower()]
    else:
        return None
    return -value if match["sign"] == "-" else value


def number_form(text: str) -> str | None:
    """Returns a number as a fraction in lowest terms; a long decimal, which may be rounded, stays. None: no number."""
    value = rational(text)
    if value is None:
        return None
    is_rounded = DECIMAL.fullmatch(text) and (value * 10 ** (ROUNDED_PLACES - 1)).denominator > 1
    return f"{EXACT.normalize(Decimal(text)):f}" if is_rounded else str(value)


def same_number(first: str, second: str) -> bool:
    """Compares two numbers in normal form; 0.333333 is a third, as a decimal of six places may be rounded."""
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
    """Returns a number whose base is named, as 4210_5, never as its value: the base is part of the answer.

    Base ten is the ordinary number. Returns None for any other text.
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


# -- units -----------------------------------------------------------------------------------------------------


_ALIASES = {
    "'": "′",  # of an angle or a foot
    "''": "″",  # of an angle or an inch
    **{unit: f"{unit}s" for unit in ("acre", "day", "month", "pint", "quart", "ton", "week")},
    "meter": "m meters metre metres", "centimeter": "cm centimeters centimetre centimetres",
    "millimeter": "mm millimeters millimetre millimetres", "kilometer": "km kilometers kilometre kilometres",
    "inch": "in inches", "foot": "ft feet", "yard": "yd yds yards", "mile": "mi miles", "hectare": "hectares ha",
    "gram": "g grams gm", "kilogram": "kg kilograms", "milligram": "mg milligrams", "pound": "lb lbs pounds",
    "ounce": "oz ounces", "second": "s sec secs seconds", "minute": "min mins minutes", "hour": "h hr hrs hours",
    "year": "yr yrs years", "liter": "l liters litre litres", "milliliter": "ml milliliters millilitre millilitres",
    "gallon": "gal gallons", "dollar": "dollars usd", "cent": "cents ¢", "euro": "euros eur", "sterling": "gbp",
    "yen": "jpy", "rupee": "rupees inr rs", "degree": "degrees deg", "radian": "radians rad rads", "celsius": "",
    "fahrenheit": "", "kelvin": "k", "newton": "n newtons", "joule": "j joules", "watt": "w watts", "volt": "v volts",
    "hertz": "hz", "percent": "pct percentage", "mile/hour": "mph", "kilometer/hour": "kph kmph kmh", "am": "",
    "pm": "",
    "": "unit units",  # of unnamed length: as good as none
}  # fmt: skip
UNIT_OF = {alias: unit for unit, aliases in _ALIASES.items() for alias in (unit, *aliases.split()) if alias}
CURRENCIES = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"}
DATE = re.compile(r"[0-9]{1,2}/[0-9]{1,2}/[0-9]{4}|[0-9]{4}-[0-9]{2}-[0-9]{2}")
TEMPERATURES = ("celsius", "fahrenheit")
SHAPES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}

PRICE = re.compile(r"(?P<sign>[-+]?) ?\\?(?P<currency>[$€£¥₹]) ?(?P<amount>.+)")
PRIMES = re.compile(rf"(?P<amount>[-+]?{UNSIGNED}) ?(?P<primes>'{{1,2}}|[′″])")
PRIMES_OF = ({"'", "minute"}, {"'", "foot"}, {"''", "second"}, {"''", "inch"})
DEGREES = re.compile(r"(?P<head>.+)\^\\circ ?(?P<scale>[CF]?)")
TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
WORD = r"[A-Za-z¢]++\.?(?:\^\{?[23]\}?)?"
LAST_WORDS = re.compile(rf"(?<![\\A-Za-z_^{{]){WORD}(?:(?: ?/ ?| ){WORD}){{0,5}}$")
HALF_DAY = re.compile(r"(?P<head>[0-9]{1,2}(?::[0-9]{2})?) ?(?P<half>[aApP])\.? ?[mM]\.?")
NO_NOUN = {
    *MULTIPLES, "and", "are", "but", "choose", "cos", "cot", "csc", "exp", "for", "from", "less", "log", "max", "min",
    "mod", "more", "or", "over", "per", "plus", "pmod", "sec", "sin", "sqrt", "tan", "than", "the", "times",
}  # fmt: skip


def split_unit(text: str) -> tuple[str, str]:
    """Splits an answer into its body and the name of its unit; the name is empty for no unit, or for `units`."""
    if (price := PRICE.fullmatch(text)) is not None:
        return price["sign"] + price["amount"], CURRENCIES[price["currency"]]
    if text.endswith("%") and len(text) > 1:
        return text[:-1].rstrip("\\ "), "percent"
    if (clock := HALF_DAY.fullmatch(text)) is not None:
        return clock["head"], f"{clock['half'].lower()}m"
    if (angle := PRIMES.fullmatch(text)) is not None:
        return angle["amount"], UNIT_OF[angle["primes"]]
    degrees = DEGREES.fullmatch(text)
    if degrees is not None and not TRIGONOMETRY.search(text):
        return degrees["head"], {"C": "celsius", "F": "fahrenheit"}.get(degrees["scale"], "degree")
    return _split_words(text)


def _split_words(text: str) -> tuple[str, str]:
    """Splits off a unit in words. Tries the longest run of last words first: miles per hour before hour."""
    match = LAST_WORDS.search(text)
    if match is None or not re.search(r"[0-9\\]", text[: match.start()]):
        return text, ""
    starts = [match.start(), *(match.start() + gap.end() for gap in re.finditer(" ", match[0]))]
    for start in starts:
        unit = None if _may_be_product(text[start:]) else unit_named(text[start:])
        if unit is not None:
            return text[:start].rstrip(), unit
    counts = [text[:start].rstrip() for start in starts if _is_noun(text[start:])]
    return next((count for count in reversed(counts) if rational(count) is not None), text), ""


def _may_be_product(phrase: str) -> bool:
    r"""Returns whether a single letter leads: it is a unit only in \text{...}, spelled out by now. 5 m is a product."""
    return re.match("[A-Za-z](?![A-Za-z])", phrase) is not None and not phrase.startswith("m/s")


def _is_noun(phrase: str) -> bool:
    """Returns whether the words name what is counted, not measured: 12 red apples are 12."""
    words = phrase.rstrip(".").split()
    return all(len(word) > 2 and word.isalpha() and word.lower() not in NO_NOUN for word in words)


def unit_named(phrase: str) -> str | None:
    """Returns foot^2 for `sq. ft.` and kilometer/hour for `km/h` and `kilometers per hour`; None for no unit."""
    parts = re.split(r" ?/ ?| per ", phrase.strip().replace(".", ""))
    units = [_simple_unit(part) for part in parts]
    if len(units) > 2 or None in units:
        return None
    return "/".join(unit for unit in units if unit)


def _simple_unit(phrase: str) -> str | None:
    power, words = 1, []
    for word in phrase.split():
        name, _, exponent = word.partition("^")
        power *= int(exponent.strip("{}") or 1) * SHAPES.get(name.lower(), 1)
        words += [] if name.lower() in SHAPES else [name]
    if len(words) != 1 and not (words and words[0].lower().startswith("degree")):
        return None
    unit = UNIT_OF.get(words[-1].lower())
    return unit if unit is None or power == 1 or not unit else f"{unit}^{power}"


def are_compatible(first: str, second: str) -> bool:
    """Returns whether equal answers may have these units: a missing unit matches any, different units do not match."""
    if first == second or not first or not second:
        return True
    return {first, second} in (*PRIMES_OF, *({"degree", scale} for scale in TEMPERATURES))


# -- notation --------------------------------------------------------------------------------------------------


UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "⁄": "/", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
        "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "²": "^2", "³": "^3", "θ": r"\theta ",
        "½": " 1/2 ", "⅓": " 1/3 ", "⅔": " 2/3 ", "¼": " 1/4 ", "¾": " 3/4 ", "⅕": " 1/5 ", "⅖": " 2/5 ",
        "⅗": " 3/5 ", "⅘": " 4/5 ", "⅙": " 1/6 ", "⅚": " 5/6 ", "⅛": " 1/8 ", "⅜": " 3/8 ", "⅝": " 5/8 ", "⅞": " 7/8 ",
    }
    | {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)}  # full width
)  # fmt: skip
END = r"(?![A-Za-z])"
TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)"
UNIT_TEXT = re.compile(rf"(?<=.){TEXT}\{{[\s~]*([A-Za-z]{{1,2}})\.?[\s~]*\}}")
# The content of braces, with braces of its own to a depth of three, as in \mathbf{\frac{1+\sqrt{5}}{2}}.
NESTED = r"(?:[^{}]++|\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\})*+"
FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp"
EDGES = (r"^[\s*=]+|[\s*]+$|(?<!\\)[\s.,;:]+$", "")
REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        EDGES,  # before the stars of **12** could be taken for a power
        (rf"\\(?:left|right|middle|[bB]igg?[lr]?|displaystyle|textstyle|limits){END}\.?", ""),
        (r"(?<!\\)\\[()\[\]]", ""),
        (r"(?<=[0-9])(?:\{,\}|, ?\\! ?)(?=[0-9]{3})", ""),
        (r"\{,\}", ","),
        (r"\\!", ""),
        (rf"(?<!\\)\\[,;: >]|~|\\q?quad{END}|\\(?:h|v)space\{{[^{{}}]*\}}|\\(?:thin|med|thick)space{END}", " "),
        (rf"\\(?:leq|leqslant){END}|<=", r"\\le "),
        (rf"\\(?:geq|geqslant){END}|>=", r"\\ge "),
        (rf"\\neq{END}|!=", r"\\ne "),
        (rf"\\lt{END}", "<"),
        (rf"\\gt{END}", ">"),
        (rf"\\varnothing{END}|\\\{{ ?\\\}}", r"\\emptyset "),
        (r"√ ?([0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z]))", r"\\sqrt{\1}"),
        (r"∛ ?([0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z]))", r"\\sqrt[3]{\1}"),
        (r"√ ?(?=\{)", r"\\sqrt"),
        (r"(?:\{\})?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])", r"^\\circ "),
        (rf"\\[dtc]frac{END}", r"\\frac"),
        (rf"\\dbinom{END}|\\tbinom{END}", r"\\binom"),
        (rf"{TEXT}\{{({NESTED})\}}", r" \1 "),
        (r"√ ?([0-9]+(?:\.[0-9]+)?|[A-Za-z])", r"\\sqrt{\1}"),
        (r"√ ?(?=\{)", r"\\sqrt"),
        (rf"(?<![\\A-Za-z])(?:, ?)?(and|or){END}", r"\\l\1 "),
        (rf"(?<![\\A-Za-z])(pi|infty){END}", r"\\\1 "),
        (rf"(?<![\\A-Za-z])({FUNCTIONS}){END}(?=\s*[A-Za-z0-9({{\\_])", r"\\\1 "),
        (r"(?<![A-Za-z0-9\\])C\( ?([0-9]+) ?, ?([0-9]+) ?\)", r"\\binom{\1}{\2}"),
        (r"\*\*", "^"),
        (r"\^ ?(-?[0-9]+\.[0-9]+|-[0-9]+|[0-9]{2,})", r"^{\1}"),
        (r"([_^])\{([0-9A-Za-z])\}", r"\1\2"),
        (r"(?<=\S)\*(?=\S)|(?<=\S) \* (?=\S)", r"\\cdot "),
        (r"\\(frac|sqrt|binom) +(?=[0-9{\\])", r"\\\1"),
        (r"\\(frac|sqrt)([0-9])", r"\\\1{\2}"),
        (rf"\\binom(?:(?=[0-9])| (?=[A-Za-z]{END}))([0-9A-Za-z]) ?", r"\\binom{\1}"),
        (r"(\\binom\{[^{}]*\}) ?([0-9A-Za-z])", r"\1{\2}"),
        (r"\{ ?([^{}\\]+?) ?\\choose ?([^{}\\]+?) ?\}", r"\\binom{\1}{\2}"),
        (r"^([0-9A-Za-z]+) ?\\choose ?([0-9A-Za-z]+)$", r"\\binom{\1}{\2}"),
        (r"\\frac\\pi ?", r"\\frac{\\pi}"),
        (r"(\\frac\{[^{}]*\}) ?([0-9A-Za-z])", r"\1{\2}"),
        (r"(\\frac\{[^{}]*\}) ?(\\pi)(?![A-Za-z])", r"\1{\2}"),
        EDGES,
        (r"(?<=[a-z]{2})\. ?(?=[A-Za-z])", " "),  # sq. ft.
        (r"(?<![A-Za-z0-9,\s])\s+|(?<![,\s])\s+(?![A-Za-z0-9\s])", ""),
        (r"\s+", " "),
    )
)
DOLLAR = re.compile(r"(?<!\\)\$")
LONE_PRICE = re.compile(r"[-+]? ?\$ ?[-+]?[0-9.]")
PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])\\?(?:sqrt|√) ?\(")
GROUP_END = re.compile(r"[()]")


def tidy(text: str) -> str:
    """Rewrites a text once; the caller repeats it until nothing changes."""
    text = _without_dollars(" ".join(text.split()).translate(UNICODE))
    text = UNIT_TEXT.sub(_spelled_unit, text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return _with_roots(text)


def _without_dollars(text: str) -> str:
    """Drops the delimiters of maths; a lone dollar sign before a number is money."""
    if len(DOLLAR.findall(text)) == 1 and LONE_PRICE.match(text):
        return text.replace("$", r"\$", 1)
    return DOLLAR.sub("", text)


def _spelled_unit(match: re.Match[str]) -> str:
    r"""Spells out a short unit in \text{...}, before the braces go: \text{ m} is no variable."""
    return f" {UNIT_OF.get(match[1].lower(), match[1])} "


def _with_roots(text: str) -> str:
    r"""Rewrites sqrt(2) as \sqrt{2}."""
    while (root := PLAIN_ROOT.search(text)) is not None:
        end = _closing(text, root.end())
        if end is None:
            break
        text = text[: root.start()] + r"\sqrt{" + text[root.end() : end] + "}" + text[end + 1 :]
    return text


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for match in GROUP_END.finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return None
