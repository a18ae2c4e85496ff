"""Bench runs on a tiny model: rows, resuming, kills, failures, shards; and a report's figures against the raw logs."""

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

from gambit.bench.folder import create, make_plan
from gambit.bench.recipe import recipe_from
from gambit.bench.rows import Row, RowWriter, read_rows
from gambit.bench.run import LocalSearches, Runner
from gambit.cli.app import app
from gambit.errors import DeadEngineError, EngineError, GambitError
from gambit.solver import Solver

pytestmark = pytest.mark.system
SMALL = {
    "scorer": "constant", "engine": "local", "capacity": "6", "check_interval": "4", "warmup_tokens": "4",
    "max_new_tokens": "40", "kv_budget_tokens": "160",
}  # fmt: skip
QUESTIONS = ["a=1", "b=2+a", "a=3", "c=4", "d=5*5", "e=6-1"]


def flags(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), value)]


def bench(*words: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["bench", *words])
    assert "Traceback" not in result.output, result.output
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problems") / "sums.jsonl"
    golds = ["7", "8", "7", "7", "8", "7"]
    lines = [{"id": f"p{i}", "question": q, "answer": a} for i, (q, a) in enumerate(zip(QUESTIONS, golds, strict=True))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def base(tiny_folder: Path, problems: Path) -> list[str]:
    return ["--model", str(tiny_folder), "--benchmark", str(problems), *flags(SMALL)]


@pytest.fixture(scope="module")
def whole(base: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run with two seeds, with logs and a report."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    code, out, err = bench(*base, "--seeds", "0,1", "--out", str(folder))
    assert code == 0, err
    assert "accuracy %" in out and "report.html" in out
    *_, last = re.findall(r"(\d+)/24 sums p\d, (?:sc|gambit): (?:right|wrong), [\d,]+ tokens", err)
    assert last == "24", "a line for each search where nothing is live"
    return folder


@pytest.fixture(scope="module")
def solver(tiny_folder: Path):
    with Solver(str(tiny_folder), scorer="constant", engine="local", kv_budget_tokens=160) as found:
        yield found


def measured(folder: Path) -> dict[tuple, dict]:
    """Rows without what a clock says."""
    found = {}
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        key = (row["variant"], row["benchmark"], row["problem"], row["seed"])
        assert key not in found, f"{key} is there twice"
        del row["began"], row["seconds"], row["waited_seconds"], row["series"]["seconds"]
        found[key] = row
    return found


# -- rows ------------------------------------------------------------------------------------------------------


def test_every_search_has_one_row_and_its_log(whole: Path) -> None:
    rows = list(read_rows(whole))
    assert len(rows) == 2 * 6 * 2 and len({row.key for row in rows}) == 24
    assert {row.variant for row in rows} == {"sc", "gambit"} and {row.seed for row in rows} == {0, 1}
    for row in rows:
        assert row.log is not None and (whole / row.log).is_file() and not Path(row.log).is_absolute()
        assert row.correct == (row.answer == row.gold)
    assert any(row.queued for row in rows if row.variant == "sc"), "the room is meant to be too small"


def test_right_traces_count_whether_they_may_vote_or_not(base: list[str], tmp_path: Path) -> None:
    """DeepConf lets only the surest vote."""
    run = tmp_path / "run"
    bench(*base, "--policies", "deepconf", "--policy-option", "warmup_traces=2", "--out", str(run), "--no-report")
    seen = []
    for row in read_rows(run):
        lines = [json.loads(line) for line in (run / row.log).read_text().splitlines()]
        right = sum(line["event"] == "Finished" and line["answer"] == row.gold for line in lines)
        [voted] = [line for line in lines if line["event"] == "Voted"]
        voting = sum(entry["traces"] for entry in voted["votes"] if entry["answer"] == row.gold)
        assert row.right_traces == right
        seen.append((right, voting))
    assert any(right > voting for right, voting in seen), "some right traces have no vote here"


def test_a_row_survives_its_json(whole: Path) -> None:
    for row in read_rows(whole):
        assert Row.from_json(row.to_json()) == row


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_last_line_is_dropped_and_the_rest_kept(whole: Path, tmp_path: Path, cut: int) -> None:
    content = (whole / "rows.jsonl").read_bytes()
    (tmp_path / "rows.jsonl").write_bytes(content[:-cut])
    with RowWriter(tmp_path):
        pass
    kept = (tmp_path / "rows.jsonl").read_bytes()
    assert kept == b"".join(content.splitlines(keepends=True)[:-1])


def test_a_seed_goes_through_all_benchmarks_before_the_next(base: list[str], problems: Path, tmp_path: Path) -> None:
    """A run that is cut short then has every problem once rather than some twice."""
    second = tmp_path / "second.jsonl"
    second.write_text("".join(problems.read_text().splitlines(keepends=True)[:2]))
    bench(*base, "--benchmark", str(second), "--seeds", "0,1", "--limit", "2", "--policies", "sc", "--no-report",
          "--no-logs", "--out", str(tmp_path / "run"))  # fmt: skip
    order = [(row.seed, row.benchmark) for row in read_rows(tmp_path / "run")]
    first = problems.stem
    assert order == [(0, first)] * 2 + [(0, "second")] * 2 + [(1, first)] * 2 + [(1, "second")] * 2


def test_methods_take_turns_block_by_block(base: list[str], tmp_path: Path) -> None:
    bench(*base, "--block", "2", "--out", str(tmp_path / "run"), "--no-report", "--no-logs")
    order = [row.variant for row in read_rows(tmp_path / "run")]
    assert order == ["sc"] * 2 + ["gambit"] * 4 + ["sc"] * 4 + ["gambit"] * 2


def test_another_shard_begins_with_another_method(base: list[str], tmp_path: Path) -> None:
    """Or the same one would find every engine cold."""
    bench(*base, "--shard", "2/6", "--out", str(tmp_path / "run"), "--no-report", "--no-logs")
    assert [row.variant for row in read_rows(tmp_path / "run")] == ["gambit", "sc"]


def test_concurrency_and_missing_logs_change_no_metric(whole: Path, base: list[str], tmp_path: Path) -> None:
    """Without memory pressure, which several searches in one engine share."""
    free = [*base, "--kv-budget-tokens", "100000", "--no-report"]
    bench(*free, "--out", str(tmp_path / "one"))
    bench(*free, "--out", str(tmp_path / "four"), "--concurrency", "4", "--no-logs")
    one, four = measured(tmp_path / "one"), measured(tmp_path / "four")
    assert not (tmp_path / "four" / "logs").exists()
    for key, row in one.items():
        shared = {k: v for k, v in row.items() if k not in ("log", "kv_peak", "series")}
        assert shared == {k: four[key][k] for k in shared}


def test_the_stamp_names_versions_model_hash_and_device(whole: Path) -> None:
    [stamp] = [json.loads(line) for line in (whole / "environment.jsonl").read_text().splitlines()]
    assert stamp["packages"]["torch"] and stamp["engine"]["kv_capacity_tokens"] == 160
    assert len(stamp["identity"]["model_hash"]) == 16 and stamp["device"] and "time" in stamp


# -- resuming --------------------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_goes_on_where_it_was(
    whole: Path, base: list[str], tmp_path: Path, solver: Solver, tiny_folder: Path, problems: Path
) -> None:
    options = {"model": str(tiny_folder), "benchmarks": [str(problems)], "seeds": [0, 1], **SMALL}
    from gambit.bench.folder import identity_of

    plan, benchmarks = make_plan(recipe_from(options), identity_of(str(tiny_folder), "constant"))
    folder = tmp_path / "run"
    create(folder, plan)
    kept: list[Row] = []
    with RowWriter(folder) as writer:
        searches = LocalSearches(solver, folder, should_stop=lambda: len(kept) >= 7)
        Runner(plan, benchmarks, searches, writer, set(), on_row=kept.append).run()
    assert len(list(read_rows(folder))) == 7
    code, _, err = bench("--resume", "--out", str(folder), "--no-report")
    assert code == 0, err
    assert measured(folder) == measured(whole)
    assert len((folder / "environment.jsonl").read_text().splitlines()) == 1  # the stamp of the command's start


def test_another_configuration_is_refused_and_the_difference_named(whole: Path, tiny_folder: Path) -> None:
    before = (whole / "rows.jsonl").read_bytes()
    code, _, err = bench("--resume", "--out", str(whole), "--capacity", "8", "--seeds", "0,2")
    assert code == 2 and "capacity: 6 there, 8 now" in err and "seeds: [0, 1] there, [0, 2] now" in err
    code, _, err = bench("--resume", "--out", str(whole), "--scorer", "confidence")
    assert code == 2 and 'scorer: "constant" there, "confidence" now' in err
    assert (whole / "rows.jsonl").read_bytes() == before


def test_options_of_a_policy_are_laid_over_the_recipes_one_by_one(base: list[str], tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text("policies: [deepconf]\nlimit: 1\npolicy_options:\n  warmup_traces: 2\n  window_tokens: 9\n")
    option = ("--policy-option", "window_tokens=4")
    code, _, err = bench(*base, "--recipe", str(recipe), *option, "--no-report", "--out", str(folder))
    assert code == 0, err
    options = json.loads((folder / "run.json").read_text())["recipe"]["policy_options"]
    assert options == {"warmup_traces": 2, "window_tokens": 4}
    code, _, err = bench("--resume", "--out", str(folder), *option, "--no-report")
    assert code == 0, err  # given again, it contradicts nothing


def test_another_model_in_the_same_folder_is_noticed(whole: Path, tiny_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    text = (folder / "run.json").read_text().replace(str(tiny_folder), str(model))
    (folder / "run.json").write_text(text)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, err = bench("--resume", "--out", str(folder), "--no-report")
    assert code == 2 and "identity.model_hash" in err


def test_a_folder_in_use_or_taken_is_refused(whole: Path, base: list[str]) -> None:
    code, _, err = bench(*base, "--out", str(whole))
    assert code == 2 and "--resume" in err
    code, _, err = bench(*base, "--resume")
    assert code == 2 and "--out" in err


def test_a_finished_run_resumes_to_nothing(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    code, _, err = bench("--resume", "--out", str(folder), "--no-report")
    assert code == 0, err
    assert (folder / "rows.jsonl").read_bytes() == (whole / "rows.jsonl").read_bytes()


OWN = """
from gambit.policies.baselines import SelfConsistency

class Mine(SelfConsistency):
    \"\"\"Self-consistency by another name.\"\"\"
    name = "mine"

class Broken(Mine):
    def decide(self, state, view):
        return {}[7]
"""
OWN_SCORER = """
import torch
from gambit.scorers.base import ScorerInfo

class Flat:
    info = ScorerInfo("flat")
    def to(self, device):
        return self
    def score(self, thoughts):
        return torch.full((len(thoughts.states),), 0.5)
"""


def test_a_finished_run_takes_further_methods_problems_and_seeds(base: list[str], tmp_path: Path) -> None:
    run, at_once = tmp_path / "run", tmp_path / "at_once"
    assert bench(*base, "--limit", "2", "--policies", "sc", "--out", str(run), "--no-report")[0] == 0
    first = (run / "rows.jsonl").read_bytes()
    for more in (("--policies", "sc,single"), ("--limit", "3"), ("--seeds", "1,0")):
        code, _, err = bench("--resume", "--out", str(run), *more)
        assert code == 0, err
    assert (run / "rows.jsonl").read_bytes().startswith(first)
    bench(*base, "--limit", "3", "--policies", "sc,single", "--seeds", "0,1", "--out", str(at_once), "--no-report")
    assert len(measured(at_once)) == 12 and measured(run) == measured(at_once)
    report = json.loads((run / "report.json").read_text())
    assert report["num_rows"] == report["num_expected"] == 12 and report["variants"] == ["sc", "single"]
    for less, words in (
        (("--policies", "single"), "policies: "), (("--limit", "2"), "limit: 3 there, 2 now"),
        (("--seeds", "0"), "seeds: "), (("--policies", "sc,single,gambit", "--capacity", "5"), "capacity: 6 there, 5"),
    ):  # fmt: skip
        code, _, err = bench("--resume", "--out", str(run), *less)
        assert code == 2 and "another configuration" in err and words in err, err
    assert len(measured(run)) == 12


def test_another_file_of_problems_is_no_growth(base: list[str], problems: Path, tmp_path: Path) -> None:
    mine, run = tmp_path / "sums.jsonl", tmp_path / "run"
    shutil.copy(problems, mine)
    base = [str(mine) if word == str(problems) else word for word in base]
    bench(*base, "--limit", "2", "--policies", "sc", "--out", str(run), "--no-report")
    mine.write_text(mine.read_text().replace("a=1", "a=9"))
    code, _, err = bench("--resume", "--out", str(run), "--limit", "3")
    assert code == 2 and "another configuration" in err and "benchmarks" in err


def test_a_method_and_a_scorer_may_be_named_by_their_file(base, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_methods.py").write_text(OWN)
    (tmp_path / "own_scorer.py").write_text(OWN_SCORER)
    run, own = tmp_path / "run", ("--scorer", "own_scorer.py:Flat")
    words = ["own_scorer.py:Flat" if word == "constant" else word for word in base]
    small = [*words, "--limit", "1", "--no-report", "--out"]
    code, _, err = bench(*small, str(run), "--policies", "sc,own_methods:Mine,own_methods.py:Mine")
    assert code == 0, err
    rows = {row.variant: row.generated for row in read_rows(run)}
    assert set(rows) == {"sc", "own_methods:Mine", "own_methods.py:Mine"} and len(set(rows.values())) == 1
    identity = json.loads((run / "run.json").read_text())["identity"]
    sources = {name: found for name, found in identity.items() if name.startswith("source of ")}
    assert set(sources) == {f"source of {name}" for name in ("own_methods:Mine", "own_methods.py:Mine", own[1])}
    assert (
        sources["source of own_methods:Mine"]
        == sources["source of own_methods.py:Mine"]
        != sources[f"source of {own[1]}"]
    )
    (tmp_path / "own_methods.py").write_text(OWN + "# changed")
    code, _, err = bench("--resume", "--out", str(run))
    assert code == 2 and "identity.source of own_methods:Mine" in err


def test_a_method_that_fails_everywhere_is_a_failure(base, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_broken.py").write_text(OWN)
    words = [*base, "--limit", "2", "--policies", "sc,own_broken.py:Broken", "--out", str(tmp_path / "run")]
    code, out, err = bench(*words)
    assert code == 1 and "2 of 4 searches failed, the first because: KeyError: 7" in err
    line = next(number for number, text in enumerate(OWN.split("\n"), 1) if "{}[7]" in text)
    error = f"KeyError: 7 (policy 'own_broken.py:Broken', step 0, own_broken.py:{line})"
    said = f"own_broken.py:Broken failed in all of its 2 searches ({error})."
    assert said in " ".join(out.split())
    assert (tmp_path / "run" / "report.md").read_text().split("\n")[2] == f"**{said}**"
    assert {row.error for row in read_rows(tmp_path / "run")} == {None, error}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_nothing.py:Mine", "cannot be imported"),
        ("json:dumps", "no class"),
        ("json:JSONDecoder", "this lacks name"),
    ],
)
def test_a_name_that_is_no_method_is_refused(base, tmp_path, name, words) -> None:
    code, _, err = bench(*base, "--policies", name, "--out", str(tmp_path / "run"))
    assert code == 2 and words in err and name in err and not (tmp_path / "run").exists()


# -- methods that cannot have worked ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("step", ("--kv-budget-tokens", "100000"), "step cannot have worked: it prunes when memory is short and never"),
        ("deepconf", (), "deepconf cannot have worked: its warm-up of 16 traces was the whole pool"),
        ("deepconf", ("--policy-option", "warmup_traces=2"), "shorter than its window of 2,048 tokens"),
        ("slim-sc", (), "shorter than its delay of 500 tokens"),
    ],
)
def test_a_method_that_cannot_have_worked_is_named(base, tmp_path, policy, options, words) -> None:
    code, _, err = bench(*base, "--limit", "2", "--policies", f"sc,{policy}", *options, "--out", str(tmp_path / "run"))
    assert code == 0, err
    [found] = [each for each in read_cautions(tmp_path / "run") if "cannot have worked" in each]
    assert words in found and found.startswith(f"{policy} cannot have worked: ")


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("step", ("--kv-budget-tokens", "140")), ("gambit", ()),
        ("deepconf", ("--policy-option", "warmup_traces=2", "--policy-option", "window_tokens=2")),
        ("slim-sc", ("--policy-option", "delay_tokens=0")),
    ],
)  # fmt: skip
def test_a_method_that_has_worked_is_not(base, tmp_path, policy, options) -> None:
    code, _, err = bench(*base, "--limit", "2", "--policies", policy, *options, "--out", str(tmp_path / "run"))
    assert code == 0, err
    assert not [each for each in read_cautions(tmp_path / "run") if "cannot have worked" in each]


def read_cautions(folder: Path) -> list[str]:
    return [line[2:] for line in (folder / "report.md").read_text().splitlines() if line.startswith("> ")]


# -- failures --------------------------------------------------------------------------------------------------


@contextmanager
def fragile(engine: object, lengths: set[int], error: Exception) -> Iterator[None]:
    """Meanwhile the engine fails whenever a search whose prompt has one of these lengths is open."""
    opened: dict[int, int] = {}
    sound = {name: getattr(engine, name) for name in ("open", "close_search", "step")}

    def note_open(spec) -> None:
        opened[spec.search] = len(spec.prompt)
        sound["open"](spec)

    def note_closed(search: int) -> None:
        opened.pop(search, None)
        sound["close_search"](search)

    def step():
        if lengths & set(opened.values()):
            raise error
        return sound["step"]()

    with (
        mock.patch.object(engine, "open", note_open),
        mock.patch.object(engine, "close_search", note_closed),
        mock.patch.object(engine, "step", step),
    ):
        yield


def run_fragile(
    solver: Solver,
    tiny_folder: Path,
    tmp_path: Path,
    questions: list[str],
    bad: set[int],
    concurrency: int,
    error: type[Exception] = RuntimeError,
) -> list[Row]:
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": "7"}) + "\n" for q in questions))
    options = {"model": str(tiny_folder), "benchmarks": [str(path)], "policies": ["sc"], **SMALL}
    plan, benchmarks = make_plan(recipe_from({**options, "concurrency": concurrency, "system_prompt": ""}), {})
    create(tmp_path / "run", plan)
    with fragile(solver.engine, bad, error("out of luck")), RowWriter(tmp_path / "run") as writer:
        Runner(plan, benchmarks, LocalSearches(solver, tmp_path / "run"), writer, set()).run()
    return list(read_rows(tmp_path / "run"))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_search_that_breaks_the_engine_is_a_wrong_row_and_the_others_go_on(
    solver: Solver, tiny_folder: Path, tmp_path: Path, concurrency: int
) -> None:
    rows = run_fragile(solver, tiny_folder, tmp_path, ["a=1", "a=1+2", "a=2", "a=3"], {6}, concurrency)
    assert [row.error for row in sorted(rows, key=lambda row: row.problem)] == [
        None, "RuntimeError: out of luck", None, None,
    ]  # fmt: skip
    assert not any(row.correct for row in rows if row.error)


def test_an_engine_that_always_fails_ends_the_run_without_blaming_the_problems(
    solver: Solver, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(GambitError, match=r"out of luck.*--resume"):
        run_fragile(solver, tiny_folder, tmp_path, ["a=1", "a=2", "a=3", "a=4"], {4}, 1)
    assert list(read_rows(tmp_path / "run")) == []


def test_a_dead_engine_ends_the_run_even_if_one_search_is_left(
    solver: Solver, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"--resume.*out of luck"):
        run_fragile(solver, tiny_folder, tmp_path, ["a=1", "a=2", "a=1+2"], {6}, 1, DeadEngineError)
    assert [(row.problem, row.error) for row in read_rows(tmp_path / "run")] == [("1", None), ("2", None)]


def test_a_refused_problem_is_a_wrong_row(base: list[str], tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    records = [{"question": "a=" + "1+" * 400 + "1", "answer": "7"}, {"question": "a=1", "answer": "7"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, out, err = bench(*base, "--benchmark", str(path), "--out", str(tmp_path / "run"))
    rows = [row for row in read_rows(tmp_path / "run") if row.benchmark == "long"]
    assert code == 0, err
    assert [(row.problem, row.correct, bool(row.error)) for row in rows if row.problem == "1"] == [
        ("1", False, True)
    ] * 2
    assert "2 searches failed, which count as wrong" in " ".join(out.split())
    assert "warning: 2 of 16 searches failed, the first because: " in err


def test_a_run_in_which_every_search_failed_says_why_and_has_no_answer(base: list[str], tmp_path: Path) -> None:
    small = [*base, "--kv-budget-tokens", "1", "--limit", "1"]
    code, _, err = bench(*small, "--out", str(tmp_path / "run"))
    assert code == 3
    assert "warning: 2 of 2 searches failed, the first because: a KV budget of 1 tokens" in err, err
    assert bench(*small, "--out", str(tmp_path / "quiet"), "--quiet", "--no-report") == (3, "", "")


def test_a_mistake_that_the_engine_finds_leaves_no_run_behind(base: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, _, err = bench(*base, "--device", "cuda:7", "--out", str(folder))
    assert code == 2 and "cuda:7" in err and not folder.exists()
    with mock.patch("gambit.solver.Solver", side_effect=KeyboardInterrupt):
        assert bench(*base, "--out", str(folder)) == (130, "", "error: interrupted")
    assert not folder.exists()
    assert bench(*base, "--limit", "1", "--policies", "sc", "--no-report", "--out", str(folder))[0] == 0


# -- shards ----------------------------------------------------------------------------------------------------


def test_shards_put_together_are_the_whole_run(whole: Path, base: list[str], tmp_path: Path) -> None:
    shards = [tmp_path / f"shard-{i}" for i in (1, 2)]
    for i, folder in enumerate(shards, start=1):
        bench(*base, "--seeds", "0,1", "--shard", f"{i}/2", "--out", str(folder), "--no-report")
    merged = CliRunner().invoke(app, ["merge", *map(str, shards), "--out", str(tmp_path / "all")])
    assert merged.exit_code == 0 and merged.stderr == ""
    without_shard = {key: {**row, "shard": "1/1"} for key, row in measured(tmp_path / "all").items()}
    assert without_shard == measured(whole)
    reported = CliRunner().invoke(app, ["report", str(tmp_path / "all"), "--json"])
    mine, theirs = json.loads(reported.stdout), json.loads((whole / "report.json").read_text())
    assert [cell["accuracy"] for cell in mine["cells"]] == [cell["accuracy"] for cell in theirs["cells"]]
    assert all((tmp_path / "all" / row.log).is_file() for row in read_rows(tmp_path / "all"))


def test_a_missing_shard_is_named_and_foreign_ones_are_refused(base: list[str], tmp_path: Path, whole: Path) -> None:
    first = tmp_path / "first"
    bench(*base, "--seeds", "0,1", "--shard", "1/2", "--out", str(first), "--no-report")
    merged = CliRunner().invoke(app, ["merge", str(first), "--out", str(tmp_path / "half")])
    assert merged.exit_code == 0 and "shard 2 of 2 is missing" in merged.stderr
    doubled = CliRunner().invoke(app, ["merge", str(first), str(whole), "--out", str(tmp_path / "double")])
    assert doubled.exit_code == 2 and "both hold" in doubled.stderr
    bench(*base, "--shard", "2/2", "--out", str(tmp_path / "other"), "--no-report")
    mixed = CliRunner().invoke(app, ["merge", str(first), str(tmp_path / "other"), "--out", str(tmp_path / "mixed")])
    assert mixed.exit_code == 2 and "seeds: [0, 1] there, [0] now" in " ".join(mixed.stderr.split())


# -- the report against the logs -------------------------------------------------------------------------------


def stints_of(events: list[dict], inherited: dict, own: dict) -> Iterator[tuple[int, int, int, int]]:
    """Of each trace: lengths before its first and after its last token, and when it began, admission by admission."""
    for trace, tokens in own.items():
        length = inherited[trace]
        mine = [event for event in events if event.get("trace") == trace]
        stops = [event["num_tokens"] for event in mine if event["event"] == "Queued"]
        begins = [event["step"] for event in mine if event["event"] == "Admitted"]
        for begin, until in zip(begins, [*stops, inherited[trace] + len(tokens)], strict=False):
            yield trace, length, until, begin
            length = until


def facts_of(log: Path) -> dict[str, object]:
    """What one search did, from its raw lines; nothing of Gambit's own code is used here."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    parent, inherited, own, done = {}, defaultdict(int), defaultdict(list), []
    for event in events:
        if event["event"] == "Branched":
            parent[event["trace"]], inherited[event["trace"]] = event["parent"], event["inherited"]
        if event.get("tokens"):
            own[event["trace"]] = event["tokens"]
        if event["event"] == "Finished":
            done.append(event)

    def places(trace: int, length: int) -> set[tuple[int, int]]:
        """Who generated each of a trace's first tokens."""
        mine = {(trace, i) for i in range(inherited[trace], length)}
        return mine | (places(parent[trace], min(length, inherited[trace])) if trace in parent else set())

    decoding: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by step: traces and their lengths
    for trace, first, last, begin in stints_of(events, inherited, own):
        for length in range(first, last):
            decoding[begin + length - first].append((trace, length))
    paths = [set().union(*(places(*tip) for tip in tips)) for tips in decoding.values()]
    num_prompt = len(events[0]["prompt_tokens"])
    samples = [event for event in events if event["event"] == "Sample"]
    lengths = {event["trace"]: inherited[event["trace"]] + len(own[event["trace"]]) for event in done}
    votes = Counter(event["answer"] for event in done if event["answer"] is not None)
    return {
        "answer": events[-1]["answer"],
        "tokens": sum(map(len, own.values())),
        "completed": len(done),
        "seconds": samples[-1]["seconds_total"],
        "engine": samples[-1]["seconds_engine"],
        "tree": samples[-1]["seconds_search"],
        "kv_peak": max(sample["kv_used_tokens"] for sample in samples),
        "queued": sum(event["event"] == "Queued" for event in events),
        "waited": sum(event["waited_steps"] for event in events if event["event"] == "Admitted"),
        "recomputed": sum(event["recomputed"] for event in events if event["event"] == "Admitted"),
        "evicted": sum(event["event"] == "Evicted" for event in events),
        "productive": len(set().union(*(places(t, n) for t, n in lengths.items()))) if lengths else 0,
        "read_total": sum(num_prompt + length for tips in decoding.values() for _, length in tips),
        "read_unique": sum(num_prompt + len(places) for places in paths),
        "unique": sorted(len(own[trace]) for trace in lengths),
        "total": sorted(lengths.values()),
        "majority": votes.most_common(1)[0][0] if votes else None,
        "right_share": lambda gold: sum(e["answer"] == gold for e in done) / len(done) if done else None,
    }


@pytest.fixture(scope="module")
def recomputed(whole: Path, problems: Path) -> dict[str, dict[str, list[dict]]]:
    """Recorder by method and problem, seeds in a list."""
    golds = {record["id"]: record["answer"] for record in map(json.loads, problems.read_text().splitlines())}
    found: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for log in sorted(whole.glob("logs/sums/*/seed-*/*/events.jsonl")):
        variant, _, problem = log.parts[-4:-1]
        facts = facts_of(log)
        found[variant][problem].append({**facts, "right": facts["answer"] == golds[problem], "gold": golds[problem]})
    return found


def per_problem(recomputed: dict, variant: str, name: str) -> np.ndarray:
    return np.array([np.mean([facts[name] for facts in seeds]) for _, seeds in sorted(recomputed[variant].items())])


@pytest.mark.parametrize("variant", ["sc", "gambit"])
def test_the_reports_figures_are_those_of_the_logs(whole: Path, recomputed: dict, variant: str) -> None:
    report = json.loads((whole / "report.json").read_text())
    [cell] = [cell for cell in report["cells"] if cell["variant"] == variant]
    flat = [facts for seeds in recomputed[variant].values() for facts in seeds]

    def mean(name: str) -> float:
        return sum(facts[name] for facts in flat) / len(flat)

    assert cell["num_problems"] == 6 and cell["num_rows"] == len(flat) == 12 and cell["num_failed"] == 0
    assert cell["accuracy"]["value"] == pytest.approx(mean("right"))
    assert cell["tokens"]["value"] == pytest.approx(mean("tokens"))
    assert cell["seconds"]["value"] == pytest.approx(mean("seconds"))
    assert cell["parts"]["engine"] == pytest.approx(mean("engine"))
    assert cell["parts"]["tree"] == pytest.approx(mean("tree"))
    assert sum(cell["parts"].values()) == pytest.approx(mean("seconds"))
    for name in ("completed", "kv_peak", "queued", "recomputed", "evicted"):
        assert cell["means"][name] == pytest.approx(mean(name)), name
    for name in ("read_total", "read_unique"):
        assert cell[name] == pytest.approx(mean(name)), name
    assert cell["sharing"] == pytest.approx(mean("read_total") / mean("read_unique"))
    assert cell["means"]["waited_steps"] == pytest.approx(mean("waited"))
    assert cell["productive_share"] == pytest.approx(mean("productive") / mean("tokens"))
    assert cell["completed_per_second"] == pytest.approx(cell["means"]["completed"] * 12 / cell["wall_seconds"])
    assert cell["wall_seconds"] == pytest.approx(sum(facts["seconds"] for facts in flat), rel=0.02)  # one at a time
    shares = [facts["right_share"](facts["gold"]) for facts in flat]
    assert all(share is not None for share in shares)
    assert cell["trace_accuracy"]["value"] == pytest.approx(np.mean(shares))
    assert cell["coverage"]["value"] == pytest.approx(np.mean([share > 0 for share in shares]))


def test_the_rows_lengths_are_those_of_the_logs(whole: Path, recomputed: dict) -> None:
    for row in read_rows(whole):
        facts = recomputed[row.variant][row.problem][row.seed]
        assert sorted(row.unique_lengths) == facts["unique"] and sorted(row.total_lengths) == facts["total"]
        assert row.productive == facts["productive"] and row.generated == facts["tokens"]
        assert (row.read_total, row.read_unique) == (facts["read_total"], facts["read_unique"])
        assert row.read_total > row.read_unique


def test_intervals_and_comparisons_are_those_of_the_logs(whole: Path, recomputed: dict) -> None:
    """With a bootstrap of its own."""
    report = json.loads((whole / "report.json").read_text())
    cells = {cell["variant"]: cell for cell in report["cells"]}
    draws = np.random.default_rng(99).integers(0, 6, (20_000, 6))
    for variant, cell in cells.items():
        tokens = per_problem(recomputed, variant, "tokens")
        low, high = np.quantile(tokens[draws].mean(axis=1), [0.025, 0.975])
        spread = high - low
        assert cell["tokens"]["low"] == pytest.approx(low, abs=0.05 * spread)
        assert cell["tokens"]["high"] == pytest.approx(high, abs=0.05 * spread)
    mine, theirs = (per_problem(recomputed, variant, "tokens") for variant in ("gambit", "sc"))
    ratio = cells["gambit"]["token_ratio"]
    ratios = mine[draws].sum(axis=1) / theirs[draws].sum(axis=1)
    assert ratio["value"] == pytest.approx(mine.sum() / theirs.sum())
    assert ratio["low"] == pytest.approx(np.quantile(ratios, 0.025), abs=0.02)
    [comparison] = report["comparisons"]
    gain = per_problem(recomputed, "gambit", "right") - per_problem(recomputed, "sc", "right")
    assert (comparison["first"], comparison["second"]) == ("gambit", "sc")
    assert comparison["gain"]["value"] == pytest.approx(gain.mean())
    flips = np.array(np.meshgrid(*[[1, -1]] * 6)).reshape(6, -1).T
    assert comparison["p"] == pytest.approx(np.mean(np.abs(flips @ gain) >= abs(gain.sum()) - 1e-9))
