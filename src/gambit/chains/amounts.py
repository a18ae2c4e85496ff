"""Chains of amounts: each sentence derives one from one or two earlier ones, and the last hangs on all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gambit.chains.words import Draws, Words, digest

LARGEST = 999
LARGE = 250  # above it, amounts rather shrink
MOST_OPEN = 3  # amounts that no sentence has used yet
PATIENCE = 2000
EXPRESSIONS = {
    "given": "{n}", "more": "{0} + {n}", "fewer": "{0} - {n}", "twice": "2 * {0}", "thrice": "3 * {0}",
    "half": "{0} / 2", "together": "{0} + {1}", "difference": "{0} - {1}",
}  # fmt: skip

FACTORS: dict[str, tuple[Fraction | int, ...]] = {
    "twice": (2,), "thrice": (3,), "half": (Fraction(1, 2),), "difference": (1, -1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Amount:
    """One sentence: how an amount follows from earlier ones."""

    relation: str
    sides: tuple[int, ...]  # positions of the earlier amounts
    number: int  # where the sentence states one, else 0
    value: int

    def expression(self, names: Sequence[str]) -> str:
        return EXPRESSIONS[self.relation].format(*(names[side] for side in self.sides), n=self.number)


def _given(draws: Draws) -> Amount:
    number = draws.between(6, 99)
    return Amount("given", (), number, number)


def _from_one(draws: Draws, amounts: Sequence[Amount], side: int) -> Amount:
    """Derives an amount from one. Only stated numbers are halved: after a slip no fraction gives it away."""
    value = amounts[side].value
    low = min(3, value)
    numbers = {"more": draws.between(3, 99), "fewer": draws.between(low, max(low, min(99, value // 2)))}
    found = {
        "more": value + numbers["more"],
        "fewer": value - numbers["fewer"],
        "twice": 2 * value,
        "thrice": 3 * value,
        "half": value // 2 if amounts[side].relation == "given" and value % 2 == 0 else 0,
    }
    options = [relation for relation, result in found.items() if 1 <= result <= LARGEST]
    if value > LARGE and "fewer" in options:
        options += ["fewer"] * 3
    relation = draws.one(options)
    return Amount(relation, (side,), numbers.get(relation, 0), found[relation])


def _from_two(draws: Draws, amounts: Sequence[Amount], sides: Sequence[int]) -> Amount | None:
    """Adds two amounts or subtracts the clearly smaller one, so that a slip rarely makes the difference negative."""
    small, large = sorted(sides, key=lambda side: amounts[side].value)
    total = amounts[small].value + amounts[large].value
    options = ["together"] if total <= LARGEST else []
    if 2 * amounts[large].value >= 3 * amounts[small].value:
        options += ["difference"] * (3 if amounts[large].value > LARGE else 1)
    if not options:
        return None
    if draws.one(options) == "together":
        return Amount("together", tuple(draws.some(sides, 2)), 0, total)
    return Amount("difference", (large, small), 0, amounts[large].value - amounts[small].value)


def _next(draws: Draws, amounts: Sequence[Amount], unused: Sequence[int], left: int) -> Amount | None:
    """Derives the next amount such that the last one, `left` sentences on, hangs on every other."""
    used = [side for side in range(len(amounts)) if side not in unused]
    if len(unused) > left or (len(unused) > 1 and draws.random() < 0.4):
        return _from_two(draws, amounts, draws.some(unused, 2))
    if used and len(unused) < min(left, MOST_OPEN) and draws.random() < 0.2:
        return _from_one(draws, amounts, draws.one(used))
    side = draws.one(unused)
    if used and draws.random() < 0.3:
        return _from_two(draws, amounts, [side, draws.one(used)])
    return _from_one(draws, amounts, side)


def _chain(draws: Draws, steps: int) -> list[Amount] | None:
    """Draws a chain; None where it cannot be finished, or where something cancels out."""
    amounts: list[Amount] = []
    unused: list[int] = []
    givens = 1 + (steps > 3 and draws.below(2))
    for _ in range(PATIENCE):
        left = steps - len(amounts)
        amount = _given(draws) if len(amounts) < givens else _next(draws, amounts, unused, left)
        if amount is None or amount.value in {other.value for other in amounts}:
            continue
        unused = [side for side in unused if side not in amount.sides] + [len(amounts)]
        amounts.append(amount)
        if left == 1:
            return amounts if all(_effects(amounts)) else None
    return None


def _effects(amounts: Sequence[Amount]) -> list[Fraction]:
    """Returns by how much the last amount changes where another is off by one."""
    effects = [Fraction(0) for _ in amounts]
    effects[-1] = Fraction(1)
    for amount, effect in zip(reversed(amounts), reversed(effects), strict=True):
        for side, factor in zip(amount.sides, FACTORS.get(amount.relation, (1, 1)), strict=False):
            effects[side] += effect * factor
    return effects


def _key(amounts: Sequence[Amount]) -> str:
    """Hashes structure and numbers; names and the order of commuting sides do not matter."""
    keys: list[str] = []
    for amount in amounts:
        sides = [keys[side] for side in amount.sides]
        keys.append(digest(amount.relation, amount.number, *(sorted(sides) if len(sides) > 1 else sides)))
    return keys[-1]


def _with_idle(draws: Draws, amounts: Sequence[Amount], count: int) -> list[Amount]:
    """Appends amounts that the question does not need, derived like the others."""
    found = list(amounts)
    for _ in range(count):
        two = _from_two(draws, found, draws.some(range(len(found)), 2)) if draws.random() < 0.3 else None
        one = _given(draws) if draws.random() < 0.2 else _from_one(draws, found, draws.below(len(found)))
        found.append(two or one)
    return found


def _order(draws: Draws, amounts: Sequence[Amount], steps: int) -> list[int]:
    """Returns the sentences in order, idle ones anywhere behind what they are derived from."""
    order = list(range(steps))
    for index in range(steps, len(amounts)):
        first = max((order.index(side) + 1 for side in amounts[index].sides), default=0)
        order.insert(draws.between(first, len(order)), index)
    return order


def _owners(draws: Draws, words: Words, count: int) -> tuple[list[str], list[str]]:
    """Draws people, or places of one kind: the one word that marks each, and how a sentence calls it."""
    if draws.below(2):
        names = draws.some(words.names, count)
        return names, names
    towns = [draws.one(endings) for endings in draws.some(words.towns, count)]
    container = draws.one(words.containers)
    return towns, [f"the {town} {container}" for town in towns]


def draw(draws: Draws, words: Words, steps: int, shuffled: bool, idle: int) -> tuple[str, dict[str, Any]]:
    """Draws a problem, with the hash of its structure and numbers."""
    while (chain := _chain(draws, steps)) is None:
        pass
    amounts = _with_idle(draws, chain, idle)
    names, owners = _owners(draws, words, len(amounts))
    thing = draws.one(words.things)

    def sentence(relation: str, who: Sequence[int], number: int) -> str:
        letters = dict(zip("abc", (owners[index] for index in who), strict=False))
        text = draws.one(words.wordings[relation]).format(things=thing, k=number, **letters)
        return text[0].upper() + text[1:]

    said = [sentence(amount.relation, (i, *amount.sides), amount.number) for i, amount in enumerate(amounts)]
    asked = sentence("ask", (steps - 1,), 0)
    order = draws.some(range(len(amounts)), len(amounts)) if shuffled else _order(draws, amounts, steps)
    question = " ".join([*(said[index] for index in order), asked])
    rows = [
        {"name": name, "expression": amount.expression(names), "value": amount.value}
        for name, amount in zip(names, amounts, strict=True)
    ]
    row = {"question": question, "answer": str(chain[-1].value), "steps": rows[:steps], "idle": rows[steps:]}
    return _key(chain), row
