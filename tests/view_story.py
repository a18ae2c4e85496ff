"""A small search written by hand for the tree page: every way to end, hostile words, a branch inside a character."""

from __future__ import annotations

from pathlib import Path

from builders import tiny_tokenizer
from gambit import events as ev
from gambit.types import EndReason, StopReason

HOSTILE = "</script><b>bold</b><!--<img src=x onerror=alert(1)>"
QUESTION = f"what is {HOSTILE} & 'so' \"on\"?"
FIRST, SECOND, THIRD = "so we have the sum.\n\n", f"then {HOSTILE}\n\n", "the answer is 7 \N{PARTY POPPER} so"
LAST_STEP = 400


class Story:
    """The log, with the texts that its traces must show."""

    def __init__(self, folder: Path) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(folder / "tokenizer")

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        first, second, third = encode(FIRST), encode(SECOND), encode(THIRD)
        whole = (*first, *second, *third)
        one, two = len(first), len(first) + len(second)
        party = next(i for i in range(two, len(whole)) if "\ufffd" in tokenizer.decode(whole[two : i + 1])) + 1
        other = (*whole[party : party + 3], *encode(" we check 9."))  # the rest of the character, then its own way
        self.log = folder / "events.jsonl"
        self.texts = {0: FIRST + SECOND + THIRD, 3: tokenizer.decode((*whole[:party], *other))}
        self.branch = party
        self.header = ev.RunStarted(
            ev.LOG_FORMAT, f"p {HOSTILE}", QUESTION, "gambit", "score", "mean", 5, 4, 4, encode("so?"), {},
            {"engine": {"name": "tale", "model": str(folder / "tokenizer"), "device": "paper"}, "scorer": "hand"},
        )  # fmt: skip
        self.events: list[ev.Event] = [
            self.header,
            *(ev.Created(0, trace) for trace in range(3)),
            *(ev.Admitted(1, trace, 0, 0, 0) for trace in range(3)),
            _sample(0, 3, 0, 0, 0, 0),
            ev.Scored(60, (0, 1), (0.9, 0.2), (one, one)),
            ev.Scored(150, (0,), (0.5,), (two,)),
            ev.Evicted(160, 2, "pressure", None, second),
            ev.Pruned(200, 1, "tournament", 0.2, first),
            ev.Branched(200, 3, 0, party, 0.6),
            _sample(200, 1, 1, 1, 0, 900),
            ev.Admitted(220, 3, party, 0, 20),
            ev.Scored(230, (3,), (0.1,), (party + 3,)),
            ev.Pruned(240, 2, "tournament", None, ()),
            ev.Branched(240, 4, 3, party + 4, 0.6),
            ev.Admitted(241, 4, party + 4, 0, 0),
            ev.Finished(300, 0, EndReason.STOP, "7", whole),
            ev.Finished(350, 3, EndReason.STOP, "9", other),
            ev.Cancelled(LAST_STEP, 4, ()),
            _sample(LAST_STEP, 0, 0, 0, 2, 100),
            ev.Stopped(LAST_STEP, StopReason.BUDGET_TOKENS),
            ev.Voted("7", 0.2, ()),
        ]

    def write(self, num_events: int | None = None) -> Path:
        with ev.LogWriter(self.log) as log:
            for event in self.events[:num_events]:
                log.write(event)
        return self.log


def _sample(step: int, running: int, waiting: int, ghosts: int, completed: int, kv: int) -> ev.Sample:
    return ev.Sample(step, running, waiting, ghosts, completed, 10 * step, kv, 1000, step / 100, step / 120, 0, 0, 0)
