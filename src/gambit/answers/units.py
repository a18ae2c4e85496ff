r"""Units of measure at the end of an answer: 12\text{ cm}^2 · 90^\circ · 28\% · \$5 · 30 mph · 3:20 p.m."""

import re

from gambit.answers.numbers import MULTIPLES, rational

_ALIASES = {
    "meter": "m meters metre metres",
    "centimeter": "cm centimeters centimetre centimetres",
    "millimeter": "mm millimeters millimetre millimetres",
    "kilometer": "km kilometers kilometre kilometres",
    "inch": "in inches",
    "foot": "ft feet",
    "yard": "yd yds yards",
    "mile": "mi miles",
    "acre": "acres",
    "hectare": "hectares ha",
    "gram": "g grams gm",
    "kilogram": "kg kilograms",
    "milligram": "mg milligrams",
    "pound": "lb lbs pounds",
    "ounce": "oz ounces",
    "ton": "tons",
    "second": "s sec secs seconds",
    "minute": "min mins minutes",
    "hour": "h hr hrs hours",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "yr yrs years",
    "liter": "l liters litre litres",
    "milliliter": "ml milliliters millilitre millilitres",
    "gallon": "gal gallons",
    "quart": "quarts",
    "pint": "pints",
    "dollar": "dollars usd",
    "cent": "cents ¢",
    "euro": "euros eur",
    "sterling": "gbp",
    "yen": "jpy",
    "rupee": "rupees inr rs",
    "degree": "degrees deg",
    "radian": "radians rad rads",
    "celsius": "",
    "fahrenheit": "",
    "kelvin": "k",
    "newton": "n newtons",
    "joule": "j joules",
    "watt": "w watts",
    "volt": "v volts",
    "hertz": "hz",
    "percent": "pct percentage",
    "mile/hour": "mph",
    "kilometer/hour": "kph kmph kmh",
    "am": "",
    "pm": "",
    "": "unit units",  # of unnamed length: as good as none
}
UNIT_OF = {alias: unit for unit, aliases in _ALIASES.items() for alias in (unit, *aliases.split()) if alias}
CURRENCIES = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"}
TEMPERATURES = ("celsius", "fahrenheit")
SHAPES = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}

PRICE = re.compile(r"(?P<sign>[-+]?) ?\\?(?P<currency>[$€£¥₹]) ?(?P<amount>.+)")
DEGREES = re.compile(r"(?P<head>.+)\^\\circ ?(?P<scale>[CF]?)")
TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
WORD = r"[A-Za-z¢]++\.?(?:\^\{?[23]\}?)?"
LAST_WORDS = re.compile(rf"(?<![\\A-Za-z_^{{]){WORD}(?:(?: ?/ ?| ){WORD}){{0,5}}$")
CLOCK = re.compile(r"(?P<head>[0-9]{1,2}(?::[0-9]{2})?) ?(?P<half>[aApP])\.? ?[mM]\.?")
NO_NOUN = {
    *MULTIPLES, "and", "are", "but", "choose", "cos", "cot", "csc", "exp", "for", "from", "less", "log", "max", "min",
    "mod", "more", "or", "over", "per", "plus", "pmod", "sec", "sin", "sqrt", "tan", "than", "the", "times",
}  # fmt: skip


def split_unit(text: str) -> tuple[str, str]:
    """An answer without its unit, and the unit's name: empty where there is none, or one that says nothing."""
    if (price := PRICE.fullmatch(text)) is not None:
        return price["sign"] + price["amount"], CURRENCIES[price["currency"]]
    if text.endswith("%") and len(text) > 1:
        return text[:-1].rstrip("\\ "), "percent"
    if (clock := CLOCK.fullmatch(text)) is not None:
        return clock["head"], f"{clock['half'].lower()}m"
    degrees = DEGREES.fullmatch(text)
    if degrees is not None and not TRIGONOMETRY.search(text):
        return degrees["head"], {"C": "celsius", "F": "fahrenheit"}.get(degrees["scale"], "degree")
    return _split_words(text)


def _split_words(text: str) -> tuple[str, str]:
    """Tries the longest run of last words first: miles per hour before hour."""
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
    r"""A single letter is a unit only in \text{...}, where it is spelled out by now: 5 m and 8 n^2 are products."""
    return re.match("[A-Za-z](?![A-Za-z])", phrase) is not None and not phrase.startswith("m/s")


def _is_noun(phrase: str) -> bool:
    """What is counted is not measured: 12 red apples are 12."""
    words = phrase.rstrip(".").split()
    return all(len(word) > 2 and word.isalpha() and word.lower() not in NO_NOUN for word in words)


def unit_named(phrase: str) -> str | None:
    """`sq. ft.` -> foot^2, `km/h` and `kilometers per hour` -> kilometer/hour; None: no unit."""
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
    """Whether two units may belong to equal answers: a unit that is left out is nobody's mistake, another one is."""
    if first == second or not first or not second:
        return True
    return {first, second} in ({"degree", scale} for scale in TEMPERATURES)
