"""Reads the answers of traces, and works out how votes of some size would come out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
NUMBER = re.compile(r"\d+")
NUM_DRAWS = 200


def answer_in(text: str, family: str) -> str | None:
    """Returns the answer in the last box, a number for chains and lower-case words else; None without one."""
    boxes = BOXED.findall(text)
    if not boxes:
        return None
    inside = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", boxes[-1]).replace(",", "")
    if family.startswith("chains"):
        numbers = NUMBER.findall(inside)
        return str(int(numbers[-1])) if numbers else None
    words = re.sub(r"[^a-z ]", "", inside.lower()).strip()
    return words or None  # "the canyon" is not "canyon", as for searches


def expected_votes(answers: Sequence[str | None], gold: str, sizes: Sequence[int]) -> list[float]:
    """Returns the chance that a vote of each size is right; a tie is shared, a trace without an answer abstains."""
    gold = gold.lower()
    rng = np.random.default_rng(0)
    found = []
    for size in sizes:
        if size == 1:
            found.append(sum(each == gold for each in answers) / len(answers))
            continue
        draws = [
            vote_share(Counter(answers[i] for i in rng.permutation(len(answers))[:size]), gold)
            for _ in range(NUM_DRAWS)
        ]
        found.append(float(np.mean(draws)))
    return found


def vote_share(votes: Counter[str | None], gold: str) -> float:
    """Returns the chance that a majority vote is right, a tie being shared."""
    del votes[None]
    if not votes:
        return 0.0
    most = max(votes.values())
    best = [answer for answer, count in votes.items() if count == most]
    return float(gold in best) / len(best)
