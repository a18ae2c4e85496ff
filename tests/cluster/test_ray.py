"""Runs on engines under Ray, on three nodes: rows of a local run, and none lost or doubled whatever dies."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.ray_driver import write_problems
from benchmarks.recorded_engines import RecordedMaker, recorded
from typer.testing import CliRunner

from gambit.bench.folder import create, make_plan
from gambit.bench.recipe import recipe_from
from gambit.bench.rows import RowWriter, read_rows
from gambit.bench.run import RaySearches, Runner
from gambit.cli.app import app
from gambit.cluster.actor import JobDesk
from gambit.cluster.engines import EnginePool, EngineState
from gambit.cluster.plan import EngineNeeds
from gambit.cluster.work import Work, WorkQueue, run_work
from gambit.errors import EngineError, GambitWarning, UserError
from gambit.training.storage import read_shards

pytestmark = pytest.mark.system
PAWN = ("--benchmark", "pawn", "--limit", "4", "--capacity", "6", "--policies", "sc,gambit")
NEEDS = EngineNeeds(cpus=1)
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


def gambit(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def measured(folder: Path) -> dict[tuple, dict]:
    """Rows without what a clock says, and where they were searched."""
    found = {}
    for row in read_rows(folder):
        assert row.key not in found, f"{row.key} is there twice"
        assert row.log is not None and (folder / row.log).is_file()
        raw = json.loads(row.to_json())
        del raw["began"], raw["seconds"], raw["waited_seconds"], raw["series"]["seconds"], raw["engine"]
        found[row.key] = raw
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "run"
    gambit("bench", *PAWN, "--out", str(folder), "--no-report")
    return folder


@pytest.fixture(scope="module")
def recording(pawn_solver) -> bytes:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # engines cannot import a test
    return recorded(4, pawn_solver)


# -- the same as without Ray -----------------------------------------------------------------------------------


def test_a_bench_run_has_the_rows_and_logs_of_a_local_one(ray_cluster, local, tmp_path: Path, monkeypatch) -> None:
    folder, hand_out = tmp_path / "run", WorkQueue.hand_out

    def hand_out_to_all(work: WorkQueue) -> None:
        if all(slot.is_ready for slot in work._pool.slots):  # else the first might do everything
            hand_out(work)

    monkeypatch.setattr(WorkQueue, "hand_out", hand_out_to_all)
    gambit("bench", *PAWN, "--out", str(folder), "--ray", ray_cluster.address, "--engines", "2")
    assert measured(folder) == measured(local)
    assert {row.engine for row in read_rows(folder)} == {0, 1}
    gambit("replay", "--verify", str(folder))
    report = (folder / "report.md").read_text()
    assert "on each of 2 engines" in report and "engine-seconds a problem" in report
    cells = json.loads((folder / "report.json").read_text())["cells"]
    rows = list(read_rows(folder))
    assert sum(cell["wall_seconds"] for cell in cells) == pytest.approx(
        sum(row.seconds.total for row in rows), rel=0.02
    )


def test_a_file_is_solved_as_without_ray(ray_cluster, tmp_path: Path) -> None:
    problems = tmp_path / "sums.jsonl"
    lines = [json.dumps({"id": f"p{i}", "question": f"a = 1{i}; b = 6; c = a + b; c?", "answer": str(16 + i)})
             for i in range(3)]  # fmt: skip
    problems.write_text("\n".join(lines))
    words = ("solve", "--file", str(problems), "--capacity", "4", "--json")
    here = gambit(*words, "--out", str(tmp_path / "here"))
    there = gambit(*words, "--out", str(tmp_path / "there"), "--ray", ray_cluster.address, "--engines", "2")

    def plain(text: str) -> list[dict]:
        found = [json.loads(line) for line in text.splitlines()]
        found = [{k: v for k, v in each.items() if k not in ("seconds", "waiting", "out_dir")} for each in found]
        return sorted(found, key=lambda each: each["problem_id"])

    assert plain(there) == plain(here)
    gambit("replay", "--verify", str(tmp_path / "there"))
    stored = json.loads((tmp_path / "there" / "p1" / "result.json").read_text())
    assert stored["out_dir"] == str(tmp_path / "there" / "p1")


def test_a_collection_has_the_traces_and_states_of_a_local_one(ray_cluster, tmp_path: Path) -> None:
    words = ("scorer", "collect", "--problems", "pawn:dev", "--limit", "2", "--traces", "2",
             "--traces-at-once", "2")  # fmt: skip
    gambit(*words, "--out", str(tmp_path / "here"))
    gambit(*words, "--out", str(tmp_path / "there"), "--ray", ray_cluster.address, "--engines", "2")

    def collected(folder: Path) -> tuple[dict, torch.Tensor]:
        [shard] = read_shards(folder)
        counts = [sum(trace.num_thoughts for trace in problem.traces) for problem in shard.entry.problems]
        order = sorted(range(len(counts)), key=lambda i: shard.entry.problems[i].id)
        states = torch.split(shard.tensors["states.-1.before"].float(), counts)
        return {each.id: each for each in shard.entry.problems}, torch.cat([states[i] for i in order])

    (here, states), (there, other_states) = collected(tmp_path / "here"), collected(tmp_path / "there")
    assert there == here
    # Problems are read by themselves there and together here; the last bit of half precision may differ.
    torch.testing.assert_close(other_states, states, rtol=1e-2, atol=1e-2)


# -- deaths ----------------------------------------------------------------------------------------------------


def run_stubs(pool: EnginePool, folder: Path, problems: Path, concurrency: int = 1, on_row=lambda row: None) -> None:
    options = {"benchmarks": [str(problems)], "policies": ["sc", "gambit"], "concurrency": concurrency}
    plan, benchmarks = make_plan(recipe_from(options), {})
    create(folder, plan)
    with RowWriter(folder) as writer:
        Runner(plan, benchmarks, RaySearches(pool, folder), writer, set(), on_row=on_row).run()


def test_dead_engines_and_nodes_cost_no_row_and_double_none(ray_cluster, recording, tmp_path: Path) -> None:
    """An engine killed, a node removed, a node added, each at a moment of chance."""
    rng = random.Random(1)
    problems = write_problems(tmp_path / "many.jsonl", 24)
    at = sorted(rng.sample(range(1, 40), 3))
    num_rows = 0
    with EnginePool(RecordedMaker(recording, seconds=0.1), 3, NEEDS) as pool:

        def on_row(row: object) -> None:
            nonlocal num_rows
            num_rows += 1
            if num_rows == at[0]:
                os.kill(
                    rng.choice([slot.pid for slot in pool.slots if slot.state is EngineState.READY]), signal.SIGKILL
                )
            elif num_rows == at[1]:
                ray_cluster.remove_node(rng.choice(ray_cluster.list_all_nodes()[1:]), allow_graceful=False)
            elif num_rows == at[2]:
                ray_cluster.add_node(**NODE)

        with pytest.warns(GambitWarning, match="died"):
            run_stubs(pool, tmp_path / "run", problems, on_row=on_row)
        assert len(measured(tmp_path / "run")) == num_rows == 48
        assert sum(slot.num_deaths for slot in pool.slots) >= 1
        assert not any(row.error for row in read_rows(tmp_path / "run"))


def test_an_engine_comes_back_once_there_is_room(ray_cluster, recording, tmp_path: Path) -> None:
    """The fourth of four engines waits for a node."""
    problems = write_problems(tmp_path / "many.jsonl", 5_000)  # it ends once all four work
    states: set[EngineState] = set()
    with EnginePool(RecordedMaker(recording, seconds=0.1), 4, NEEDS) as pool:
        added = []

        def on_row(row: object) -> None:
            if not added:
                states.update(slot.state for slot in pool.slots)
                added.append(ray_cluster.add_node(**NODE))

        def until_all_work() -> bool:
            return all(slot.num_done for slot in pool.slots)

        options = {"benchmarks": [str(problems)], "policies": ["sc"]}
        plan, benchmarks = make_plan(recipe_from(options), {})
        create(tmp_path / "run", plan)
        with RowWriter(tmp_path / "run") as writer:
            searches = RaySearches(pool, tmp_path / "run", until_all_work)
            Runner(plan, benchmarks, searches, writer, set(), on_row=on_row).run()
        assert EngineState.STARTING in states and until_all_work()
    ray_cluster.remove_node(added[0], allow_graceful=False)
    measured(tmp_path / "run")


def die_of_p3(problem: str) -> None:
    if problem == "p3":
        os._exit(1)


def test_a_problem_that_kills_two_engines_is_a_failed_row(ray_cluster, recording, tmp_path: Path) -> None:
    """With another beside it, which survives: the second try is its own."""
    problems = write_problems(tmp_path / "few.jsonl", 6)
    with (
        EnginePool(RecordedMaker(recording, on_problem=die_of_p3), 2, NEEDS, jobs_per_engine=2) as pool,
        pytest.warns(GambitWarning, match="died"),
    ):
        run_stubs(pool, tmp_path / "run", problems, 2)
        assert sum(slot.num_deaths for slot in pool.slots) == 4
    rows = list(read_rows(tmp_path / "run"))
    assert len({row.key for row in rows}) == len(rows) == 12
    failed = [row for row in rows if row.error]
    assert {(row.problem, row.stop_reason, row.correct) for row in failed} == {("p3", "failed", False)}
    assert len(failed) == 2 and all("died 2 times" in str(row.error) for row in failed)


def always_raises(engine: object, desk: JobDesk) -> None:
    raise RuntimeError("out of luck")


def refuses(engine: object, desk: JobDesk) -> None:
    raise UserError("no such option")


def no_engine() -> object:
    raise RuntimeError("no memory left")


def test_an_engine_that_raises_is_replaced_and_a_users_mistake_is_not_its_fault(ray_cluster, recording) -> None:
    with EnginePool(RecordedMaker(recording), 1, NEEDS) as pool:
        [end] = run_work(pool, [Work(refuses, "a")])
        assert end.error == "no such option" and pool.slots[0].num_deaths == 0
        with pytest.warns(GambitWarning, match="out of luck"):
            [end] = run_work(pool, [Work(always_raises, "b")])
        assert "RuntimeError: out of luck" in str(end.error) and pool.slots[0].num_deaths == 2


def test_engines_that_cannot_start_end_the_run_with_their_reason(ray_cluster, recording) -> None:
    with (
        EnginePool(no_engine, 1, NEEDS) as pool,
        pytest.warns(GambitWarning, match="no memory left"),
        pytest.raises(EngineError, match=r"3 times in a row.*no memory left"),
    ):
        list(run_work(pool, [Work(always_raises, "a")]))


# -- the driver ------------------------------------------------------------------------------------------------

NOISY = """
import sys
from gambit.bench.rows import RowWriter
write = RowWriter.write
def noisy(self, row):
    write(self, row)
    print("row", flush=True)
RowWriter.write = noisy
from gambit.cli import main
main()
"""


def cut_short(words: list[str], after_rows: int, number: signal.Signals) -> tuple[int, str]:
    """Run the command until it has written so many rows, then send the signal to it and to all that it started."""
    command = [sys.executable, "-c", NOISY, *words]
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert driver.stdout is not None
    for _ in range(after_rows):
        assert driver.stdout.readline() == "row\n"
    os.killpg(driver.pid, number)
    _, err = driver.communicate()
    return driver.returncode, " ".join(err.split())


def test_a_driver_that_is_interrupted_or_killed_is_gone_on_with(ray_cluster, local: Path, tmp_path: Path) -> None:
    folder, rng = tmp_path / "run", random.Random(3)
    ray = ["--ray", ray_cluster.address, "--engines", "2", "--no-report"]
    code, err = cut_short(["bench", *PAWN, "--out", str(folder), *ray], rng.randint(1, 3), signal.SIGINT)
    assert code == 130 and f"--resume --out {folder} --ray" in err
    begun = len(measured(folder))
    assert 1 <= begun < 8
    code, _ = cut_short(["bench", "--resume", "--out", str(folder), *ray], rng.randint(1, 2), signal.SIGKILL)
    assert code == -signal.SIGKILL and len(measured(folder)) > begun
    gambit("bench", "--resume", "--out", str(folder), *ray)
    assert measured(folder) == measured(local)
