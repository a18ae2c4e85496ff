"""Thousands of hostile answers, compared in pairs: nothing raises, nothing hangs, order does not matter."""

import json
import random
import threading

import pytest

from gambit.answers import AnswerKind, Grader, canonical, extractor_for
from support import GOLDEN as KEPT

NUM_ANSWERS = 2100
SEED = 20250607
GOLDEN = [json.loads(line) for line in (KEPT / "answers.jsonl").read_text().splitlines()]
PIECES = [
    *r"0123456789xyiezABC+-*/^_=<>()[]{}|!%$&,.;:'\"~ ",
    *"−½°π∞√²\x00\ud800\u202e🙂",
    r"\frac", r"\sqrt", r"\pi", r"\infty", r"\pm", r"\cup", r"\in", r"\le", r"\circ", r"\text{", r"\binom", r"\log",
    r"\sin", r"\int", r"\sum", r"\lim", r"\left(", r"\right]", r"\\", r"\{", r"\}", r"\begin{pmatrix}",
    r"\end{pmatrix}", r"\frac{1}{", "9^{9^", "10^{10^{10}}", "99999999999", r"\binom{10^9}{10^8}", "10^8!", " cm",
    " and ", " or ", "x=", "_5", "base 7", "million", "sqrt(", "**", "{,}", r"\,", r"\!", r"\$", "1,234", "0.333333",
]  # fmt: skip


def mutated(answer: str, rng: random.Random) -> str:
    """One piece put in, taken out or doubled."""
    place = rng.randrange(len(answer) + 1)
    change = rng.randrange(3)
    if change == 0:
        return answer[:place] + rng.choice(PIECES) + answer[place:]
    return answer[:place] + answer[place + 1 :] if change == 1 else answer[:place] + answer[place // 2 :]


def hostile(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return mutated(str(rng.choice(GOLDEN)["first"]), rng)
    if kind < 0.9:
        return "".join(rng.choices(PIECES, k=rng.randrange(1, 15)))
    return rng.choice(PIECES) * rng.randrange(2, 400)


@pytest.mark.contract
def test_hostile_answers_in_pairs() -> None:
    rng = random.Random(SEED)
    answers = [hostile(rng) for _ in range(NUM_ANSWERS)]
    failures: list[object] = []
    check = threading.Thread(target=lambda: failures.extend(compare_all(answers)), daemon=True)
    check.start()
    check.join(900)
    assert not check.is_alive(), "a comparison hangs"
    assert failures == []


def compare_all(answers: list[str]) -> list[object]:
    failures: list[object] = []
    with Grader(comparison_seconds=0.15) as grader:
        for first, second in zip(answers, [*answers[1:], answers[0]], strict=True):
            try:
                failures += problems_of(grader, first, second)
            except Exception as error:
                failures.append((first, second, error))
    return failures


def problems_of(grader: Grader, first: str, second: str) -> list[object]:
    is_equal = grader.equivalent(first, second)
    found = {
        "not symmetric": grader.equivalent(second, first) != is_equal,
        "not reflexive": grader.equivalent(first, first) != bool(canonical(first)),
        "no normal form": canonical(canonical(first)) != canonical(first),
        "no answer": any(extractor_for(kind)(first) == "" for kind in AnswerKind),
    }
    return [(first, second, problem) for problem, is_there in found.items() if is_there]
