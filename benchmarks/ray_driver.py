"""Measures how many engines one driver serves: its work per problem with stub engines, and a simulation of 1 to 256.

The stubs give a recorded search of a pool of 64 with its log, so that the driver does all that it does in a bench run:
hands out the problem, takes in the result, writes log, result and row.

    python benchmarks/ray_driver.py --out benchmarks/results/ray_driver.json
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import pickle
import queue
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.recorded_engines import Chatter, RecordedMaker, recorded

from gambit.bench.folder import create, make_plan, source_commit
from gambit.bench.recipe import recipe_from
from gambit.bench.rows import RowWriter, read_rows
from gambit.bench.run import BenchEngine, RaySearches, Runner
from gambit.cluster.actor import NEWS_SECONDS
from gambit.cluster.engines import EnginePool
from gambit.cluster.plan import ClusterPlan, EngineNeeds, connected
from gambit.cluster.work import WorkQueue
from gambit.config.options import SearchConfig
from gambit.pawn.puzzles import Split, generate
from gambit.solver import Solver

POOL = 64
NUM_NEWS = 200
NUM_ENGINES = 2  # processes of stubs: this machine has few cores, and what is measured is the driver
IN_FLIGHT = (2, 16, 64, 256)  # problems at a time, spread over them
SIZES = tuple(2**power for power in range(12))
LONG_LOG = 4 << 20  # bytes, about what 64 traces of 10,000 tokens write
SECONDS_A_PROBLEM = 10.0
BUSY = 0.95  # of the engines' time: below it the driver holds them up


# -- the driver ------------------------------------------------------------------------------------------------


def write_problems(path: Path, count: int) -> Path:
    lines = [json.dumps({"id": f"p{i}", "question": f"a = {i}; a?", "answer": str(i)}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run_bench(pool: EnginePool[BenchEngine], folder: Path, problems: Path, in_flight: int) -> None:
    """A bench run with the stubs of a pool."""
    options = {"benchmarks": [str(problems)], "policies": ["gambit"], "capacity": POOL, "concurrency": in_flight}
    plan, benchmarks = make_plan(recipe_from(options), {})
    create(folder, plan)
    with RowWriter(folder) as writer:
        Runner(plan, benchmarks, RaySearches(pool, folder), writer, set()).run()


def measure_driver(recording: bytes, scratch: Path, num_problems: int) -> list[dict[str, float]]:
    """Its seconds a problem, by how many problems are under way."""
    return [_measured(recording, scratch, in_flight, max(num_problems, 2 * in_flight)) for in_flight in IN_FLIGHT]


def _measured(recording: bytes, scratch: Path, in_flight: int, count: int, padding: int = 0) -> dict[str, float]:
    each = in_flight // NUM_ENGINES
    problems = write_problems(scratch / f"problems-{in_flight}-{padding}.jsonl", count)
    maker = RecordedMaker(recording, padding=padding)
    with EnginePool(maker, NUM_ENGINES, EngineNeeds(cpus=0.5), jobs_per_engine=each) as pool:
        pool.call_one(type)
        clock = DriverClock()
        folder = scratch / f"run-{in_flight}-{padding}"
        run_bench(pool, folder, problems, each)
        found = {"in_flight": in_flight, "problems": count, **clock.read(count)}
    rows = sum(1 for _ in read_rows(folder))
    assert rows == count, f"{rows} rows of {count} problems"
    print(found, flush=True)
    return found


def measure_news(recording: bytes) -> float:
    """The driver's seconds for a message of a job that goes on."""
    with EnginePool(RecordedMaker(recording), NUM_ENGINES, EngineNeeds(cpus=0.5)) as pool:
        pool.call_one(type)
        clock, heard, ends = DriverClock(), [], queue.SimpleQueue()
        for slot in pool.wait():
            pool.begin(slot, Chatter(NUM_NEWS), heard.append, ends.put, news_seconds=0.001)
        for _ in range(NUM_ENGINES):
            ends.get()
        assert len(heard) == NUM_ENGINES * NUM_NEWS
        found = clock.read(len(heard))
    print({"news": found}, flush=True)
    return found["cpu_seconds_a_problem"]


class DriverClock:
    """The work of a driver beside waiting for messages."""

    def __init__(self) -> None:
        self._waited = 0.0
        self._began, self._cpu = time.perf_counter(), time.process_time()
        arrived = WorkQueue._arrived

        def timed(shift: WorkQueue[object], seconds: float) -> object:
            began = time.perf_counter()
            try:
                return arrived(shift, seconds)
            finally:
                self._waited += time.perf_counter() - began

        WorkQueue._arrived = timed  # type: ignore[method-assign,assignment]

    def read(self, count: int) -> dict[str, float]:
        wall = time.perf_counter() - self._began
        return {
            "cpu_seconds_a_problem": (time.process_time() - self._cpu) / count,
            "work_seconds_a_problem": (wall - self._waited) / count,
            "wall_seconds_a_problem": wall / count,
        }


# -- the simulation --------------------------------------------------------------------------------------------


def simulated(num_engines: int, seconds: float, driver: float, news: float, spread: float, seed: int = 0) -> float:
    """The share of their time for which engines search, where one driver serves them first come, first served.

    Searches take `seconds` on average, give or take a log-normal `spread`; each costs `driver` seconds at its end, and
    `news` seconds every NEWS_SECONDS before.
    """
    rng = random.Random(seed)
    length = (seconds * rng.lognormvariate(-spread * spread / 2, spread) for _ in itertools.count())
    calls: list[tuple[float, int, int, float]] = []  # when, which engine, in which order, how long the search still is
    order = itertools.count()

    def go_on(at: float, engine: int, left: float) -> None:
        until = min(left, NEWS_SECONDS)
        heapq.heappush(calls, (at + until, next(order), engine, left - until))

    for engine in range(num_engines):
        go_on(0.0, engine, next(length) * rng.random())  # in the middle of something
    free_at, searched, end = 0.0, 0.0, 50 * seconds
    while calls[0][0] < end:
        at, _, engine, left = heapq.heappop(calls)
        free_at = max(at, free_at) + (news if left else driver)
        if left:  # a message keeps nobody waiting but the driver
            go_on(at, engine, left)
        else:
            begun = next(length)
            searched += begun
            go_on(free_at, engine, begun)
    return min(1.0, searched / (num_engines * end))


def scale(seconds: float, driver: float, news: float, spread: float) -> list[dict[str, float]]:
    rows = []
    for size in SIZES:
        busy = simulated(size, seconds, driver, news, spread)
        rows.append({"engines": size, "busy": round(busy, 4), "problems_a_second": round(size * busy / seconds, 3)})
    return rows


def most_engines(seconds: float, driver: float, news: float, spread: float) -> int:
    """Returns the most engines that are still busy for BUSY of their time."""
    high = 1
    while simulated(high, seconds, driver, news, spread) >= BUSY:
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        if simulated(middle, seconds, driver, news, spread) >= BUSY:
            low = middle
        else:
            high = middle
    return low


# -- all of it -------------------------------------------------------------------------------------------------


def problem_seconds(solver: Solver, count: int) -> list[float]:
    puzzles = itertools.islice(generate(Split.DEV, 0), count)
    return [solver.solve(puzzle.text, SearchConfig(capacity=POOL)).seconds.total for puzzle in puzzles]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ray_driver.json"))
    parser.add_argument("--problems", type=int, default=200)
    options = parser.parse_args()
    with Solver("pawn") as solver:
        recording = recorded(POOL, solver)
        times = problem_seconds(solver, 8)
    with tempfile.TemporaryDirectory() as scratch, connected(ClusterPlan(engines=NUM_ENGINES)):
        measured = measure_driver(recording, Path(scratch), options.problems)
        news = measure_news(recording)
        long_log = _measured(recording, Path(scratch), IN_FLIGHT[1], options.problems, LONG_LOG)
    # The worst of all sizes, of work and of processor time: Ray's own threads count too.
    driver = max(max(each["cpu_seconds_a_problem"], each["work_seconds_a_problem"]) for each in measured)
    spread = statistics.pstdev(times) / statistics.fmean(times)
    found = {
        "commit": source_commit(),
        "cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        "recording": {"pool": POOL, "events": len(pickle.loads(recording).events), "pickled_bytes": len(recording)},
        "pawn_seconds_a_problem": [round(each, 3) for each in times],
        "driver": measured,
        "driver_seconds_a_problem": driver,
        "with_a_log_of_4_MiB": long_log,
        "driver_seconds_a_message": news,
        "seconds_between_messages": NEWS_SECONDS,
        "at_10_seconds": scale(SECONDS_A_PROBLEM, driver, news, spread),
        "at_pawns_seconds": scale(statistics.fmean(times), driver, news, spread),
        "most_engines_at_10_seconds": most_engines(SECONDS_A_PROBLEM, driver, news, spread),
        "busy": BUSY,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        json.dumps(
            {
                key: found[key]
                for key in ("driver_seconds_a_problem", "driver_seconds_a_message", "most_engines_at_10_seconds")
            }
        )
    )


if __name__ == "__main__":
    main()
