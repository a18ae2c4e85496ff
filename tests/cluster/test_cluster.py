"""What surrounds engines under Ray, without Ray: the process of one, its needs, refusals, progress, the simulation."""

import importlib.util
import threading
from collections.abc import Iterator

import pytest
from benchmarks.ray_driver import most_engines, simulated
from typer.testing import CliRunner

from gambit.cli.app import app
from gambit.cli.commands import with_values
from gambit.cli.progress import engine_lines
from gambit.cluster.actor import Done, EngineActor, EngineReport, Failed, JobDesk
from gambit.cluster.engines import EngineSlot, EngineState, RemoteJob
from gambit.cluster.plan import ClusterPlan, EngineNeeds, engine_needs
from gambit.cluster.work import Work, WorkQueue, fitting_options
from gambit.config.options import EngineConfig
from gambit.errors import UserError


class Bell:
    """An engine that does nothing; closed once."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@pytest.fixture
def actor() -> Iterator[EngineActor[Bell]]:
    actor = EngineActor(Bell, node="here")
    yield actor
    actor.close()
    assert actor.call(lambda bell: bell.is_closed)


# -- the process of an engine ----------------------------------------------------------------------------------


def test_a_job_streams_its_news_and_ends_with_its_value(actor: EngineActor[Bell]) -> None:
    told = threading.Event()

    def job(bell: Bell, desk: JobDesk) -> str:
        desk.send(1)
        desk.send(2)
        told.wait()
        desk.send(3)
        return "value"

    messages = actor.run(0, job, news_seconds=0.01)
    assert next(messages) == [1, 2]
    told.set()
    *news, end = messages
    assert [item for items in news for item in items] == [3] and end == Done("value")


def test_a_job_is_stopped_by_its_number(actor: EngineActor[Bell]) -> None:
    def job(bell: Bell, desk: JobDesk) -> str:
        desk.send("begun")
        while not desk.should_stop():
            pass
        return "stopped"

    mine, other = actor.run(1, job, news_seconds=0.01), actor.run(2, job, news_seconds=0.01)
    assert next(mine) == next(other) == ["begun"]
    actor.stop(1)
    assert list(mine) == [Done("stopped")]
    actor.stop()
    assert list(other) == [Done("stopped")]


def test_a_stop_may_come_before_the_job(actor: EngineActor[Bell]) -> None:
    actor.stop(3)
    assert list(actor.run(3, lambda bell, desk: desk.should_stop())) == [Done(True)]
    assert list(actor.run(4, lambda bell, desk: desk.should_stop())) == [Done(False)]


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ValueError("odd"), Failed("ValueError: odd", False)), (UserError("your fault"), Failed("your fault", True))],
)
def test_what_a_job_or_a_start_raises_is_told_in_words(actor: EngineActor[Bell], error, raised: Failed) -> None:
    def fail(*_: object) -> None:
        raise error

    assert list(actor.run(0, fail)) == [raised]
    assert EngineActor(fail).ping() == raised
    assert isinstance(actor.ping(), EngineReport)


# -- who takes which work --------------------------------------------------------------------------------------


def attempt(batch: str = "a", deaths: int = 0) -> Work[str]:
    return Work(lambda engine, desk: None, "tag", batch, num_deaths=deaths)


@pytest.mark.parametrize(
    ("running", "next_one", "can"),
    [
        ([], attempt(), True),
        ([attempt()], attempt(), True),
        ([attempt("b")], attempt(), False),  # methods do not share a batch
        ([attempt()], attempt(deaths=1), False),  # what may have killed an engine is tried alone
        ([attempt(deaths=1)], attempt(), False),
        ([], attempt(deaths=1), True),
    ],
)
def test_an_engine_takes_what_may_run_beside_what_it_has(running, next_one, can: bool) -> None:
    assert next_one.fits_beside(running) is can


class Engines:
    """Slots of which none has a process; a job that is begun stays."""

    most_jobs = 2

    def __init__(self, *states: EngineState) -> None:
        self.slots = [EngineSlot(number, state) for number, state in enumerate(states)]
        self.begun: list[int] = []

    def begin(self, slot: EngineSlot, *_: object) -> RemoteJob:
        self.begun.append(slot.number)
        return RemoteJob(None, len(self.begun))


def test_work_goes_to_the_least_busy_engine_until_all_that_are_ready_are_full() -> None:
    engines = Engines(EngineState.STARTING, EngineState.READY, EngineState.READY, EngineState.LOST)
    queue = WorkQueue(engines, [Work(lambda engine, desk: None, n) for n in range(9)], 2)
    queue.hand_out()
    assert engines.begun == [1, 2, 1, 2] and len(queue.running) == 4 and queue.peek().tag == 4


# -- needs and refusals ----------------------------------------------------------------------------------------

TWO_WORKERS = EngineConfig(engine="vllm", engine_options={"tensor_parallel_size": 2})


def test_an_engine_gets_as_many_gpus_as_it_computes_on() -> None:
    cluster = {"CPU": 64.0, "GPU": 8.0}
    assert engine_needs(ClusterPlan(ray="auto", engines=8), EngineConfig(), cluster) == EngineNeeds(1, 1)
    assert engine_needs(ClusterPlan(ray="auto", engines=4), TWO_WORKERS, cluster) == EngineNeeds(2, 1)
    assert engine_needs(ClusterPlan(ray="auto", engines=4), EngineConfig(device="cpu"), cluster).gpus == 0
    assert engine_needs(ClusterPlan(ray="auto", engines=4), EngineConfig(), {"CPU": 4.0}).gpus == 0
    assert engine_needs(
        ClusterPlan(ray="auto", engines=4, gpus_per_engine=0.5, cpus_per_engine=3), EngineConfig(), cluster
    ) == EngineNeeds(0.5, 3)
    with pytest.raises(UserError, match=r"need 9, and this machine has 8"):
        engine_needs(ClusterPlan(engines=9), EngineConfig(), cluster)


def test_one_machine_is_not_filled_with_engines_that_wait_for_its_cores(monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert engine_needs(ClusterPlan(engines=8), EngineConfig(), {"CPU": 8.0}) == EngineNeeds(0, 1)
    with pytest.raises(UserError, match=r"500 engines would wait .* 2 cores: give at most 8 --engines"):
        engine_needs(ClusterPlan(engines=500), EngineConfig(), {"CPU": 500.0})
    assert engine_needs(ClusterPlan(ray="auto", engines=500), EngineConfig(), {"CPU": 2.0}).cpus == 1, (
        "machines may still come"
    )
    assert engine_needs(ClusterPlan(engines=16, gpus_per_engine=0.5), EngineConfig(), {"GPU": 8.0}).gpus == 0.5


def test_a_run_is_gone_on_with_by_the_flags_that_began_it() -> None:
    assert ClusterPlan(ray="", engines=2, spread=True).flags == " --ray --engines 2 --spread"
    flags = " --ray head:6379 --engines 4 --gpus-per-engine 0.5 --cpus-per-engine 3"
    assert ClusterPlan(ray="head:6379", engines=4, gpus_per_engine=0.5, cpus_per_engine=3).flags == flags


def test_options_fit_into_a_part_of_a_gpu_and_vllm_starts_its_own_workers() -> None:
    shared = fitting_options(EngineConfig(memory_ratio=0.8), EngineNeeds(gpus=0.5))
    assert shared["memory_ratio"] == pytest.approx(0.4)
    assert "memory_ratio" not in fitting_options(EngineConfig(), EngineNeeds(gpus=1))
    assert fitting_options(TWO_WORKERS, EngineNeeds(gpus=2))["engine_options"] == {
        "tensor_parallel_size": 2, "distributed_executor_backend": "mp",
    }  # fmt: skip


BENCH = ("bench", "--benchmark", "pawn")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((*BENCH, "--engines", "2"), "--engines 2 is for engines under Ray: add --ray"),
        (("solve", "--file", "x.jsonl", "--gpus-per-engine", "1"), "--gpus-per-engine 1 is for engines under Ray"),
        ((*BENCH, "--ray", "ray://head:10001"), "cannot stream results; run gambit on a machine of the cluster"),
        ((*BENCH, "--ray", "--gpus-per-engine", "1.5"), "a part of one GPU, or whole ones"),
        ((*BENCH, "--ray", "--gpus-per-engine", "1", "--device", "cpu"), "--device cpu disagree"),
        (
            (*BENCH, "--ray", "--gpus-per-engine", "1", "--engine-option", "tensor_parallel_size=2"),
            "and tensor_parallel_size=2 disagree",
        ),
        (("solve", "a = 17; a?", "--ray"), "--ray hands the problems of a file to engines: give --file"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 2 and sentence in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "words", [BENCH, ("solve", "--file", "x.jsonl"), ("scorer", "collect", "--problems", "pawn:dev", "--out", "there")]
)
def test_without_ray_the_command_that_installs_it_is_named(words, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else find(name))
    done = CliRunner().invoke(app, [*words, "--ray"])
    assert done.exit_code == 2 and "'.[ray]'" in " ".join(done.stderr.split())
    assert len(done.stderr.strip().splitlines()) <= 2


def test_an_option_may_stand_without_its_value() -> None:
    assert with_values(["--ray"]) == ["--ray", ""]
    assert with_values(["--ray", "--engines", "2"]) == ["--ray", "", "--engines", "2"]
    assert with_values(["--ray", "auto", "x"]) == ["--ray", "auto", "x"]
    assert with_values(["--ray", "--", "--ray"]) == ["--ray", "", "--", "--ray"]


# -- progress --------------------------------------------------------------------------------------------------


def test_progress_names_engines_their_speed_and_deaths() -> None:
    slots = [EngineSlot(0, EngineState.READY, "10.0.0.1", 7, num_done=3), EngineSlot(1, EngineState.STARTING)]
    slots[0].tokens, slots[0].busy_seconds = 3000, 2.0
    slots[1].num_deaths = 2
    assert engine_lines(slots) == ["engine 0 on 10.0.0.1: 1,500 tokens/s, 3 done", "engine 1: starting, 2 deaths"]
    many = [*slots, *(EngineSlot(i, EngineState.READY) for i in range(2, 12))]
    assert engine_lines(many) == ["12 engines: 11 ready, 1 starting", "0 tokens/s each, 1,500 in all, 2 deaths"]


# -- the simulation --------------------------------------------------------------------------------------------


def test_engines_are_busy_until_the_driver_is() -> None:
    assert simulated(1, 10, 0.01, 0, 0) == pytest.approx(0.999, abs=0.02)
    assert simulated(200, 10, 0.1, 0, 0.3) == pytest.approx(0.5, abs=0.03)  # twice what it can serve
    assert most_engines(10, 0.1, 0, 0) == pytest.approx(100 / 0.95, rel=0.03)
    assert most_engines(10, 0.1, 0.1, 0) < most_engines(10, 0.1, 0, 0), "news are work too"
