"""What the scripts of a visit to a GPU count, choose and bring back."""

import json
import subprocess
import tarfile
from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks.forced_answers import POLICIES, SHARES, read_rows, summary, variants
from benchmarks.long_chains.compare import compare
from benchmarks.long_chains.generate import MANY_SIZES, Sampler, sizes_by_votes
from benchmarks.long_chains.races import won

from support import ROOT

SCRIPTS = sorted((ROOT / "benchmarks" / "long_chains").glob("*.sh"))


def row(variant: str, problem: int, *, right: bool, share: float = 0.3, began: float = 0.0) -> dict:
    num_right = round(share * 10)
    return {
        "variant": variant, "problem": f"p{problem}", "seed": 0, "correct": right, "generated": 1000, "completed": 10,
        "right_traces": num_right, "wrong_traces": [10 - num_right], "steps": 100, "began": began, "shard": "1/1",
        "revotes": dict.fromkeys(("majority", "score", "position", "best"), right), "seconds": {"total": 1.0},
    }  # fmt: skip


def test_a_third_method_is_compared_with_plain_sampling_on_the_problems_of_both():
    rows = [row("sc", i, right=False) for i in range(8)] + [row("gambit", i, right=i < 6) for i in range(8)]
    rows += [row("gambit-32", i, right=i != 4) for i in range(5)]
    found = compare(rows)
    assert found["problems"] == 8 and found["primary"]["won"] == 6
    other = found["secondary"]["gambit-32"]
    assert (other["problems"], other["won"], other["lost"], other["gambit-32"]) == (5, 4, 0, 0.8)
    assert other["p by Holm"] >= other["p"]
    json.dumps(found, allow_nan=False)
    assert sum(each["problems"] for each in found["by difficulty"]) == pytest.approx(8, abs=0.3)


def forced_rows(puzzle: str, *, right: bool) -> list[dict]:
    return [
        {"puzzle": puzzle, "capacity": 8, "policy": policy, "share": share, "variant": variant,
         "right": {"1": right or variant == "forced", "0.5": right, "0": right}, "forced": [1, 1], "own": [2, 1]}
        for policy in POLICIES for share in SHARES for variant in variants(8)
    ]  # fmt: skip


def test_forced_answers_are_counted_over_puzzles_that_were_finished(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    written = [*forced_rows("a", right=True), *forced_rows("b", right=False), *forced_rows("c", right=False)[:-1]]
    path.write_text("".join(json.dumps(each) + "\n" for each in written))
    rows = read_rows(path)
    assert {each["puzzle"] for each in rows} == {"a", "b"}
    found = summary(rows)
    assert (found["puzzles"], found["capacity"]) == (2, 8)
    assert found["table"][0]["right"]["forced"][0] == 100 and found["table"][0]["forced_minus"]["C/2"][0] == 50


@pytest.mark.parametrize(("best", "taken"), [(0, (2, 3)), (3, (4, 6, 8)), (6, (11, 15))])
def test_the_size_with_split_votes_and_its_neighbours_are_taken(monkeypatch, best, taken):
    def try_out(self, name, settings, problems, traces):
        return [{"size": each.size, "vote_of_16": 0.48 if at == best else 0.9} for at, each in enumerate(settings)]

    monkeypatch.setattr(Sampler, "try_out", try_out)
    record: dict = {}
    assert sizes_by_votes(object.__new__(Sampler), record, "moves") == taken
    assert [each["size"] for each in record["sizes"]] == list(MANY_SIZES["moves"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_read_by_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_what_a_visit_has_so_far_is_brought_back_without_its_logs(tmp_path):
    scratch = tmp_path / "scratch"
    for name in ("results/log.txt", "harder-1/rows.jsonl", "harder-1/logs/a/events.jsonl", "cache-1/kernel.bin"):
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_text("x")
    script = ROOT / "benchmarks" / "long_chains" / "poll.sh"
    said = subprocess.run(
        ["bash", str(script), str(scratch), str(tmp_path / "out"), "0"], capture_output=True, text=True
    )
    assert said.stdout.endswith("STILL RUNNING\n")
    with tarfile.open(tmp_path / "out" / "results.tar.xz") as archive:
        assert {Path(name).as_posix() for name in archive.getnames()} == {"results/log.txt", "harder-1/rows.jsonl"}


def test_races_are_those_that_gambit_alone_won(tmp_path):
    rows = [
        row("sc", 0, right=False),
        row("gambit", 0, right=True),
        row("sc", 1, right=True),
        row("gambit", 1, right=True),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert list(won(tmp_path)) == ["p0"]


def test_a_written_adapter_has_the_rank_that_engines_are_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import speed_parts
    from gambit.models.files import adapter_rank

    assert adapter_rank(speed_parts.write_adapter(tmp_path / "lora", "tiny")) == speed_parts.ADAPTER_RANK
    assert Namespace(**speed_parts.SHAPES["qwen3-next-tiny"]).num_experts
