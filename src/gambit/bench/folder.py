"""The folder of a bench run: its plan, the environments of its starts, and whether it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gambit.bench.datasets import Benchmark, benchmark_for, digest
from gambit.bench.recipe import BenchRecipe, BenchVariant, default_options, recipe_from
from gambit.bench.rows import ROWS_FILE, read_rows
from gambit.bench.stamp import UNKNOWN
from gambit.errors import UserError
from gambit.events import Json
from gambit.storage.json_file import object_in
from gambit.storage.lines import append_synced, opened_to_append, whole_lines, write_whole

FORMAT = 1
RUN_FILE = "run.json"
ENVIRONMENT_FILE = "environment.jsonl"
LOGS_FOLDER = "logs"


@dataclass(frozen=True, slots=True)
class BenchmarkInfo:
    """A benchmark as this run knows it."""

    name: str
    num_problems: int  # after --limit, in all shards together
    hash: str


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Everything a run compares, fixed before it begins; two runs with equal plans may share a folder."""

    recipe: BenchRecipe
    variants: tuple[BenchVariant, ...]
    benchmarks: tuple[BenchmarkInfo, ...]
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_tasks(self) -> int:
        """Searches of this shard."""
        number, count = self.recipe.bench.part
        problems = sum(len(range(number, info.num_problems, count)) for info in self.benchmarks)
        return problems * len(self.variants) * len(self.recipe.bench.seeds)

    def to_json(self) -> dict[str, Json]:
        """Returns the plan with every option in effect: other defaults of a later version do not change it."""
        plan = {
            "format": FORMAT,
            "recipe": {**default_options(), **self.recipe.flat()},
            "variants": [asdict(variant) for variant in self.variants],
            "benchmarks": [asdict(info) for info in self.benchmarks],
            "identity": dict(self.identity),
        }
        plain: dict[str, Json] = json.loads(json.dumps(plan))
        return plain


def make_plan(recipe: BenchRecipe, identity: Mapping[str, str]) -> tuple[BenchPlan, list[Benchmark]]:
    """Reads every benchmark once, to know how long it is and to recognise it."""
    benchmarks = [benchmark_for(name, recipe.bench.columns) for name in recipe.bench.benchmarks]
    names = [benchmark.name for benchmark in benchmarks]
    if len(set(names)) < len(names):
        raise UserError(f"two benchmarks share a name ({', '.join(names)}): rename a file")
    infos = [BenchmarkInfo(b.name, *digest(b.first(recipe.bench.limit))) for b in benchmarks]
    return BenchPlan(recipe, tuple(recipe.variants()), tuple(infos), identity), benchmarks


def read_plan(folder: Path) -> BenchPlan:
    """The plan that a folder was made with."""
    path = folder / RUN_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise UserError(f"{path}: format {raw['format']}, this version reads {FORMAT}")
        variants = tuple(BenchVariant(**{**v, "swept": tuple(v["swept"])}) for v in raw["variants"])
        recipe = recipe_from(raw["recipe"])
        return BenchPlan(recipe, variants, tuple(BenchmarkInfo(**b) for b in raw["benchmarks"]), raw["identity"])
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no {RUN_FILE}: give the folder of a `gambit bench`") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the plan of a bench run: {error}") from error


def create(folder: Path, plan: BenchPlan) -> None:
    """Begin a folder; one that holds a run already is refused."""
    if (folder / RUN_FILE).exists() or (folder / ROWS_FILE).exists():
        raise UserError(f"{folder} holds a bench run already: go on with --resume, or choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plan.to_json(), indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / RUN_FILE, text.encode())


@contextmanager
def begun(folder: Path, plan: BenchPlan) -> Iterator[None]:
    """A new folder. What fails before the first search has ended leaves none, so that the next try may use its name."""
    create(folder, plan)
    try:
        yield
    except BaseException:  # Ctrl-C while the model loads, too
        if not (folder / ROWS_FILE).is_file() or not any(read_rows(folder)):
            for name in (RUN_FILE, ROWS_FILE, ENVIRONMENT_FILE):
                (folder / name).unlink(missing_ok=True)
        raise


def check_same(folder: Path, plan: BenchPlan) -> None:
    """Refuse to add rows that could not be compared with those that are there."""
    before = read_plan(folder)
    found = list(differences(before.to_json(), _identified_as(before, plan).to_json()))
    if found:
        raise UserError(f"{folder} was made with another configuration ({'; '.join(found)}): resume with the "
                        "same, or choose another --out")  # fmt: skip


def _identified_as(before: BenchPlan, plan: BenchPlan) -> BenchPlan:
    """The plan with its model identified as the other plan does it; an unknown hash differs from none."""
    identity = plan.identity
    if UNKNOWN in (before.identity.get("model_hash"), identity.get("model_hash")):
        identity = {**identity, "model_hash": before.identity.get("model_hash", UNKNOWN)}
    elif identity.get("model_hash") == before.identity.get("model_hash"):  # the same model, wherever it lies
        identity = {**identity, "model": before.identity["model"]}
        engine = {**plan.recipe.engine, "model": before.recipe.engine.get("model", default_options()["model"])}
        plan = replace(plan, recipe=replace(plan.recipe, engine=engine))
    return replace(plan, identity=identity)


def differences(before: Json, now: Json, where: str = "") -> Iterator[str]:
    """What two plans disagree about, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            name = f"{where}.{key}" if where and where != "recipe" else key
            yield from differences(before.get(key), now.get(key), name)
    elif before != now and not where.startswith("variants"):  # those follow from the recipe
        yield f"{where}: {json.dumps(before)} there, {json.dumps(now)} now"


def add_environment(folder: Path, environment: Mapping[str, Json]) -> None:
    """One line per start of the run."""
    with opened_to_append(folder / ENVIRONMENT_FILE) as file:
        append_synced(file, json.dumps(environment, ensure_ascii=False))


def read_environments(folder: Path) -> list[dict[str, Json]]:
    path = folder / ENVIRONMENT_FILE
    what, fix = "a start of a bench run", "take that line away"
    return [object_in(line, f"{path}, line {number}", what, fix) for number, line in whole_lines(path)]


def is_complete(folder: Path, plan: BenchPlan) -> bool:
    """Whether no search is left, so that no model need be loaded."""
    return (folder / ROWS_FILE).is_file() and sum(1 for _ in read_rows(folder)) >= plan.num_tasks
