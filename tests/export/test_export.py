"""Training data from logs: outcomes in a tree by hand, rows that name their source, files that are read back."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from typer.testing import CliRunner

from gambit import events as ev
from gambit.cli.app import app
from gambit.events import LogWriter, read_log
from gambit.export import (
    SearchTraces,
    Solved,
    best_traces,
    continuations,
    group_of_traces,
    is_test_set,
    labelled_thoughts,
    sibling_pairs,
)
from gambit.results.record import fold
from gambit.types import EndReason, StopReason
from support import GOLDEN
from support.searching import make_header, make_settings

RUNS = GOLDEN / "runs"
ORIGIN = {"model", "weights", "benchmark", "problem", "policy", "seed", "judged_by"}


class Letters:
    """A tokenizer whose tokens are letters."""

    def batch_decode(self, sequences, *, skip_special_tokens, clean_up_tokenization_spaces):
        return ["".join(chr(token) for token in sequence) for sequence in sequences]


def tokens(text):
    return tuple(map(ord, text))


@pytest.fixture
def tree(tmp_path):
    """Trace 0 leaves "ab|cd|e", wrong; 1 leaves it after "abc" and ends right, 2 leaves 1 after "abcx", wrong; 3 is a
    root of its own and right; 4 was pruned."""
    with LogWriter(tmp_path / "events.jsonl") as log:
        for event in (
            make_header(make_settings(capacity=5)),
            ev.Created(0, 0), ev.Created(0, 3 - 2), ev.Created(0, 2),
            *(ev.Admitted(0, i, 0, 0, 0) for i in range(3)),
            ev.Scored(2, (0, 1), (0.4, 0.9), (2, 3)),
            ev.Branched(3, 3, 0, 3, 1.0), ev.Admitted(3, 3, 3, 0, 0),
            ev.Scored(4, (0,), (0.5,), (4,)),
            ev.Branched(4, 4, 3, 4, 1.0), ev.Admitted(4, 4, 4, 0, 0),
            ev.Finished(5, 0, EndReason.STOP, "8", tokens("abcde")),
            ev.Finished(5, 3, EndReason.STOP, "7", tokens("xy")),
            ev.Finished(5, 4, EndReason.STOP, "8", tokens("z")),
            ev.Finished(5, 1, EndReason.STOP, "7", tokens("rstuv")),
            ev.Pruned(5, 2, "tournament", 0.1, tokens("no")),
            ev.Stopped(5, StopReason.COMPLETED),
        ):  # fmt: skip
            log.write(event)
    search = SearchTraces(tmp_path / "events.jsonl")
    return Solved(search, search.complete(lambda answer: answer == "7"), Letters())


def test_continuations_of_each_branch_point(tree):
    found = {
        point: {side: {each.trace.id for each in traces} for side, traces in sides.items()}
        for point, sides in continuations(tree.complete).items()
    }
    assert found == {
        (-1, 0): {0: {0, 3, 4}, 1: {1}},
        (0, 3): {0: {0}, 3: {3, 4}},
        (3, 4): {3: {3}, 4: {4}},
    }


def test_pairs_are_siblings_of_one_branch_point(tree):
    pairs = [(p["branch_point"], p["parent"], p["prompt"][1:], p["chosen"], p["rejected"]) for p in sibling_pairs(tree)]
    assert pairs == [
        (0, None, "", "rstuv", "abcde"),
        (3, 0, "abc", "xy", "de"),
        (4, 3, "abcx", "y", "z"),
    ]


def test_a_thought_is_as_good_as_the_traces_that_contain_it(tree):
    rows = {row["trace"]: row for row in labelled_thoughts(tree)}
    assert rows[0]["completions"] == ["ab", "cd", "e"]
    assert rows[0]["values"] == [1 / 3, 0.0, 0.0] and rows[0]["labels"] == [True, False, False]
    assert rows[4]["completions"] == ["ab", "cxz"] and rows[4]["labels"] == [True, False]
    assert rows[1]["completions"] == ["rst", "uv"] and rows[1]["labels"] == [True, True]


def test_the_best_right_trace_is_kept(tree):
    (row,) = best_traces(tree)
    assert (row["trace"], row["completion"], row["answer"]) == (1, "rstuv", "7")


def read_group(row):
    """All tokens of each complete trace, as docs/export.md has it."""
    found = {}
    for each in row["traces"]:
        prefix = found[each["parent"]][: each["inherited"]] if each["parent"] is not None else []
        found[each["trace"]] = prefix + each["tokens"]
    return {each["trace"]: found[each["trace"]] for each in row["traces"] if each["reward"] is not None}


def test_groups_give_back_every_trace(tree):
    (row,) = group_of_traces(tree)
    assert read_group(row) == {each.trace.id: list(each.tokens) for each in tree.complete}
    assert {each["trace"]: each["reward"] for each in row["traces"]} == {0: 0.0, 1: 1.0, 3: 1.0, 4: 0.0}


# -- the command -----------------------------------------------------------------------------------------------


def export(*args):
    return CliRunner().invoke(app, ["export", *map(str, args)])


def rows_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("purpose", ["sft", "prm", "grpo"])
def test_old_logs_are_exported_and_read_back(purpose, tmp_path):
    out = tmp_path / "rows.jsonl"
    done = export(RUNS / "gambit", RUNS / "sc", "--as", purpose, "--out", out)
    assert done.exit_code == 0, done.output
    rows = rows_in(out)
    assert rows and all(row.keys() >= ORIGIN for row in rows)
    assert {(row["model"], row["judged_by"], row["benchmark"]) for row in rows} == {("pawn", "vote", None)}
    assert all(len(row["weights"]) >= 16 for row in rows)
    if purpose == "grpo":
        for row, run in zip(rows, ("gambit", "sc"), strict=True):
            record = fold(read_log(RUNS / run / "events.jsonl"))
            for trace, found in read_group(row).items():
                assert tuple(found) == record.tree.tokens_of(trace)


def test_rows_of_a_bench_are_judged_by_its_answers_and_name_it(tmp_path):
    done = export(RUNS / "bench", "--as", "prm", "--out", tmp_path / "set")
    assert done.exit_code == 0, done.output
    rows = rows_in(tmp_path / "set" / "train.jsonl")
    plan = json.loads((RUNS / "bench" / "run.json").read_text())
    assert {(row["benchmark"], row["judged_by"], row["weights"]) for row in rows} == {
        ("problems", "answer", plan["identity"]["model_hash"])
    }
    assert f"{len(rows):,} rows for prm" in (tmp_path / "set" / "README.md").read_text()


def test_a_folder_is_a_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    assert export(RUNS / "gambit", "--as", "prm", "--out", tmp_path / "set").exit_code == 0
    loaded = datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded.to_list() == rows_in(tmp_path / "set" / "train.jsonl")


def test_test_sets_need_to_be_allowed(tmp_path):
    bench = tmp_path / "bench"
    shutil.copytree(RUNS / "bench", bench)
    rows = (bench / "rows.jsonl").read_text()
    (bench / "rows.jsonl").write_text(rows.replace('"benchmark":"problems"', '"benchmark":"math_500"'))
    refused = export(bench, "--as", "prm", "--out", tmp_path / "set")
    assert refused.exit_code == 2 and "math_500" in refused.output and "--allow-test" in refused.output
    assert not (tmp_path / "set").exists()
    assert export(bench, "--as", "prm", "--out", tmp_path / "set", "--allow-test").exit_code == 0
    assert is_test_set("chains-16-test") and not is_test_set("chains-16-train") and not is_test_set("contest")


def test_nothing_to_export_leaves_nothing_behind(tmp_path):
    refused = export(RUNS / "gambit", "--as", "dpo", "--out", tmp_path / "a.jsonl")
    assert refused.exit_code == 2 and "right and wrong ones" in refused.output
    assert not (tmp_path / "a.jsonl").exists()


def test_a_file_is_never_overwritten(tmp_path):
    assert export(RUNS / "sc", "--as", "sft", "--out", tmp_path / "a.jsonl").exit_code == 0
    again = export(RUNS / "sc", "--as", "sft", "--out", tmp_path / "a.jsonl")
    assert again.exit_code == 2 and "exists already" in again.output


@pytest.mark.parametrize(("flags", "is_private"), [((), True), (("--public",), False)])
def test_a_dataset_is_pushed_private_unless_told_otherwise(flags, is_private, tmp_path, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, name, **options):
            calls.append((name, options["repo_type"], options["private"]))
            return f"datasets/{name}"

        def upload_folder(self, **options):
            calls.append((options["repo_id"], sorted(path.name for path in Path(options["folder_path"]).iterdir())))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    done = export(RUNS / "gambit", "--as", "sft", "--out", tmp_path / "set", "--push", "me/traces", *flags)
    assert done.exit_code == 0 and "datasets/me/traces" in done.output
    assert calls == [("me/traces", "dataset", is_private), ("me/traces", ["README.md", "train.jsonl"])]
    file = export(RUNS / "gambit", "--as", "sft", "--out", tmp_path / "a.jsonl", "--push", "me/traces")
    assert file.exit_code == 2 and "folder" in file.output
