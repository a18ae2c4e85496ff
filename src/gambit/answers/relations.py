r"""Inequalities with constant bounds as sets: x < 5 is (-\infty, 5)."""

import re

GREEK = r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|sigma|ell)(?![A-Za-z])"
LETTER = rf"(?:[A-Za-z]|{GREEK})(?: ?_(?:\{{[^{{}}]*\}}|[A-Za-z0-9]))?'{{0,3}}"
VARIABLE = re.compile(LETTER)
CONSTANT = re.compile(r"(?:[^A-Za-z\\=]|\\(?:frac|sqrt|cdot|times|binom|pi|infty)(?![A-Za-z])|[ei](?![A-Za-z]))++")
RELATION = re.compile(r" ?(<|>|\\(?:le|ge|ne)(?![A-Za-z])) ?")
TURNED = {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le", r"\ne": r"\ne"}
HALF_LINES = {
    "<": r"(-\infty, {0})",
    r"\le": r"(-\infty, {0}]",
    ">": r"({0}, \infty)",
    r"\ge": r"[{0}, \infty)",
    r"\ne": r"(-\infty, {0})\cup({0}, \infty)",
}


def solution_of(text: str) -> tuple[str, str] | None:
    r"""Variable and set: `x < 5` -> x, (-\infty, 5) and `-2 \le x < 7` -> x, [-2, 7); None for any other text."""
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
