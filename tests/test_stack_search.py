"""Searches by a stack: what its parts say at each moment, one probability of it, and going on without its verifier."""

import shutil
import warnings
from importlib.util import find_spec
from threading import current_thread

import numpy as np
import pytest
import torch

from gambit import events as ev
from gambit.config.options import EngineConfig, SearchConfig
from gambit.config.trust import ScorerTrust
from gambit.engines.verifiers import ReaderStart
from gambit.errors import EngineError, UserError
from gambit.models import files as models
from gambit.results.record import fold
from gambit.scorers.stack import (
    PARTS,
    STATE_FILE,
    StackInfo,
    StackLine,
    StackLines,
    parse_stack,
    read_stack,
    write_stack,
)
from gambit.scorers.stack_pool import PoolFeatures
from gambit.scorers.stack_states import load_vectors
from gambit.scorers.verifier.folder import INFO_FILE, Platt
from gambit.scorers.verifier.model import Verifier, info_for
from gambit.search.stacking import Stacking
from gambit.solver import Solver, parts
from gambit.solver.spread import SpreadSolver
from gambit.training.collect import CollectPlan, collect
from gambit.training.loading import CollectionReader
from gambit.training.ranking import QUARTERS, last_steps
from gambit.training.sampling import pawn_tasks
from gambit.training.stack.parts import Asked, StackParts, vectors_in
from gambit.types import Aggregation, StatePosition, StopReason
from reading import DyingReader, is_sound

CPU = torch.device("cpu")
SEARCH = SearchConfig(seed=3, vote="score")
TASKS = pawn_tasks("dev", 2, seed=0)
NUM_TRACES = 6
SAMPLED = SEARCH.model_copy(
    update={"policy": "sc", "capacity": NUM_TRACES, "num_traces": NUM_TRACES, "own_noise": True}
)
QUICK = SearchConfig(capacity=6, swap_size=2, check_interval=12, warmup_tokens=12, islands=1, vote="score")
WEIGHTS = {"state": 0.7, "confidence": 0.05, "verifier": 0.5, "closeness": 0.6, "support": 0.9, "agreement": 0.4}
ENGINES = ["local", pytest.param("vllm", marks=[
    pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
])]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected")
    engine = EngineConfig(model="pawn", engine="local", device="cpu")
    collect(TASKS, CollectPlan(folder, "pawn:dev", engine, SEARCH, NUM_TRACES, layers=(5, -1),
                               positions=(StatePosition.BOUNDARY,)))  # fmt: skip
    return CollectionReader(folder)


def lines_of(names):
    running = {name: WEIGHTS[name] for name in names if name != "agreement"}
    return StackLines(running=StackLine(weights=running, offset=-0.5),
                      complete=StackLine(weights={name: WEIGHTS[name] for name in names}, offset=-1.0))  # fmt: skip


def save_stack(folder, names, collection, aggregation="last"):
    """Weights made up, parts real: pawn's own scorer, and an adapter that says something."""
    folder.mkdir()
    if "state" in names:
        shutil.copy(models.side_file(models.locate("pawn"), models.SCORER_FILE), folder / STATE_FILE)
    if "verifier" in names:
        torch.manual_seed(0)
        info = info_for("pawn", rank=2, calibration=Platt(slope=1.5, offset=0.2), aggregation=Aggregation(aggregation))
        verifier = Verifier.fresh(models.locate("pawn"), info, CPU)
        torch.nn.init.normal_(verifier.head.weight, std=0.1)
        verifier.save(folder)
    header = collection.header
    info = StackInfo(
        base_model="pawn", base_model_hash=header.model_hash, hidden_size=header.hidden_size, parts=names,
        boundary_rule=header.boundary_rule, lines=lines_of(names), closeness_layer=5,
        trust=ScorerTrust((0.7, 0.8, 0.8, 0.9), 40).to_json(),
        without={name: lines_of([each for each in names if each != name]) for name in names},
    )  # fmt: skip
    if {"closeness", "support"} & set(names):
        state = folder / STATE_FILE if "state" in names else None
        vectors_in(collection, StackParts(names, state)).save(folder)
    write_stack(folder, info)
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory, collection):
    return save_stack(tmp_path_factory.mktemp("stack") / "s", PARTS, collection, "mean")


def solver_with(stack, engine="local", **options):
    return Solver("pawn", scorer=f"stack:{stack}", engine=engine, device="cpu", verifier_engine="local", **options)


def verified(events):
    """(trace, length) -> scores, in their order."""
    found = {}
    for event in events:
        if isinstance(event, ev.Verified):
            for trace, length, score in zip(event.traces, event.num_tokens, event.scores, strict=True):
                found.setdefault((trace, length), []).append(score)
    return found


def watched(monkeypatch):
    """The features of every thought and end, and the verifier's part of them, as a search has them."""
    seen = {}
    chance = Stacking.chance

    def watching(self, trace, num_tokens, features, read):
        found = chance(self, trace, num_tokens, features, read)
        values = dict(features.known())
        if read is not None:
            values["verifier"] = float(np.mean([logit for _, logit in self._line(trace).logits]))
        key = (trace, "end") if features.is_complete else (trace, num_tokens)
        seen[key] = values, found
        return found

    monkeypatch.setattr(Stacking, "chance", watching)
    return seen


# -- the same features -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_search_knows_of_a_thought_is_what_training_knew_of_it(stack, collection, monkeypatch, engine):
    info = parts.read_stack(stack)
    told = StackParts.of_folder(stack, info)
    data = collection.without_states
    asked = Asked(collection, data.all_traces(), QUARTERS, load_vectors(stack, info), CPU, "pawn")
    offline = told.stack_data(asked)
    seen = watched(monkeypatch)
    order = {problem.id: number for number, problem in enumerate(data.problems)}
    with solver_with(stack, engine) as solver:
        for task in TASKS:
            seen.clear()
            events = []
            solver.solve(task.problem, SAMPLED, on_event=events.append)
            first = int(np.searchsorted(data.traces.problem_of, order[task.id]))
            tree = fold(events).tree
            tokens = collection.passages.tokens
            assert [tree.tokens_of(i) for i in range(NUM_TRACES)] == [
                tuple(tokens[first + i].tolist()) for i in range(NUM_TRACES)
            ], "the same traces"
            for share in QUARTERS:
                chances = offline.chances(info.lines, share)
                for trace in range(first, first + NUM_TRACES):
                    count, start = data.traces.num_steps[trace], data.traces.starts[trace]
                    at = last_steps(np.array([count]), share)[0]
                    key = (trace - first, "end" if share == 1 else int(data.traces.step_ends[start + at]))
                    values, chance = seen[key]
                    assert set(values) == set(PARTS)
                    for name in PARTS:
                        expected = offline.features[name][share][trace]
                        assert values[name] == pytest.approx(expected, abs=0.02, rel=0.02), (name, key, share)
                    assert chance == pytest.approx(chances[trace], abs=0.02)
    spans = {name: np.ptp([offline.features[name][share] for share in QUARTERS]) for name in PARTS}
    assert min(spans.values()) > 0.05, spans


# -- searching -------------------------------------------------------------------------------------------------


def test_a_search_ranks_and_votes_by_the_stack(stack):
    with solver_with(stack) as solver:
        events = []
        result = solver.solve(TASKS[0].problem, QUICK, on_event=events.append)
        again = solver.solve(TASKS[0].problem, QUICK)
        auto = solver.solve(TASKS[0].problem, QUICK.model_copy(update={"islands": None}))
    tree, scores = fold(events).tree, verified(events)
    assert result.stop_reason is StopReason.COMPLETED and result.verifier.thoughts > 8 and result.votes == again.votes
    assert not [event for event in events if isinstance(event, ev.Scored)]
    assert any(isinstance(event, ev.Branched) for event in events), "children have what their parents had"
    for event in events:
        if isinstance(event, ev.Finished):
            trace = tree.traces[event.trace]
            latest = [each for (owner, _), each in scores.items() if owner == trace.id][-1][-1]
            assert tree.score_of(trace) == latest and 0 < latest < 1, "at its end, with its answer"
    assert events[0].environment["stack"]["parts"] == list(PARTS)
    assert "0.80 on 40 problems" in auto.pool.why, "trusted by its own figures"


def test_a_stack_needs_no_verifier(tmp_path, collection, monkeypatch):
    folder = save_stack(tmp_path / "s", ("confidence", "agreement"), collection)
    threads = set()
    compare = PoolFeatures._kind_of
    monkeypatch.setattr(
        PoolFeatures, "_kind_of", lambda self, answer: threads.add(current_thread().name) or compare(self, answer)
    )
    with solver_with(folder) as solver:
        events = []
        apart = QUICK.model_copy(update={"islands": 3})  # one root's traces do not agree with each other
        result = solver.solve(TASKS[0].problem, apart, on_event=events.append)
    assert result.verifier is None and len({score for each in verified(events).values() for score in each}) > 5
    assert len(threads) == 1 and "votes" in threads.pop(), "the engine need not wait until answers are compared"
    assert parse_stack(str(folder)) == folder, "the folder alone is enough"
    with Solver("pawn", scorer=str(folder), engine="local", device="cpu") as solver:
        assert solver.solve(TASKS[0].problem, apart).votes == result.votes


def test_without_its_verifier_a_search_goes_on_by_the_other_parts(stack, monkeypatch):
    monkeypatch.setattr(parts, "prepare_reader", lambda *_: ReaderStart(lambda: DyingReader(is_sound, lives=12)))
    seen = watched(monkeypatch)
    with solver_with(stack, verifier_optional=True) as solver:
        events = []
        result = solver.solve(TASKS[0].problem, QUICK, on_event=events.append)
    assert result.stop_reason is StopReason.COMPLETED and "out of breath" in result.verifier.lost
    info = parts.read_stack(stack)
    without = [each for each in seen.items() if "verifier" not in each[1][0]]
    assert without and len(without) < len(seen)
    for (_, at), (values, chance) in without:
        assert chance == info.without["verifier"].chance(values, is_complete=at == "end")
    ended = [event.trace for event in events if isinstance(event, ev.Finished)]
    assert set(ended) <= {trace for trace, _ in verified(events)}, "every vote has a weight"
    with solver_with(stack) as solver, pytest.raises(EngineError, match="--verifier-optional"):
        solver.solve(TASKS[0].problem, QUICK)


def test_nothing_waits_for_the_verifier_where_it_is_asynchronous(stack):
    with solver_with(stack, verifier_async=True) as solver:
        result = solver.solve(TASKS[0].problem, QUICK)
    assert result.stop_reason is StopReason.COMPLETED and not result.verifier.is_repeatable


def test_what_is_no_stack_is_said(tmp_path):
    with pytest.raises(UserError, match=r"holds no stack\.json"):
        Solver("pawn", scorer=f"stack:{tmp_path}", engine="local", device="cpu")


def test_a_stack_that_lacks_a_part_is_said_before_a_model_is_loaded(stack, tmp_path):
    shutil.copytree(stack, tmp_path / "gone")
    (tmp_path / "gone" / INFO_FILE).unlink()
    info = read_stack(stack)
    running = info.lines.running.model_copy(update={"weights": {"magic": 1.0}})
    lines = info.lines.model_copy(update={"running": running})
    write_stack(tmp_path / "magic", info.model_copy(update={"lines": lines}))
    write_stack(tmp_path / "trust", info.model_copy(update={"trust": {"auc": {}}}))
    for name, sentence in (
        ("gone", r"its verifier's verifier\.json is gone: copy or train the stack again"),
        ("magic", r"stack\.json: it weighs magic, which is none of its parts"),
        ("trust", r"stack\.json: its trust cannot be read \('0\.25' is missing\)"),
    ):
        with pytest.raises(UserError, match=sentence):
            solver_with(tmp_path / name)


@pytest.mark.parametrize(("names", "num_engines"), [(["confidence"], 2), (["confidence", "support"], 1)])
def test_a_stack_that_compares_traces_keeps_a_search_on_one_engine(collection, tmp_path, names, num_engines):
    scorer = f"stack:{save_stack(tmp_path / 'stack', names, collection)}"
    config, events = QUICK.model_copy(update={"islands": 3}), []
    with Solver("pawn", scorer=scorer) as first, Solver("pawn", scorer=scorer) as second:
        alone = first.solve(TASKS[0].problem, config)
        with SpreadSolver([first, second]) as spread:
            result = spread.solve(TASKS[0].problem, config, on_event=events.append)
    assert events[0].environment["engines"] == num_engines
    assert result.votes == alone.votes and result.counts == alone.counts
