"""Does trust in the scorer pay? Gambit beside plain voting on pawn, with the shipped scorer and with worse ones.

    python benchmarks/islands_noise.py --out runs/islands_noise --prepare          # the worse scorers, once, minutes
    python benchmarks/islands_noise.py --out runs/islands_noise --workers 16 --seconds 780
    python benchmarks/islands_noise.py --out runs/islands_noise --table            # of what is there

Worse scorers are the shipped one with noise on its logit (`noisy_scorer.py`), as much as lowers its within-problem AUC
at half-way to a target on development puzzles. Each is searched with twice: with its own figures in its checkpoint, and
with the shipped scorer's, which is trust in the wrong scorer. All settings are the defaults but for the pool of 64.

Searches run in worker processes of one thread each, seed by seed and the most important first. A second call goes on
where the first ended. Methods that come out with the same settings for the same weights share their searches. Plain
voting is run once for a seed, and its traces are counted in several ways; in an ample KV cache STEP prunes nothing, so
that its vote is one of these. Intervals are paired 95 % bootstraps over puzzles, seeds averaged inside each.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TYPE_CHECKING

from gambit import SearchConfig, Solver
from gambit import events as ev
from gambit.config.presets import resolve
from gambit.models import files as models
from gambit.pawn.puzzles import Puzzle, Split, generate
from gambit.results.record import SearchRecord, fold
from gambit.results.vote import VoteKind
from gambit.scorers.checkpoint import load_checkpoint
from gambit.search.choice import load_policy
from gambit.stats import Interval, mean_interval, resamples
from gambit.tree import TraceState
from gambit.types import Problem, StatePosition

if TYPE_CHECKING:
    import numpy as np

    from gambit.training.dataset import Dataset

TARGETS = (0.75, 0.65, 0.55, 0.5)  # AUC at half-way
SHIPPED = "shipped"
CAPACITY = 64
ROOM = 16_384  # tokens of KV cache to a search: nothing has to go
CONTEXT = 1024
JUDGING_TRACES = 32
VOTES = {
    "sc": VoteKind.MAJORITY,
    "sc, score vote (STEP)": VoteKind.SCORE,
    "sc, position vote": VoteKind.POSITION,
    "best-of-n": VoteKind.BEST,
}


# -- the scorers -----------------------------------------------------------------------------------------------


def prepare(out: Path, model: str, num_puzzles: int, device: str) -> None:
    """Collect development puzzles, judge the shipped scorer on them, and write the worse ones."""
    import torch

    from gambit.scorers.checkpoint import save_checkpoint
    from gambit.scorers.mlp import MlpScorer
    from gambit.training.evaluate import evaluate, trust_of
    from noisy_scorer import noise_for, trusted_as, with_noise

    data = development_data(out / "development", model, num_puzzles, device)
    path = models.side_file(models.locate(model), models.SCORER_FILE)
    assert path is not None, f"{model} ships no scorer"
    shipped = load_checkpoint(path)
    assert isinstance(shipped, MlpScorer), "noise is added to a two-layer scorer"

    def judged(scorer: MlpScorer) -> MlpScorer:
        report = evaluate({"this": (scorer, data)}, data.all_traces(), torch.device("cpu"))
        return MlpScorer(dataclasses.replace(scorer.info, trust=trust_of(report, "this")), scorer.weights)

    best = judged(shipped)
    made: dict[str, tuple[MlpScorer, float]] = {SHIPPED: (best, 0.0)}
    for target in TARGETS:
        noise = noise_for(shipped, data, max(target, 0.505))  # 0.5 itself takes any noise from some point on
        if noise:
            worse = judged(with_noise(shipped, data.states.float(), noise))
            made[f"{target:g}, true trust"] = worse, noise
            made[f"{target:g}, wrong trust"] = trusted_as(worse, best), noise
    folder = out / "scorers"
    for name, (scorer, noise) in made.items():
        save_checkpoint(scorer, folder / f"{name}.safetensors", {"training": {"noise": noise}})
        assert scorer.info.trust is not None
        print(f"{name:20} noise {noise:6.2f}  trusted as AUC {[round(auc, 3) for auc in scorer.info.trust.auc]}")


def development_data(folder: Path, model: str, num_puzzles: int, device: str) -> Dataset:
    from gambit.config.options import EngineConfig
    from gambit.training.collect import CollectPlan, collect
    from gambit.training.dataset import load_dataset
    from gambit.training.sampling import pawn_tasks

    engine = EngineConfig(model=model, engine="local", device=device, kv_budget_tokens=4 * ROOM)
    plan = CollectPlan(
        folder, "pawn:dev", engine, SearchConfig(), JUDGING_TRACES, 4 * JUDGING_TRACES,
        positions=(StatePosition.BOUNDARY,), with_confidence=False,
    )  # fmt: skip
    collect(pawn_tasks("dev", num_puzzles, 0), plan)
    return load_dataset(folder, StatePosition.BOUNDARY)


# -- what is to be run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table: a scorer's checkpoint and options, all others left as they are."""

    name: str
    scorer: str
    options: tuple[tuple[str, str | int], ...] = ()

    def config(self, seed: int) -> SearchConfig:
        return SearchConfig(capacity=CAPACITY, seed=seed, own_noise=True, **dict(self.options))  # type: ignore[arg-type]

    def searches(self, out: Path, model: str) -> str:
        """Returns weights and settings, which decide the searches: methods that agree in both share them."""
        source = models.locate(model)
        info = load_checkpoint(scorer_file(out, self.scorer)).info
        defaults = models.defaults_of(source)
        settings, _ = resolve(self.config(0), defaults, CONTEXT, is_probability=info.is_probability, trust=info.trust)
        weights = self.scorer.partition(",")[0]
        doubt = " in doubt" if settings.doubt is not None else ""
        margin = f" margin={settings.pool.swap_margin:g}" if settings.pool.swap_margin else ""
        shape = f"M={settings.pool.islands} K={settings.pool.swap_size} w={settings.pool.warmup_tokens}{margin}{doubt}"
        return f"{settings.policy} {shape}, scorer {weights}" if settings.policy == "gambit" else settings.policy


def scorer_file(out: Path, name: str) -> Path:
    return out / "scorers" / f"{name}.safetensors"


def all_methods(out: Path, with_grid: bool) -> list[Method]:
    """The most important first."""
    found = sorted(path.stem for path in (out / "scorers").glob("*.safetensors"))
    worse = sorted((name for name in found if name != SHIPPED), key=lambda name: (float(name.partition(",")[0]), name))
    levels = list(dict.fromkeys(name.partition(",")[0] for name in worse))
    methods = [
        Method("sc", SHIPPED, (("policy", "sc"),)),
        Method("gambit, shipped", SHIPPED),
        Method("1 island, shipped", SHIPPED, (("islands", 1),)),
        *(Method(f"gambit, AUC {name}", name) for name in worse),
    ]
    grid = [(level, count) for level in [*levels, SHIPPED] for count in (1, 4, 8, 16, 32)] if with_grid else []
    for level, count in grid:
        name = level if level == SHIPPED else f"{level}, true trust"
        methods.append(Method(f"{count} islands, AUC {level}", name, (("islands", count),)))
    return methods


@dataclass(frozen=True, slots=True)
class Batch:
    """Searches that one worker runs side by side."""

    key: str
    method: Method
    seed: int
    puzzles: tuple[int, ...]


def batches(
    methods: Sequence[Method], keys: Mapping[str, str], done: set[tuple[str, int, int]], options: argparse.Namespace
) -> Iterator[Batch]:
    for seed in range(options.seeds):
        for key, group in itertools.groupby(methods, key=lambda method: keys[method.name]):
            method = next(group)
            left = [number for number in range(options.puzzles) if (key, seed, number) not in done]
            done |= {(key, seed, number) for number in left}  # of another method with the same searches
            for start in range(0, len(left), options.concurrency):
                yield Batch(key, method, seed, tuple(left[start : start + options.concurrency]))


# -- the workers -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Worker:
    """One process; keeps the solver of its last scorer."""

    out: Path
    options: argparse.Namespace
    ends: float
    puzzles: tuple[Puzzle, ...]
    scorer: str | None = None
    solver: Solver | None = None

    def run(self, todo: Sequence[Batch], taken: Synchronized[int]) -> None:
        with (self.out / f"rows-{os.getpid()}-{int(time.time())}.jsonl").open("a", buffering=1) as rows:
            while time.time() < self.ends:
                with taken.get_lock():
                    place, taken.value = taken.value, taken.value + 1
                if place >= len(todo):
                    return
                for row in self.search(todo[place]):
                    rows.write(json.dumps(row) + "\n")

    def search(self, batch: Batch) -> Iterator[dict[str, object]]:
        solver = self.solver_for(batch.method.scorer)
        logs: dict[str, list[ev.Event]] = defaultdict(list)
        problems = [Problem(self.puzzles[number].text, id=str(number)) for number in batch.puzzles]
        for result in solver.solve_many(
            problems,
            batch.method.config(batch.seed),
            concurrency=self.options.concurrency,
            on_event=lambda name, event: logs[name].append(event),
            should_stop=lambda: time.time() > self.ends,
        ):
            events = logs.pop(result.problem_id)
            assert not any(map(is_pressure, events)), "the KV cache was meant to be ample"
            record = fold(events)
            if result.error is None and result.stop_reason in ("completed", "exhausted"):
                yield row_of(batch, record, self.puzzles[int(result.problem_id)])

    def solver_for(self, scorer: str) -> Solver:
        if self.solver is None or self.scorer != scorer:
            if self.solver is not None:
                self.solver.close()
            self.solver = Solver(
                self.options.model, scorer=str(scorer_file(self.out, scorer)), engine="local",
                device=self.options.device, kv_budget_tokens=ROOM * self.options.concurrency,
            )  # fmt: skip
            self.scorer = scorer
        return self.solver


def is_pressure(event: ev.Event) -> bool:
    return isinstance(event, ev.Queued) or (isinstance(event, ev.Evicted | ev.Pruned) and event.reason == "pressure")


def row_of(batch: Batch, record: SearchRecord, puzzle: Puzzle) -> dict[str, object]:
    """A search's figures, its traces counted in every way."""
    settings = record.started.settings
    hits = [is_right(trace.answer, puzzle) for trace in record.tree.in_state(TraceState.FINISHED)]
    return {
        "searches": batch.key,
        "seed": batch.seed,
        "puzzle": int(record.started.problem_id),
        "right": {str(kind): is_right(voted(record, kind), puzzle) for kind in VOTES.values()},
        "one_trace_right": sum(hits) / max(1, len(hits)),
        "tokens": record.tokens.generated,
        "completed": record.counts.completed,
        "seconds": record.seconds.total,
        "settings": {name: settings[name] for name in ("islands", "swap_size", "warmup_tokens", "why")},
        "islands": record.num_islands,
    }


def is_right(answer: str | None, puzzle: Puzzle) -> bool:
    return answer is not None and answer.strip().isdigit() and int(answer) == puzzle.answer


def voted(record: SearchRecord, kind: VoteKind) -> str | None:
    other = dataclasses.replace(record, started=dataclasses.replace(record.started, vote=kind.value))
    other.tree = record.tree
    return other.vote(lambda a, b: a == b).answer


def work(out: Path, options: argparse.Namespace, ends: float, todo: Sequence[Batch], taken: Synchronized[int]) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    puzzles = tuple(itertools.islice(generate(Split[options.split.upper()], seed=0), options.puzzles))
    Worker(out, options, ends, puzzles).run(todo, taken)


def run(out: Path, methods: Sequence[Method], keys: Mapping[str, str], options: argparse.Namespace) -> None:
    ends = time.time() + options.seconds
    todo = list(batches(methods, keys, {(r["searches"], r["seed"], r["puzzle"]) for r in read_rows(out)}, options))
    print(f"{sum(len(batch.puzzles) for batch in todo)} searches to run with {options.workers} workers", flush=True)
    context = multiprocessing.get_context("spawn")
    taken = context.Value("i", 0)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the children: torch reads it when it starts
    workers = [context.Process(target=work, args=(out, options, ends, todo, taken)) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed := [worker.exitcode for worker in workers if worker.exitcode]:
        raise SystemExit(f"workers failed with {failed}: what the others found is kept")


# -- the table -------------------------------------------------------------------------------------------------


def read_rows(out: Path) -> list[dict[str, object]]:
    """A line that a kill cut short is left out, and run again."""
    lines = (line for path in sorted(out.glob("rows-*.jsonl")) for line in path.read_text().splitlines(keepends=True))
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Results:
    """Rows by method; a method's name is a label of its searches and of a way to vote."""

    def __init__(self, rows: Sequence[dict[str, object]], methods: Sequence[Method], keys: Mapping[str, str]) -> None:
        by_searches: dict[str, list[dict[str, object]]] = defaultdict(list)
        for row in rows:
            by_searches[row["searches"]].append(row)  # type: ignore[index]
        self.rows: dict[str, dict[tuple[int, int], dict[str, object]]] = {}
        self.votes: dict[str, str] = {}
        for method in methods:
            found = {(row["puzzle"], row["seed"]): row for row in by_searches[keys[method.name]]}
            usual = [(method.name, load_policy("gambit").default_vote)]  # rows are counted in every way
            for name, vote in VOTES.items() if method.name == "sc" else usual:
                if found:
                    self.rows[name], self.votes[name] = found, str(vote)  # type: ignore[assignment]

    def column(self, name: str, what: str, wanted: Sequence[tuple[int, int]]) -> np.ndarray:
        """Per puzzle, seeds averaged."""
        import numpy as np

        found: dict[int, list[float]] = defaultdict(list)
        for key in wanted:
            row = self.rows[name][key]
            found[key[0]].append(float(row["right"][self.votes[name]] if what == "right" else row[what]))  # type: ignore
        return np.array([np.mean(found[puzzle]) for puzzle in sorted(found)])

    def compared(self, name: str, base: str) -> dict[str, object]:
        """The share right, and its difference to another method's on the searches that both have."""
        own = sorted(self.rows[name])
        both = sorted(set(own) & set(self.rows[base]))
        right = self.column(name, "right", own)
        gain = self.column(name, "right", both) - self.column(base, "right", both)
        return {
            "searches": len(own),
            "accuracy": percent(mean_interval(right, resamples(len(right)))),
            f"against {base}": percent(mean_interval(gain, resamples(len(gain)))) if len(gain) else None,
            "one_trace_right": round(100 * float(self.column(name, "one_trace_right", own).mean()), 1),
            "tokens_against_sc": self.tokens_ratio(name),
            "voted_otherwise": {str(kind): self.share_right(name, str(kind)) for kind in VOTES.values()},
            "settings": next(iter(self.rows[name].values()))["settings"],
            "islands": dict(Counter(str(row["islands"]) for row in self.rows[name].values())),  # doubt splits them
        }

    def share_right(self, name: str, vote: str) -> float:
        """Returns the accuracy of the same traces under another vote, in per cent."""
        hits = [float(row["right"][vote]) for row in self.rows[name].values()]  # type: ignore[index]
        return round(100 * sum(hits) / len(hits), 1)

    def tokens_ratio(self, name: str) -> float | None:
        both = sorted(set(self.rows[name]) & set(self.rows.get("sc", {})))
        if not both:
            return None
        return round(float(self.column(name, "tokens", both).sum() / self.column("sc", "tokens", both).sum()), 3)


def percent(found: Interval) -> list[float]:
    return [round(100 * value, 1) for value in (found.value, found.low, found.high)]


def table(out: Path, methods: Sequence[Method], keys: Mapping[str, str], options: argparse.Namespace) -> None:
    rows = read_rows(out)
    results = Results(rows, methods, keys)
    figures = {name: results.compared(name, "sc") for name in results.rows if "sc" in results.rows}
    print(f"{'method':32} {'n':>5} {'right %':>22} {'against sc':>22} {'one':>6} {'tokens':>7}  M, K, w")
    for name, found in figures.items():
        pool = found["settings"]
        assert isinstance(pool, dict)
        shape = "" if name in VOTES else f"{pool['islands']}, {pool['swap_size']}, {pool['warmup_tokens']}"
        print(f"{name:32} {found['searches']:>5} {shown(found['accuracy']):>22} {shown(found['against sc']):>22} "
              f"{found['one_trace_right']:>6} {found['tokens_against_sc']:>7}  {shape}")  # fmt: skip
    print("the same traces by majority, score, position, best:")
    for name, found in figures.items():
        if name == "sc" or name not in VOTES:
            print(f"{name:32} {found['voted_otherwise']}")
    others = compared_with_the_best(results)
    for name, found in others.items():
        print(f"gambit, shipped, against {name}: {shown(found)}")
    seconds = [float(row["seconds"]) for row in rows]  # type: ignore[arg-type]
    summary = {
        "what": __doc__.splitlines()[0] if __doc__ else "",
        "options": {
            name: getattr(options, name) for name in ("model", "split", "puzzles", "seeds", "concurrency", "device")
        },
        "scorers": {path.stem: trust_json(path) for path in sorted((out / "scorers").glob("*.safetensors"))},
        "methods": figures,
        "gambit, shipped, against": others,
        "mean_search_seconds": sum(seconds) / max(1, len(seconds)),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def compared_with_the_best(results: Results) -> dict[str, list[float] | None]:
    name = "gambit, shipped"
    if name not in results.rows:
        return {}
    others = [other for other in (*VOTES, "1 island, shipped") if other in results.rows]
    return {other: results.compared(name, other)[f"against {other}"] for other in others}  # type: ignore[misc]


def trust_json(path: Path) -> object:
    trust = load_checkpoint(path).info.trust
    return None if trust is None else trust.to_json()


def shown(found: object) -> str:
    if not isinstance(found, list):
        return "–"
    value, low, high = found
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of scorers, rows and summary.json")
    parser.add_argument("--prepare", action="store_true", help="only make the worse scorers")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0, help="no search begins later; what runs then is lost")
    parser.add_argument("--model", default="pawn")
    parser.add_argument("--split", choices=["test", "dev"], default="test")
    parser.add_argument("--puzzles", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--judging-puzzles", type=int, default=60, help="development puzzles for the AUCs")
    parser.add_argument("--concurrency", type=int, default=4, help="searches of a worker side by side; 50 on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help="plain voting and what has this in its name, as in 'AUC 0.65, true trust'")
    parser.add_argument("--grid", action="store_true", help="also 1, 4, 8, 16 and 32 islands at every level, last")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.prepare or not (options.out / "scorers").is_dir():
        prepare(options.out, options.model, options.judging_puzzles, options.device)
    if options.prepare:
        return
    methods = all_methods(options.out, options.grid)
    if options.only is not None:
        methods = [method for method in methods if method.name == "sc" or options.only in method.name]
    keys = {method.name: method.searches(options.out, options.model) for method in methods}
    if not options.table:
        run(options.out, methods, keys, options)
    table(options.out, methods, keys, options)


if __name__ == "__main__":
    main()
