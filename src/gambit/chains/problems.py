"""Problems by name, such as `chains:16,shuffled,idle=2` or `moves:8`: sizes, splits, rows."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gambit.chains import amounts, moves
from gambit.chains.words import SPLITS, Draws, words_of
from gambit.errors import UserError

FAMILIES = ("chains", "moves")
SYNTAX = ("chains:STEPS[,shuffled][,idle=N]", "moves:STEPS")
STEPS, IDLE = (2, 64), (0, 16)  # fewest and most
PATIENCE = 2000  # drawn in a row without a new problem before a size counts as exhausted

HOW_TO_WRITE = (
    "Solve this step by step. Write one step per line, and end each line with the value found in that step. "
    "Put your final answer within \\boxed{}."
)


@dataclass(frozen=True, slots=True)
class Spec:
    """A family of problems and their size."""

    family: str
    steps: int
    shuffled: bool = False
    idle: int = 0
    split: str | None = None  # where the name says which

    def __str__(self) -> str:
        """Returns the name without the split."""
        idle = f",idle={self.idle}" if self.idle else ""
        return f"{self.family}:{self.steps}{',shuffled' if self.shuffled else ''}{idle}"

    @property
    def slug(self) -> str:
        return re.sub("[^a-z0-9]+", "-", str(self))


def parse_spec(text: str) -> Spec:
    """Reads a name as in `SYNTAX`, to which `,split=NAME` may be added, or raises UserError with one sentence."""
    family, _, rest = text.partition(":")
    if family not in FAMILIES:
        raise UserError(f"{text!r} names no family of problems: write {' or '.join(SYNTAX)}")
    size, *rest_options = rest.split(",")
    steps = _size(text, "STEPS", size, STEPS)
    options = [option.partition("=")[::2] for option in rest_options]
    known = {"split", "shuffled", "idle"} if family == "chains" else {"split"}
    for (name, value), option in zip(options, rest_options, strict=True):
        if name not in known or (name == "shuffled" and value):
            raise UserError(f"{text!r}: {family} take no option {option!r}, but {', '.join(sorted(known))}")
    found = dict(options)
    if len(found) < len(options):
        raise UserError(f"{text!r} gives an option twice")
    if found.get("split", "test") not in SPLITS:
        raise UserError(f"{text!r}: there is no split {found['split']!r}, but {', '.join(SPLITS)}")
    idle = _size(text, "idle", found.get("idle", "0"), IDLE)
    return Spec(family, steps, "shuffled" in found, idle, found.get("split"))


def _size(text: str, what: str, digits: str, limits: tuple[int, int]) -> int:
    if not re.fullmatch("[0-9]{1,6}", digits) or not limits[0] <= int(digits) <= limits[1]:
        raise UserError(f"{text!r}: {what} is a whole number from {limits[0]} to {limits[1]}, not {digits!r}")
    return int(digits)


def split_of(key: str) -> str:
    """Returns the split that a problem belongs to by the hash of its structure and numbers."""
    return SPLITS[int(key[:8], 16) % len(SPLITS)]


def stream(spec: Spec, split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields different problems of one split without end, or raises UserError once there seem to be no more."""
    draws, words = Draws(f"{spec} {split} {seed}"), words_of(split)
    seen: set[str] = set()
    failures = 0
    while failures < PATIENCE:
        failures += 1
        if spec.family == "moves":
            key, row = moves.draw(draws, words, spec.steps)
        else:
            key, row = amounts.draw(draws, words, spec.steps, spec.shuffled, spec.idle)
        if key not in seen and split_of(key) == split:
            head = {"id": f"{spec.slug}-{split}-{seed}-{len(seen):05d}", "family": str(spec), "split": split}
            seen.add(key)
            failures = 0
            yield {**head, "num_steps": spec.steps, **row}
    raise UserError(f"{spec} has no more than about {len(seen)} different problems in the split {split!r}")


def generate(text: str, split: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns the first problems of a split, the same on every Python."""
    return list(islice(stream(parse_spec(text), split, seed), count))
