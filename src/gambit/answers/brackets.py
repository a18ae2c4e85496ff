"""Brackets in LaTeX and plain text: what stands inside the outermost ones, and what outside."""

import re

BRACKETS = re.compile(r"\\[{}\\]|\\(?:begin|end)\{[a-zA-Z]*+\*?\}|\\[lr]angle(?![A-Za-z])|[(){}\[\]]")
OPENING = frozenset(("(", "[", "{", r"\{", r"\langle"))


def split_outside(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts between separators outside all brackets; the whole text where the brackets do not match."""
    ranges = outermost_ranges(text)
    if ranges is None:
        return [text]
    parts, start = [], 0
    for match in separator.finditer(text):
        while ranges and ranges[0][1] <= match.start():
            ranges.pop(0)
        if not ranges or match.start() < ranges[0][0]:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def inside_brackets(text: str) -> tuple[str, str, str] | None:
    """Opening bracket, what it encloses, closing bracket, where one pair encloses everything."""
    if outermost_ranges(text) != [(0, len(text))] or text.startswith(r"\begin"):
        return None
    first, *_, last = BRACKETS.finditer(text)
    return first[0], text[first.end() : last.start()].strip(), last[0]


def outermost_ranges(text: str) -> list[tuple[int, int]] | None:
    """From where to where the outermost brackets reach. Any kind closes any other, as in (0, 1]. None: no match."""
    ranges: list[tuple[int, int]] = []
    depth = start = 0
    for match in BRACKETS.finditer(text):
        if match[0] == r"\\":
            continue
        is_opening = match[0] in OPENING or match[0].startswith(r"\begin")
        start = match.start() if is_opening and depth == 0 else start
        depth += 1 if is_opening else -1
        if depth < 0:
            return None
        if depth == 0:
            ranges.append((start, match.end()))
    return ranges if depth == 0 else None
