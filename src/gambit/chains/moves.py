"""Arrangements that every sentence changes: people in a queue, or things in places. The answer is one word."""

from collections.abc import Sequence
from typing import Any, TypeVar

from gambit.chains.words import Draws, Words, digest

T = TypeVar("T")
Move = tuple[str, tuple[int, ...]]  # relation, and the entities or places that it names
RELATIONS = {
    "queue": ("front", "back", "trade", "behind", "before"),
    "slots": ("swap", "swap", "exchange", "contents", "rotate"),
}
ENTITIES = (6, 7)  # people in a queue, or places: guessing pays at most one time in six
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
TRIES = 12  # arrangements drawn, of which the one whose answer hangs on the most moves is kept


def moved(before: Sequence[T], move: str, named: Sequence[Any]) -> list[T]:
    """Returns the arrangement after a move. `named` are entities, but positions of places in exchange and contents."""
    state = list(before)
    if move in ("front", "back", "behind", "before"):
        state.remove(named[0])
        anchor = {"front": 0, "back": len(state)}.get(move)
        place = state.index(named[1]) + (move == "behind") if anchor is None else anchor
        state.insert(place, named[0])
        return state
    if move == "exchange":
        places = [state.index(named[0]), named[1]]
    else:
        places = list(named) if move == "contents" else [state.index(entity) for entity in named]
    there = [state[place] for place in places]
    for place, entity in zip(places, there[-1:] + there[:-1], strict=True):  # each goes where the next one was
        state[place] = entity
    return state


def _moves(draws: Draws, kind: str, size: int, steps: int) -> list[Move]:
    state, found = list(range(size)), list[Move]()
    while len(found) < steps:
        move = draws.one(RELATIONS[kind])
        count = {"front": 1, "back": 1, "rotate": 3}.get(move, 2)
        named = draws.some(range(size), count)
        if kind == "slots" and move != "contents" and 0 not in named and draws.below(2):
            named[draws.below(count) if move != "exchange" else 0] = 0  # one thing moves often: it may be asked for
        after = moved(state, move, named)
        if after != state and not (found and moved(after, *found[-1]) == after):
            state = after
            found.append((move, tuple(named)))
    return found


def _states(size: int, moves: Sequence[Move]) -> list[list[int]]:
    """Returns the arrangement at the start and after every move."""
    states = [list(range(size))]
    for move in moves:
        states.append(moved(states[-1], *move))
    return states


def _weights(kind: str, size: int, moves: Sequence[Move]) -> list[int]:
    """Counts for every question the moves without which its answer would differ."""
    end = _states(size, moves)[-1]
    others = [_states(size, [*moves[:skip], *moves[skip + 1 :]])[-1] for skip in range(len(moves))]
    if kind == "queue":
        return [sum(other[place] != end[place] for other in others) for place in range(size)]
    return [sum(other.index(thing) != end.index(thing) for other in others) for thing in range(size)]


def draw(draws: Draws, words: Words, steps: int) -> tuple[str, dict[str, Any]]:
    """Draws a problem, with the hash of its arrangements and its question."""
    kind, size = draws.one(tuple(RELATIONS)), draws.one(ENTITIES)
    most, asked, moves = -1, 0, list[Move]()
    for _ in range(TRIES):
        tried = _moves(draws, kind, size, steps)
        weights = _weights(kind, size, tried)
        wanted = draws.one([index for index, weight in enumerate(weights) if weight == max(weights)])
        if max(weights) > most:
            most, asked, moves = max(weights), wanted, tried
    entities = draws.some(words.names if kind == "queue" else words.objects, size)
    places = draws.some(words.places, size) if kind == "slots" else list(ORDINALS[:size])
    said, steps_done = [_start(draws, words, kind, entities, places)], []
    for (move, named), state in zip(moves, _states(size, moves)[1:], strict=True):
        said.append(_said(draws, words, move, named, entities, places))
        at = {place: entities[index] for place, index in zip(places, state, strict=True)}
        steps_done.append({"name": entities[named[0]], "expression": said[-1], "value": at})
    ask = draws.one(words.wordings["who" if kind == "queue" else "where"])
    said.append(ask.format(place=places[asked], a=entities[asked]) + " Answer with one word.")
    end = _states(size, moves)[-1]
    answer = entities[end[asked]] if kind == "queue" else places[end.index(asked)]
    start = dict(zip(places, entities, strict=True))
    row = {"question": " ".join(said), "answer": answer, "layout": kind, "start": start, "steps": steps_done}
    return digest(kind, _states(size, moves), asked), row


def _start(draws: Draws, words: Words, kind: str, entities: Sequence[str], places: Sequence[str]) -> str:
    facts = [f"the {thing} is in the {place}" for thing, place in zip(entities, places, strict=True)]
    listed = entities if kind == "queue" else draws.some(facts, len(facts))
    text = ", ".join(listed[:-1]) + f" and {listed[-1]}"
    return draws.one(words.wordings[kind]).format(names=text, facts=text)


def _said(
    draws: Draws, words: Words, move: str, named: Sequence[int], entities: Sequence[str], places: Sequence[str]
) -> str:
    letters = {"contents": "pq", "exchange": "ap"}.get(move, "abc")
    texts = {x: (places if x in "pq" else entities)[index] for x, index in zip(letters, named, strict=False)}
    return draws.one(words.wordings[move]).format(**texts)
