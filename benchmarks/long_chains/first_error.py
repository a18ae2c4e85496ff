"""Finds the first wrong step in a model's solution of a long chain, by comparing what it states with the true values.

A solution is read as claims: "Ann has 17 marbles", "Ann: 12 + 5 = 17", a line of names in a queue. A wrong claim that
is put right later on does not count, and where it is unclear what a number belongs to, nothing is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NUMBER = r"-?\d+(?:\.\d+)?"
OPERATOR = re.compile(r"\s*[-+*/^(]\s*[\dA-Za-z({]")
# A number before one of these says how two amounts compare, not how much there is.
COMPARISON = re.compile(
    r"\W*(?:\w+ ){0,1}(?:more|fewer|less|times|additional|higher|lower|further|extra|greater|of these|steps?)\b"
)
JOINED = re.compile(
    r"\b(?:than|as|times|twice|half|double|triple|sum|difference|minus|plus|from|between|with|to|if)\W*(?:\w+\W+){0,2}$"
    r"|[-+*/]\W*$",
    re.IGNORECASE,
)
# Sentences of the problems in which the amount that is derived is named last.
NAMED_LAST = re.compile(r"\s*(?:compared (?:with|to)|if|since|because|as|given|when)\b|.*difference", re.IGNORECASE)
VERBS = r"(?:has|have|had|owns?|keeps?|holds?|is|are|gets?|:|→|->)"
FILLERS = r"(?:also|exactly|now|then|still|only|therefore|thus|a total of|in total|equal to|equals?|have|has|=)"


@dataclass(frozen=True, slots=True)
class Finding:
    """The first wrong step of a solution, or none."""

    offset: int | None  # of the wrong value, in characters
    certain: bool  # False: unclear, or what was found contradicts a right final answer
    name: str = ""  # the entity, or for moves the number of the move
    stated: str = ""
    expected: str = ""
    num_right: int = 0  # steps stated rightly before it


@dataclass(frozen=True, slots=True)
class Claim:
    """A value that the solution gives an entity."""

    offset: int
    name: str
    stated: str
    expected: str

    @property
    def right(self) -> bool:
        return self.stated == self.expected


def first_wrong_step(problem: Mapping[str, Any], text: str) -> Finding:
    """Returns the first wrong step of a whole solution or of its beginning; `problem` is a row of `problems.py`."""
    plain = normalised(text)
    claims = list(_chain_claims(problem, plain) if "idle" in problem else _state_claims(problem, plain))
    put_right = {claim.name: claim.offset for claim in claims if claim.right}
    wrong = next((c for c in claims if not c.right and put_right.get(c.name, -1) < c.offset), None)
    boxed = final_answer(plain)
    answered_right = boxed is not None and _same(boxed[1], problem["answer"])
    end = len(plain) if wrong is None else wrong.offset
    num_right = len({claim.name for claim in claims if claim.right and claim.offset < end})
    if wrong is not None:
        return Finding(wrong.offset, not answered_right, wrong.name, wrong.stated, wrong.expected, num_right)
    if boxed is None or answered_right:
        return Finding(None, bool(claims), num_right=num_right)
    last = problem["steps"][-1]["name"] if "idle" in problem else str(problem["num_steps"])
    if last in put_right:  # everything is right, but something else stands in the box
        return Finding(boxed[0], True, "answer", boxed[1], problem["answer"], num_right)
    return Finding(None, False, num_right=num_right)


def right_steps(problem: Mapping[str, Any], text: str, end: int) -> list[int]:
    """Returns where each step is first stated rightly, up to a character of the solution; chains alone."""
    claims = sorted(_chain_claims(problem, normalised(text)), key=lambda claim: claim.offset)
    found: dict[str, int] = {}
    for claim in claims:
        if claim.right and claim.offset < end:
            found.setdefault(claim.name, claim.offset)
    return list(found.values())


def final_answer(plain: str) -> tuple[int, str] | None:
    """Returns where the last box is and what it holds."""
    found = list(re.finditer(r"\\boxed\s*\{([^{}]*)", plain))
    return (found[-1].start(1), found[-1][1].strip()) if found else None


def _same(stated: str, answer: str) -> bool:
    words = re.findall(r"[A-Za-z]+|\d+(?:\.\d+)?", stated)
    return answer.lower() in (word.lower().removesuffix(".0") for word in words)


# -- text ------------------------------------------------------------------------------------------------------


def _kept(match: re.Match[str]) -> str:
    """Blanks what is around the first group."""
    start, end = match.start(1) - match.start(), match.end() - match.end(1)
    return " " * start + match[1] + " " * end


def _fraction(match: re.Match[str]) -> str:
    return f"{match[1]}/{match[2]}".ljust(len(match[0]))


def _padded(text: str) -> Callable[[re.Match[str]], str]:
    return lambda match: text.ljust(len(match[0]))


_REWRITTEN: Sequence[tuple[str, Callable[[re.Match[str]], str]]] = (
    (r"\\(?:text|mathrm|textbf|mathbf|textit|mathit|operatorname)\s*\{([^{}]*)\}", _kept),
    (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", _fraction),
    (r"\\times|\\cdot|×|·|(?<=\d )x(?= \d)", _padded("*")),
    (r"\\div|÷", _padded("/")),
    (r"[−–]", _padded("-")),
    (r"\*\*|__|`|\\[()\[\],!; ]|\$|\\(?:quad|left|right)\b|\\\\|&|(?m:^\s*#+)", _padded("")),
    (r"\b(\d{1,3}),(\d{3})\b", lambda match: f"{match[1]}{match[2]} "),
    (
        r"\b(?:which|that|this) (?:is equal to|equals|is|gives|makes)\b|\b(?:is equal to|equals|gives us|gives)\b",
        _padded("="),
    ),
)


def normalised(text: str) -> str:
    """Writes LaTeX and markup as plain arithmetic of the same length, so that offsets stay."""
    for pattern, rewrite in _REWRITTEN:
        text = re.sub(pattern, rewrite, text)
    return text


def _segments(plain: str) -> Iterator[tuple[int, str]]:
    """Yields sentences with their offsets; the number of a list item is left out."""
    for line in re.finditer(r"[^\n]+", plain):
        head = re.match(r"\s*(?:[-*>•]\s+)*(?:(?:step\s*)?\d+\s*[.):]\s+)?(?:[-*>•]\s+)*", line[0], re.IGNORECASE)
        start = head.end() if head else 0
        for end in re.finditer(r"[.!?;](?=\s+[A-Z(\\])|$", line[0]):
            if end.end() > start:
                yield line.start() + start, line[0][start : end.end()]
                start = end.end()


def _value(expression: str) -> str | None:
    """Works out an arithmetic expression of plain numbers."""
    if not re.fullmatch(r"[\d.+\-*/() ]{1,80}", expression) or "**" in expression or "//" in expression:
        return None
    try:
        value = eval(expression.strip(), {"__builtins__": {}})
    except (SyntaxError, ArithmeticError, TypeError, ValueError):
        return None
    return f"{value:g}" if abs(value) < 1e6 else str(value)


# -- amounts ---------------------------------------------------------------------------------------------------


class _Chain:
    """The entities of a problem, how a solution may call them, and what each is derived from."""

    def __init__(self, problem: Mapping[str, Any], plain: str) -> None:
        steps = [*problem["steps"], *problem["idle"]]
        self.values = {step["name"]: str(step["value"]) for step in steps}
        self.sides = {step["name"]: set(re.findall(r"[A-Za-z]+", step["expression"])) for step in steps}
        self.called = {name.lower(): name for name in self.values}
        name = "|".join(self.values)
        for match in re.finditer(
            rf"\b(?:let|denote)\b[^.\n]*?\b(?P<x>[A-Za-z])\b (?:be|represent|denote)\b[^.\n]*?\b(?P<n>{name})\b"
            rf"|\b(?P<m>{name})\b[^.\n]{{0,40}}? (?:as|by|be) +(?P<y>[A-Za-z])\b(?!\w| \w+ as)"
            rf"|\b(?P<o>{name})(?:'s \w+)? +\((?P<z>[A-Za-z])\)",
            plain,
        ):
            letter, owner = match["x"] or match["y"] or match["z"], match["n"] or match["m"] or match["o"]
            if letter not in ("a", "A", "I"):
                self.called.setdefault(letter, owner)
        words = sorted(self.called, key=len, reverse=True)
        whole = "|".join(w if len(w) == 1 else "".join(f"[{c.upper()}{c}]" for c in w) for w in words)
        self.mention = re.compile(rf"(?<![A-Za-z\\])(?:{whole})(?![a-z])")

    def named(self, text: str) -> list[str]:
        found = (match[0] for match in self.mention.finditer(text))
        return list(dict.fromkeys(self.called.get(word) or self.called[word.lower()] for word in found))

    def subject(self, segment: str, who: Sequence[str]) -> str:
        """Returns whose amount a segment derives: by the structure of the problem, else by the order of the names."""
        left = segment.partition("=")[0] if "=" in segment else ""
        if len(alone := self.named(left)) == 1:
            return alone[0]
        derived = [name for name in who if self.sides[name] and {name} | self.sides[name] == set(who)]
        if not derived and len(who) == 2:
            derived = [name for name, sides in self.sides.items() if sides == set(who)]
        if len(derived) == 1:
            return derived[0]
        return who[-1] if NAMED_LAST.match(segment) else who[0]


def _chain_claims(problem: Mapping[str, Any], plain: str) -> Iterator[Claim]:
    chain = _Chain(problem, plain)
    pending = ""
    for start, segment in _segments(plain):
        who = chain.named(segment)
        yield from _stated_directly(chain, start, segment)
        for offset, part, value in _results(chain, start, segment):
            named = chain.named(part) or who
            owner = _owner(chain, part, named, pending, value)
            if owner:
                yield Claim(offset, owner, value, chain.values[owner])
        if who:
            pending = chain.subject(segment, who)


def _owner(chain: _Chain, part: str, named: Sequence[str], pending: str, value: str) -> str:
    """Returns whom a result belongs to: whoever truly has that much, if mentioned, else the one it is derived for."""
    holders = [name for name, amount in chain.values.items() if amount == value]
    if not named:
        return holders[0] if holders else pending
    subject = chain.subject(part, named)
    if chain.values[subject] == value:
        return subject
    return next((name for name in holders if name in named or chain.sides[name] & set(named)), subject)


def _stated_directly(chain: _Chain, start: int, segment: str) -> Iterator[Claim]:
    """Yields claims such as `Ann has 17 marbles`, not `Ann has 5 more` nor `Ann and Bob have 17`."""
    for match in chain.mention.finditer(segment):
        rest = re.match(rf"(?:['’]s)?(?: +[a-z]+){{0,4}}? *{VERBS} *(?:{FILLERS} +)*({NUMBER})", segment[match.end() :])
        before = segment[: match.start()]
        if rest is None or JOINED.search(before):
            continue
        if re.search(r"(?:\band|,) +(?:the )?$", before) and not re.match(
            r"(?:['’]s)?[^.]*?\b(?:has|owns|keeps|holds)\b", rest[0]
        ):
            continue
        after = segment[match.end() + rest.end() :]
        if COMPARISON.match(after) or OPERATOR.match(after) or re.match(r"[\w.]*\d|[^.!?,]*=", after):
            continue
        name = chain.called.get(match[0]) or chain.called[match[0].lower()]
        yield Claim(start + match.end() + rest.start(1), name, f"{float(rest[1]):g}", chain.values[name])


def _results(chain: _Chain, start: int, segment: str) -> Iterator[tuple[int, str, str]]:
    """Yields for each chain of equalities its offset, the text it stands in and its last value."""
    begin = 0
    for end in [*(m.start() for m in re.finditer(r",|\band\b|;", segment)), len(segment)]:
        part, after = segment[begin:end], segment[end:]
        if end < len(segment) and ("=" not in part or not chain.named(after) or "=" not in after):
            continue
        begin = end
        left, equals, right = part.rpartition("=")
        digits = re.match(r"[\s\d.+\-*/()]*[\d)]", right)
        if not equals or digits is None or COMPARISON.match(right[digits.end() :]):
            continue
        if re.match(r"\s*[-+*/]|[A-Za-z]", right[digits.end() :]):
            continue
        value = _value(digits[0].strip())
        if value is not None:
            spaces = len(digits[0]) - len(digits[0].lstrip())
            yield start + end - len(part) + len(left) + 1 + spaces, part, value


# -- moves -----------------------------------------------------------------------------------------------------

ORDINAL = r"first|second|third|fourth|fifth|sixth|seventh"
BETWEEN = re.compile(
    rf"(?!\.)(?:[\s\d,;:.>→|/\[\](){{}}*'\"\\=_-]|(?:{ORDINAL}|and|then|position|place|front|back|last|is|at|the|in|st|nd|rd|th|"
    r"rightarrow|to|line|queue|row)\b)*",
    re.IGNORECASE,
)


def _state_claims(problem: Mapping[str, Any], plain: str) -> Iterator[Claim]:
    """Yields one claim for each arrangement that is written out; its name is the number of moves made."""
    states = [list(problem["start"].values()), *(list(step["value"].values()) for step in problem["steps"])]
    places = list(problem["start"])
    written = _listed(states[0], plain) if problem["layout"] == "queue" else _placed(states[0], places, plain)
    done = 0
    for offset, state in written:
        reached = next((number for number in range(done, len(states)) if states[number] == state), None)
        expected = states[min(done + 1, len(states) - 1)] if reached is None else state
        done = done if reached is None else reached
        name = str(done + 1 if reached is None else reached)
        yield Claim(offset, name, ", ".join(state), ", ".join(expected))


def _listed(names: Sequence[str], plain: str) -> Iterator[tuple[int, list[str]]]:
    """Yields every row of all names with hardly anything between them."""
    found = list(re.finditer(rf"\b(?:{'|'.join(names)})\b", plain))
    row: list[re.Match[str]] = []
    for match in found:
        if row and not BETWEEN.fullmatch(plain, row[-1].end(), match.start()):
            row = []
        row.append(match)
        if len(row) == len(names):
            state = [item[0] for item in row]
            if sorted(state) == sorted(names):
                yield row[0].start(), state
                row = []
            else:
                row.pop(0)


def _placed(things: Sequence[str], places: Sequence[str], plain: str) -> Iterator[tuple[int, list[str]]]:
    """Yields every run of `thing … place` (or the other way round) that fills all places."""
    pair = re.compile(
        rf"\b(?P<t>{'|'.join(things)})\b(?:[\s:,>→|=\"'()-]|is|in|the|now|at|to|rightarrow|\\)*\b(?P<p>{'|'.join(places)})\b"
        rf"|\b(?P<q>{'|'.join(places)})\b(?:[\s:,>→|=\"'()-]|has|holds|contains|is|the|now|rightarrow|\\)*\b(?P<u>{'|'.join(things)})\b",
        re.IGNORECASE,
    )
    run: list[tuple[int, str, str]] = []
    end = 0
    for match in pair.finditer(plain):
        thing, place = (match["t"] or match["u"]).lower(), (match["p"] or match["q"]).lower()
        if not re.fullmatch(r"[^A-Za-z]*(?:(?:and|the)\b[^A-Za-z]*)*", plain[end : match.start()]):
            run = []
        end = match.end()
        run.append((match.start(), thing, place))
        last = run[-len(places) :]
        if len({place for _, _, place in last}) == len({thing for _, thing, _ in last}) == len(places):
            at = {place: thing for _, thing, place in last}
            yield last[0][0], [at[place] for place in places]
            run = []
