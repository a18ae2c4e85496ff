"""One LaTeX notation for each thing: without spacing, sizes and text commands, and for plain and Unicode maths too."""

import re

from gambit.answers.units import UNIT_OF

UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "⁄": "/", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
        "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "²": "^2", "³": "^3", "θ": r"\theta ",
        "½": " 1/2 ", "⅓": " 1/3 ", "⅔": " 2/3 ", "¼": " 1/4 ", "¾": " 3/4 ", "⅕": " 1/5 ", "⅖": " 2/5 ",
        "⅗": " 3/5 ", "⅘": " 4/5 ", "⅙": " 1/6 ", "⅚": " 5/6 ", "⅛": " 1/8 ", "⅜": " 3/8 ", "⅝": " 5/8 ", "⅞": " 7/8 ",
    }
)  # fmt: skip
END = r"(?![A-Za-z])"
TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname)"
UNIT_TEXT = re.compile(rf"(?<=.){TEXT}\{{[\s~]*([A-Za-z]{{1,2}})\.?[\s~]*\}}")
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
        (rf"\\varnothing{END}", r"\\emptyset "),
        (r"(?:\{\})?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])", r"^\\circ "),
        (rf"\\[dtc]frac{END}", r"\\frac"),
        (rf"\\dbinom{END}|\\tbinom{END}", r"\\binom"),
        (rf"{TEXT}\{{([^{{}}]*)\}}", r" \1 "),
        (rf"(?<![\\A-Za-z])(?:, ?)?(and|or){END}", r"\\l\1 "),
        (rf"(?<![\\A-Za-z])(pi|infty){END}", r"\\\1 "),
        (rf"(?<![\\A-Za-z])({FUNCTIONS}){END}(?=\s*[A-Za-z0-9({{\\])", r"\\\1 "),
        (r"(?<![A-Za-z0-9\\])C\( ?([0-9]+) ?, ?([0-9]+) ?\)", r"\\binom{\1}{\2}"),
        (r"\*\*", "^"),
        (r"\^ ?(-?[0-9]+\.[0-9]+|-[0-9]+|[0-9]{2,})", r"^{\1}"),
        (r"([_^])\{([0-9A-Za-z])\}", r"\1\2"),
        (r"(?<=\S)\*(?=\S)|(?<=\S) \* (?=\S)", r"\\cdot "),
        (r"\\(frac|sqrt|binom) +(?=[0-9{\\])", r"\\\1"),
        (r"\\(frac|sqrt)([0-9])", r"\\\1{\2}"),
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
PRICE = re.compile(r"[-+]? ?\$ ?[-+]?[0-9.]")
PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])\\?(?:sqrt|√) ?\(")
GROUP_END = re.compile(r"[()]")


def tidy(text: str) -> str:
    """One pass; the caller repeats it until nothing changes."""
    text = _without_dollars(" ".join(text.split()).translate(UNICODE))
    text = UNIT_TEXT.sub(_spelled_unit, text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return _with_roots(text)


def _without_dollars(text: str) -> str:
    """Without the delimiters of maths; a lone dollar sign before a number is money."""
    if len(DOLLAR.findall(text)) == 1 and PRICE.match(text):
        return text.replace("$", r"\$", 1)
    return DOLLAR.sub("", text)


def _spelled_unit(match: re.Match[str]) -> str:
    r"""A short unit in \text{...} by its name, as what the braces say is lost with them: \text{ m} is no variable."""
    return f" {UNIT_OF.get(match[1].lower(), match[1])} "


def _with_roots(text: str) -> str:
    r"""sqrt(2) as \sqrt{2}."""
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
