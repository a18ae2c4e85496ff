"""Searches on the scripted engine whose event logs are kept, byte for byte: policies, islands, verifiers, full memory.

A change of the code that is not meant to change searches leaves them as they are. After one that is meant:

    python -m pytest tests/search/test_golden_logs.py --renew
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping

import pytest

from gambit import events as ev
from gambit.config.options import BranchPoint
from gambit.config.trust import THOUGHTS, Doubt
from gambit.results.vote import Consensus
from gambit.search.choice import load_policy, options_model
from gambit.search.scores import VerifierUse
from gambit.verifiers.base import Question, ThoughtReading, VerifierThread
from support import GOLDEN
from support.scripted import DyingVerifier, FunctionVerifier, ScriptedEngine
from support.searching import POLICY_OPTIONS, fallback, make_search, make_settings, run_searches

PATH = GOLDEN / "logs.jsonl.xz"
FULL, TIGHT = {"kv_tokens": 110}, {"kv_tokens": 80}
POOLS = (fallback(0.7, 4, 4, 6), fallback(0.0, 8, 8, 9))
DOUBT = Doubt(0.9, (0.01,) * len(THOUGHTS), is_probability=False, pools=POOLS)
SECONDS = ("seconds_total", "seconds_engine", "seconds_scoring", "seconds_scheduling", "seconds_search")

Case = tuple[Mapping[str, object], Mapping[str, object], Mapping[str, object]]  # of the engine, settings, search


def cases() -> Iterator[tuple[str, Case]]:
    yield from _of_every_policy()
    yield from _of_gambits_options()
    yield from _of_verifiers()


def _of_every_policy() -> Iterator[tuple[str, Case]]:
    for policy, ways in POLICY_OPTIONS.items():
        for i, given in enumerate(ways):
            options = {"policy": policy, "policy_options": options_model(load_policy(policy))(**given)}
            yield f"{policy}-{i}", ({"seed": 1}, options, {})
            yield f"{policy}-{i}-full", ({"seed": 2, **FULL}, options, {})


def _of_gambits_options() -> Iterator[tuple[str, Case]]:
    slow = {"seed": 5, "finish_chance": 0.01}
    for islands in (2, 4, 8):
        yield f"islands-{islands}", ({"seed": 3}, {"islands": islands}, {})
        yield f"islands-{islands}-tight", ({"seed": 4, "admit_chance": 0.6, **TIGHT}, {"islands": islands}, {})
    options: dict[str, dict[str, object]] = {
        "hard-floor": {"hard_floor": 0.5},
        "last-boundary": {"branch_point": BranchPoint.LAST_BOUNDARY},
        "margin": {"swap_margin": 0.2},
        "margin-log-odds": {"swap_margin": 1.0, "is_probability": True, "islands": 4},
        "child-temperature": {"child_temperature": 1.3},
        "more-traces-than-places": {"num_traces": 20, "islands": 4},
        "fewer-traces-than-places": {"num_traces": 3},
        "budget-tokens": {"budget_tokens": 120},
        "budget-traces": {"budget_traces": 2},
        "consensus-share": {"consensus": Consensus(0.5, 2)},
        "rounds": {"first_traces": 2, "islands": 4, "consensus": Consensus(0.9, 2), "num_traces": 16, "capacity": 16},
        "rounds-sc": {"policy": "sc", "first_traces": 2, "consensus": Consensus(0.7, 2), "num_traces": 16},
        "doubt": {"doubt": DOUBT, "islands": 2, "capacity": 16},
        "doubt-full": {"doubt": DOUBT, "islands": 2, "capacity": 16, "ghost_parents": True},
    }
    engines: dict[str, dict[str, object]] = {
        "hard-floor": {"thought_chance": 0.9},
        "consensus-share": {"finish_chance": 0.06},
        "doubt-full": {"kv_tokens": 320},
    }
    for name, changes in options.items():
        yield name, ({**slow, **engines.get(name, {})}, changes, {})
    yield "ghost-parents", ({**slow, **FULL}, {"ghost_parents": True}, {})
    yield "ghost-parents-islands", ({**slow, **FULL}, {"ghost_parents": True, "islands": 4, "hard_floor": 0.4}, {})
    certain = {"policy": "sc", "consensus": Consensus(None, 1)}
    yield "consensus-certain", ({"seed": 0}, certain, {"vote": "majority"})
    yield "position-vote", (slow, {"islands": 2}, {"vote": "position"})
    yield "own-noise", ({**slow, "own_noise": True}, {"islands": 2}, {})
    yield "silent", ({"seed": 6, "thought_chance": 0.0}, {}, {})
    yield "one-trace", ({"seed": 6}, {"capacity": 1, "swap_size": 1}, {})


def _of_verifiers() -> Iterator[tuple[str, Case]]:
    engine = {"seed": 7, "finish_chance": 0.02}
    yield "verifier", (engine, {}, {"verifier": {"lag": 2}})
    yield "verifier-islands-full", ({**engine, **FULL}, {"islands": 2}, {"verifier": {"lag": 1}})
    yield "verifier-sc", (engine, {"policy": "sc"}, {"verifier": {"only_ends": True}})
    yield (
        "verifier-rounds",
        (
            engine,
            {"first_traces": 4, "consensus": Consensus(0.9, 2), "num_traces": 16, "islands": 4, "capacity": 16},
            {"verifier": {"lag": 1}},
        ),
    )
    yield "verifier-lost", ({**engine, **FULL}, {}, {"verifier": {"is_optional": True}, "lives": 12})


def log_of(case: Case) -> list[str]:
    """The lines of a case's log, without header, numbers, chain and what clocks say."""
    engine, settings, options = case
    thread = None
    given: dict[str, object] = {"vote": options.get("vote", "score")}
    if "verifier" in options:
        thread = VerifierThread(lambda: _reader(options))
        use = dict(options["verifier"])  # type: ignore[call-overload]
        question = Question(({"role": "user", "content": "?"},), (1, 2, 3))
        given["verifier"] = VerifierUse(thread, question, lambda tokens: " ".join(map(str, tokens)), **use)
    watched = make_search(ScriptedEngine(**engine), make_settings(**settings), **given)
    try:
        list(run_searches(watched.search._engine, [watched.search]))
    finally:
        if thread is not None:
            thread.close()
    return [json.dumps(_without_clock(json.loads(ev.to_json(event)))) for event in watched.events[1:]]


def _reader(options: Mapping[str, object]) -> FunctionVerifier:
    """Scores that follow from the text, one at a time: a verifier that dies always does so at the same thought."""

    def score(reading: ThoughtReading) -> float:
        return sum(reading.tokens) % 1009 / 1009

    return DyingVerifier(score, int(options["lives"])) if "lives" in options else FunctionVerifier(score)  # type: ignore[call-overload]


def _without_clock(record: dict[str, object]) -> dict[str, object]:
    if record["event"] == "VerifierTotals":
        return {key: record[key] for key in ("event", "step", "verifier", "needed", "is_async")}
    if record["event"] == "Waited":
        record["seconds"] = None
    if len(tokens := record.get("tokens") or ()) > 8:  # type: ignore[arg-type]
        record["tokens"] = [len(tokens), tokens[-1]]  # type: ignore[index]
    return {key: value for key, value in record.items() if key not in SECONDS}


def read() -> dict[str, list[str]]:
    with lzma.open(PATH, "rt") as file:
        return {record["case"]: record["log"] for record in map(json.loads, file)}


def write() -> None:
    with lzma.open(PATH, "wt", preset=9) as file:
        for name, case in CASES.items():
            print(json.dumps({"case": name, "log": log_of(case)}), file=file)


CASES = dict(cases())


@pytest.fixture(scope="module")
def kept(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    if request.config.getoption("renew"):
        write()
    return read()


def test_the_kept_logs_are_those_of_the_cases(kept: dict[str, list[str]]) -> None:
    assert list(kept) == list(CASES) and len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_a_log_is_what_it_was(name: str, kept: dict[str, list[str]]) -> None:
    assert log_of(CASES[name]) == kept[name]
