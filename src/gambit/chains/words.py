"""The words of each split, and random choices that are the same on every Python."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TypeVar

import yaml

T = TypeVar("T")
SPLITS = ("train", "dev", "judge", "test")


@dataclass(frozen=True, slots=True)
class Words:
    """All that the problems of one split are written with."""

    names: Sequence[str]
    towns: Sequence[Sequence[str]]  # those of one beginning: a problem takes one of each
    things: Sequence[str]
    containers: Sequence[str]
    objects: Sequence[str]
    places: Sequence[str]
    wordings: Mapping[str, Sequence[str]]  # by relation


@cache
def words_of(split: str) -> Words:
    raw = yaml.safe_load(resources.files("gambit.chains").joinpath("words.yaml").read_text("utf-8"))
    names = raw["names"].split()[SPLITS.index(split) :: len(SPLITS)]
    own = raw[split]
    towns = [[town + ending for ending in own["endings"].split()] for town in raw["towns"].split()]
    nouns = {kind: own[kind].split() for kind in ("things", "containers", "objects", "places")}
    return Words(names, towns, **nouns, wordings=own["wordings"])


class Draws:
    """Random choices made from `random()` alone, the one method that all Python versions promise to keep."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed).random

    def below(self, end: int) -> int:
        return int(self.random() * end)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def one(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Draws without putting back; all of them are a shuffle."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]


def digest(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()
