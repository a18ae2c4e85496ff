"""Gambit inside vLLM, beyond the contract: other processes, two ranks, the same tree as the local engine, failures."""

import dataclasses
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gambit import SearchConfig, Solver
from gambit import events as ev
from gambit.errors import DeadEngineError, EngineError, GambitWarning, UserError
from gambit.models import files as models
from gambit.pawn.puzzles import Level, Split, generate
from gambit.results.record import fold
from gambit.scorers.base import ScorerInfo
from gambit.scorers.checkpoint import load_checkpoint
from gambit.scorers.mlp import BlendScorer, MlpScorer
from gambit.scorers.simple import ConfidenceScorer
from gambit.types import Aggregation, StatePosition, StopReason, TraceKey
from support.engine_setups import (
    GREEDY,
    HAS_VLLM,
    PROMPT,
    RULE,
    SAMPLED,
    ProjectionScorer,
    check_search,
    finish,
    open_search,
    run,
    sequence_scorer,
    spec,
    start_local,
    start_own_vllm,
    start_vllm,
    tokens_of,
)
from support.searching import check_ended, check_tree, check_victims, make_search, make_settings, run_one, run_searches

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: scripts/install.sh brings its CPU build"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@dataclasses.dataclass(frozen=True)
class RoundedScorer:
    """A random MLP in [0, 1], rounded: two engines that compute the same in another order then rank alike."""

    info = ScorerInfo("rounded", state_position=StatePosition.BOUNDARY, hidden_size=32)
    seed: int = 3

    def to(self, device):
        return _Rounded(_random_mlp(self.seed).to(device))


@dataclasses.dataclass(frozen=True)
class _Rounded:
    mlp: MlpScorer

    @property
    def info(self):
        return RoundedScorer.info

    def score(self, thoughts):
        return (self.mlp.score(thoughts) * 1000).round() / 1000


@dataclasses.dataclass(frozen=True)
class RoundedBlend:
    """The same of states and confidences together."""

    info = ScorerInfo("blend", state_position=StatePosition.BOUNDARY, hidden_size=32, needs_confidence=True)
    blend: BlendScorer | None = None

    def to(self, device):
        return RoundedBlend(BlendScorer(self.info, _random_mlp(3), -0.6).to(device))

    def part(self, states):
        return self.blend.part(states)

    def whole(self, parts, confidences):
        return ((parts - 0.6 * confidences).sigmoid() * 1000).round() / 1000

    def score(self, thoughts):
        return self.whole(self.part(thoughts.states), thoughts.confidences)


def _random_mlp(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((16, 32), (16,), (1, 16), (1,))
    weights = tuple(torch.randn(shape, generator=generator) / 3 for shape in shapes)
    return MlpScorer(RoundedScorer.info, weights)


def search_on(engine, policy="gambit", **changes):
    settings = make_settings(policy=policy, capacity=12, swap_size=3, check_interval=5, warmup_tokens=8, **changes)
    return run_one(
        engine,
        settings,
        prompt=PROMPT,
        rule=RULE,
        stop_ids=frozenset({0}),
        check=lambda search, event: check_tree(search.record.tree),
    )


def tree_of(watched):
    return [(t.parent, t.inherited, t.state, t.own_tokens, t.answer) for t in watched.search.record.tree.traces]


# -- the same search as on the local engine ----------------------------------------------------------------------


@pytest.mark.parametrize("scorer", [RoundedScorer(), ConfidenceScorer(), RoundedBlend()])
def test_a_sampled_search_is_the_same_on_local_and_vllm(scorer):
    ours, reference = search_on(start_vllm(scorer)), search_on(start_local(scorer))
    assert tree_of(ours) == tree_of(reference)
    assert ours.search.result.answer == reference.search.result.answer
    assert ours.search.result.counts == reference.search.result.counts and ours.search.result.counts.branched > 10
    for mine, theirs in zip(ours.search.record.tree.traces, reference.search.record.tree.traces, strict=True):
        assert mine.score.count == theirs.score.count and abs(mine.score.total - theirs.score.total) < 0.02


@dataclasses.dataclass(frozen=True)
class RoundedPawn:
    """Pawn's own scorer, rounded as the other one is."""

    mlp: MlpScorer

    @property
    def info(self):
        return self.mlp.info

    def to(self, device):
        return RoundedPawn(self.mlp.to(device))

    def score(self, thoughts):
        return (self.mlp.score(thoughts) * 1000).round() / 1000


def test_pawn_finds_the_same_tree_and_answer_on_local_and_vllm():
    scorer = RoundedPawn(load_checkpoint(Path(models.locate("pawn")) / models.SCORER_FILE))
    question = next(generate(Split.DEV, 0, Level.HARD)).text
    found = []
    for engine, options in (("vllm", {"kv_cache_memory_bytes": 256 << 20, "self_check": False}), ("local", {})):
        with Solver("pawn", scorer=scorer, engine=engine, engine_options=options) as solver:
            events = []
            result = solver.solve(question, SearchConfig(capacity=12, swap_size=4, seed=3), on_event=events.append)
            ends = ev.Finished | ev.Pruned | ev.Cancelled | ev.Branched
            found.append((result.answer, result.counts, [e for e in events if isinstance(e, ends)]))
    (answer, counts, vllm_ends), reference = found[0], found[1]
    assert (answer, counts) == reference[:2] and counts.branched > 5
    assert [_without_score(e) for e in vllm_ends] == [_without_score(e) for e in reference[2]]


def _without_score(event):
    return {name: getattr(event, name) for name in event.__slots__ if name != "score"}


def test_filtered_sampling_is_the_same_too():
    sampling = dataclasses.replace(SAMPLED, temperature=0.8, top_p=0.9, top_k=12, min_p=0.02)
    said = []
    for engine in (start_vllm(), start_local()):
        open_search(engine)
        engine.submit([spec(i, sampling=sampling if i % 2 else GREEDY, tokens=40) for i in range(6)])
        said.append(tokens_of(finish(engine)))
    assert said[0] == said[1]


# -- memory pressure ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["gambit", "step"])
def test_in_a_third_of_the_room_nothing_is_preempted_and_every_victim_is_right(policy, is_async):
    options = {"async_scheduling": True} if is_async else {}
    engine = start_vllm(RoundedScorer(), kv_budget_tokens=32 * 12, **options)  # 12 traces need 3 blocks each
    watched = search_on(engine, policy, max_new_tokens=70, num_traces=40, budget_tokens=2500)
    check_ended(watched.search.record.tree)
    victims = check_victims(watched.events, unscored_first=policy == "step")
    assert len(victims) >= 5
    assert not [e for e in watched.events if isinstance(e, ev.Queued)]
    kinds = {ev.Evicted} if policy == "gambit" else {ev.Pruned}
    assert {type(e) for e in watched.events if getattr(e, "reason", None) == "pressure"} == kinds
    assert engine.step().kv_used_tokens == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_pool_larger_than_the_places_takes_turns(is_async):
    options = {"async_scheduling": True} if is_async else {}
    engine = start_own_vllm(RoundedScorer(), max_num_seqs=5, **options)
    assert engine.info.most_traces == 5
    watched = search_on(engine, "sc", max_new_tokens=70)
    engine.close()
    check_ended(watched.search.record.tree)
    assert watched.search.result.counts.completed == 12
    waited = [t.waited_steps for t in watched.search.record.tree.traces]
    assert sum(steps == 0 for steps in waited) == 5 and max(waited) > 10


def test_branches_recompute_less_than_a_block_when_nothing_was_lost():
    watched = search_on(start_vllm(RoundedScorer()), max_new_tokens=120)
    children = [t for t in watched.search.record.tree.traces if t.parent is not None and t.num_admissions]
    assert len(children) > 10
    assert all(child.reused + child.recomputed == child.inherited for child in children)
    assert all(child.recomputed < 32 for child in children) and any(child.reused for child in children)


# -- stock sampling, options, refusals ---------------------------------------------------------------------------


def test_stock_sampling_when_exact_noise_is_off():
    engine = start_vllm(exact_noise=False)
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY), *(spec(i) for i in range(1, 5))])
    tokens = tokens_of(finish(engine))
    exact = start_vllm()
    open_search(exact, stops=())
    exact.submit([spec(0, sampling=GREEDY)])
    assert tokens[0] == tokens_of(finish(exact))[0]
    assert len({tokens[i] for i in range(1, 5)}) == 4 and all(len(said) == 60 for said in tokens.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"scheduler_cls": "mine"}, "set by Gambit itself"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"max_model_len": 100_000}, "max_model_len .100000. is greater than"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(options, message):
    with pytest.raises(UserError, match=message):
        start_own_vllm(**options)


def test_a_scorer_of_states_and_confidences_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Both(ConfidenceScorer):
        info = ScorerInfo("both", needs_confidence=True, hidden_size=32)

    with pytest.raises(UserError, match="states and confidences"):
        start_own_vllm(Both())


def test_layers_that_vllm_does_not_give_are_refused(monkeypatch):
    from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM

    from gambit.engines.vllm.compat import core

    monkeypatch.setattr(core, "get_model_cls", lambda config: Gemma2ForCausalLM)
    with pytest.raises(UserError, match=r"the scorer reads layers \[-1, 1\]: .* use --engine local"):
        start_own_vllm(ProjectionScorer(layers=(-1, 1)))


def test_an_untested_version_warns(monkeypatch):
    from gambit.engines.vllm.compat import core

    monkeypatch.setattr(core, "VERSION", "0.99.0")
    with (
        pytest.warns(GambitWarning, match=r"0\.99\.0 on cpu has not been tried .* vLLM's own path"),
        pytest.raises(UserError),
    ):
        start_own_vllm(no_such_option=1)


def test_a_command_shows_what_the_engine_warns_of(tmp_path):
    """Warnings of libraries are dropped there."""
    from typer.testing import CliRunner

    from gambit.cli.app import app

    options = ("--engine-option", "fused_scorer=true", "--kv-budget-tokens", "64", "--max-new-tokens", "20")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["solve", "a = 2; b = 3; c = a * b; c?", "--engine", "vllm", "--capacity", "1", *options,
              "--engine-option", f"kv_cache_memory_bytes={64 << 20}", "--out", str(tmp_path / "run")],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "warning: the scorer is not fused into one kernel: vLLM finds no Triton here" in done.stderr
    assert "warning: the KV budget is too small for vLLM's self-check" in done.stderr


# -- the self-check ----------------------------------------------------------------------------------------------


def test_as_many_traces_run_at_once_as_vllms_own_offline_class_allows():
    assert start_vllm().info.most_traces == 256


def test_the_self_check_passes():
    start_own_vllm(self_check=True).close()


def test_states_of_the_wrong_rows_are_refused(monkeypatch):
    from gambit.engines.vllm.compat import model_runner

    right = model_runner.sampled_states
    monkeypatch.setattr(model_runner, "sampled_states", lambda runner: right(runner).roll(1, 0))
    with pytest.raises(EngineError, match="do not make the token"):
        start_own_vllm(self_check=True)


def test_inner_states_of_the_wrong_rows_are_refused(monkeypatch):
    """They are picked by the same index as the last ones, which make tokens and can be checked by that."""
    from gambit.engines.vllm.compat import model_runner

    start_own_vllm(ProjectionScorer(layers=(-1, 1)), self_check=True).close()
    right = model_runner._last_tokens
    monkeypatch.setattr(model_runner, "_last_tokens", lambda *args: right(*args).roll(1, 0))
    with pytest.raises(EngineError, match="do not make the token"):
        start_own_vllm(ProjectionScorer(layers=(-1, 1)), self_check=True)


def test_a_wrong_victim_is_refused(monkeypatch):
    from gambit.engines.vllm.scheduling import TraceScheduling

    right = TraceScheduling.eviction_order
    monkeypatch.setattr(TraceScheduling, "eviction_order", lambda *args: right(*args)[::-1])
    with pytest.raises(EngineError, match="instead of trace 2"):
        start_own_vllm(self_check=True)


# -- other processes ---------------------------------------------------------------------------------------------


def children():
    """Processes below this one, but for the tracker that multiprocessing keeps as long as we live."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # another test's may be ending
            if "resource_tracker" not in " ".join(process.cmdline()):
                found.append(process)
    return found


def wait_until_gone(processes, seconds=120):
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_two_ranks_say_the_same_as_one(monkeypatch):
    if os.cpu_count() < 2:
        pytest.skip("two ranks need two cores")
    import vllm.envs

    monkeypatch.setattr(vllm.envs, "VLLM_CPU_OMP_THREADS_BIND", "0|1")  # it keeps what it has read once
    before = {process.pid for process in children()}
    engine = start_own_vllm(sequence_scorer(), tensor_parallel_size=2, self_check=True)
    workers = [process for process in children() if process.pid not in before]
    try:
        said, scores = [], []
        for each in (engine, start_vllm(sequence_scorer())):
            open_search(each, stops=())
            each.submit([spec(i, tokens=24) for i in range(6)])
            steps = finish(each)
            said.append((tokens_of(steps), [(t.trace, t.num_tokens) for step in steps for t in step.scored]))
            scores.append([t.score for step in steps for t in step.scored])
        assert said[0] == said[1] and scores[0]
        assert torch.allclose(*map(torch.tensor, scores), atol=1e-4)
    finally:
        engine.close()
    assert workers and not wait_until_gone(workers)


def test_an_engine_in_its_own_process_obeys_and_its_death_ends_the_search(monkeypatch):
    start_vllm()  # after which vLLM would no longer look at its environment
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")  # its default on a GPU
    methods, get_context = [], multiprocessing.get_context
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method=None: methods.append(method) or get_context(method)
    )
    before = {process.pid for process in children()}
    scorer = sequence_scorer(aggregation=Aggregation.MEAN)
    engine = start_own_vllm(scorer, kv_budget_tokens=32 * 12, own_process=True, self_check=True)
    started = [process for process in children() if process.pid not in before]
    assert "spawn" in methods and "fork" not in methods
    try:
        alone = start_vllm()
        open_search(alone)
        alone.submit([spec(0), spec(1)])
        expected = tokens_of(finish(alone))
        open_search(engine)
        engine.submit([spec(0), spec(1)])
        assert tokens_of(finish(engine)) == expected
        engine.close_search(1)
        check_group(engine)

        assert started and all(os.getpgid(process.pid) != os.getpgrp() for process in started), "`timeout` reaches it"
        for process in started:  # or somebody sends it there; what it means is the front's to say
            process.send_signal(signal.SIGINT)
        watched = search_on(engine, max_new_tokens=70, num_traces=40, budget_tokens=1500)
        check_ended(watched.search.record.tree)
        assert len(check_victims(watched.events)) >= 3
        assert check_search(scorer, watched, RULE) > 1e-2, "histories are the same there, however late the front is"

        check_death(engine, started)
    finally:
        engine.close()
    assert not wait_until_gone(started)


def check_group(engine):
    """However slowly they come: what is submitted together begins together."""
    core, engine._core = engine._core, SlowlySending(engine._core)
    open_search(engine)
    engine.submit([spec(i) for i in range(6)])
    engine._core = core
    step = engine.step().searches[1]
    assert len(step.admitted) == step.num_generated == 6
    engine.close_search(1)


class SlowlySending:
    def __init__(self, core):
        self._core = core

    def add(self, *args):
        time.sleep(0.05)
        self._core.add(*args)

    def send(self, message):
        self._core.send(message)


def check_death(engine, started):
    core = next(process for process in started if "EngineCore" in process.name() or process.children())
    killed = []

    def kill_later(search, event):
        if isinstance(event, ev.Sample) and event.step >= 10 and not killed:
            killed.append(time.monotonic())
            os.kill(core.pid, signal.SIGKILL)

    settings = make_settings(capacity=12, max_new_tokens=400, check_interval=5)
    watched = make_search(engine, settings, number=9, prompt=PROMPT, rule=RULE, check=kill_later)
    with pytest.raises(DeadEngineError, match="vLLM failed"):
        list(run_searches(engine, [watched.search]))
    assert killed and time.monotonic() - killed[0] < 120
    result = watched.search.result
    assert result.stop_reason is StopReason.FAILED and result.error
    record = fold(ev.from_json(ev.to_json(event)) for event in watched.events)
    check_ended(record.tree)
    cancelled = [e for e in watched.events if isinstance(e, ev.Cancelled)]
    assert sum(len(e.tokens) for e in cancelled) >= 60, "what was said until then is in the log"
    open_search(engine, 10)
    with pytest.raises(DeadEngineError):
        engine.submit([spec(0, search=10)])


def test_tokens_of_a_stopped_trace_are_dropped_when_they_come_late():
    engine = start_vllm(async_scheduling=True)
    open_search(engine, stops=())
    engine.submit([spec(0), spec(1)])
    run(engine, 9)
    assert len(engine.stop([TraceKey(1, 0)])[TraceKey(1, 0)]) == 9
    tokens = tokens_of(finish(engine))
    assert set(tokens) == {1} and len(tokens[1]) == 60


def test_rows_that_vllm_makes_up_for_its_warm_up_are_left_alone():
    from gambit.engines.vllm.scoring import RowSampling

    assert RowSampling(torch.device("cpu")).known(["_warmup_0_", "_warmup_1_"]) is None
