"""The prefix-value experiment: its statistics on made-up prefixes, and a whole run on a tiny model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gambit.bench.prefix_value import (
    RANDOM,
    ROLLOUTS,
    ROLLOUTS_FILE,
    CutProblem,
    PrefixPlan,
    finding,
    read_rollouts,
    summarise_cut,
    write_prefix_report,
)
from gambit.cli.app import app
from gambit.models.files import locate
from gambit.stats import pairs_won

# -- statistics --------------------------------------------------------------------------------------------------


def problem(values, num_rollouts=8, seed=0, **scores):
    """Prefixes whose rollouts are right with these chances."""
    rng = np.random.default_rng(seed)
    values = np.asarray(values, dtype=float)
    return CutProblem(rng.random((len(values), num_rollouts)) < values[:, None], scores)


def by_judge(rows):
    return {row.judge: row for row in rows}


def test_pairs_are_of_two_prefixes_and_a_tie_is_half():
    scores, right, wrong = np.array([[3.0, 1.0, 1.0]]), np.array([[2.0, 1.0, 0.0]]), np.array([[2.0, 1.0, 3.0]])
    # The first wins against 1 + 3 wrong ones, twice; the second loses to 2 and ties with 3.
    assert pairs_won(scores, right, wrong) == (2 * 4 + 0.5 * 3, 2 * 4 + 2 + 3)


def test_prefixes_that_decide_everything():
    values = [1, 1, 0, 0, 0, 0]
    made = [problem(values, seed=i, good=np.array(values, float), bad=-np.array(values, float)) for i in range(30)]
    rows = by_judge(summarise_cut(0.5, made, keep=2))
    assert rows[RANDOM].right.value == pytest.approx(1 / 3) and rows[RANDOM].auc is None
    for name, auc in ((ROLLOUTS, 1), ("good", 1), ("bad", 0)):
        assert rows[name].auc.value == rows[name].right.value == auc
        assert rows[name].gain.value == pytest.approx(auc - 1 / 3)


def test_prefixes_that_decide_nothing_give_no_judge_an_edge():
    """A judge that saw the rollouts it is judged by would look good here."""
    rng = np.random.default_rng(1)
    made = [problem([0.5] * 8, seed=i, guess=rng.random(8)) for i in range(300)]
    for row in summarise_cut(0.25, made, keep=2)[1:]:
        assert row.auc.value == pytest.approx(0.5, abs=0.03) and row.gain.value == pytest.approx(0, abs=0.03)


def test_an_outcome_that_is_always_the_same_has_no_auc():
    rows = summarise_cut(0.5, [problem([1] * 4, seed=i) for i in range(3)], keep=2)
    assert by_judge(rows)[ROLLOUTS].auc is None


def rows_of(num_problems):
    made = []
    for i in range(num_problems):
        values = [1, 1, 0, 0, 0, 0] if i % 2 else [1, 1, 1, 0, 0, 0]  # alike, yet not so that all intervals are points
        made.append(problem(values, seed=i, good=np.array(values, float)))
    return summarise_cut(0.5, made, 2)


def test_few_problems_carry_no_claim(tmp_path):
    plan = PrefixPlan((0.5,), 8, 2)
    few, enough = (write_prefix_report(tmp_path, "made", plan, rows_of(count)) for count in (19, 20))
    assert [line[:36] for line in few.cautions] == ["Only 19 problems: nothing is claimed"] and not few.findings
    assert len(enough.findings) == 2 and not enough.cautions
    assert all("raises the share of right traces" in line for line in enough.findings)
    assert "shows no gain" in finding(rows_of(19)[1], 2)


# -- a run -------------------------------------------------------------------------------------------------------


def invoke(*words):
    done = CliRunner().invoke(app, ["prefix-value", *map(str, words)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def command(tiny_folder, tmp_path_factory):
    """All but the folder."""
    file = tmp_path_factory.mktemp("problems") / "made.jsonl"
    file.write_text("".join(json.dumps({"question": f"a={i}", "answer": "78"[i % 2]}) + "\n" for i in range(5)))
    return ["--benchmark", file, "--model", tiny_folder, "--engine", "local", "--device", "cpu", "--traces", 6,
            "--rollouts", 4, "--keep", 2, "--cuts", "0.5,0.25", "--max-new-tokens", 40, "--temperature", 1,
            "--top-p", 1, "--top-k", 0, "--seed", 3, "--scorer", "confidence", "--scorer", "constant"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(command, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    code, output = invoke(*command, "--out", out)
    assert code == 0, output
    return out


def test_a_run_leaves_rollouts_and_a_report(folder):
    figures = json.loads((folder / "report.json").read_text())
    judges = [RANDOM, ROLLOUTS, "confidence", "constant"]
    assert [(row["cut"], row["judge"]) for row in figures["rows"]] == [(c, j) for c in (0.25, 0.5) for j in judges]
    assert figures["rows"][3]["auc"]["value"] == 0.5, "a constant ranks nothing"
    assert figures["findings"] == [] and "Only" in figures["cautions"][0]
    assert ROLLOUTS in (folder / "report.html").read_text() and ROLLOUTS in (folder / "report.md").read_text()
    assert len(read_rollouts(folder, 4)) > 4


def test_what_was_cut_short_goes_on_and_comes_to_the_same(command, folder, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    lines = (folder / ROLLOUTS_FILE).read_text().splitlines(keepends=True)
    (again / ROLLOUTS_FILE).write_text("".join(lines[:3]) + lines[3][:30])
    (again / "report.json").unlink()
    assert invoke(*command, "--out", again)[0] == 0
    assert sorted((again / ROLLOUTS_FILE).read_text().splitlines(keepends=True)) == sorted(lines)
    before, after = (json.loads((each / "report.json").read_text())["rows"] for each in (folder, again))
    assert after == before


def test_a_finished_run_needs_no_model(command, folder):
    starts = (folder / "environment.jsonl").read_text()
    code, output = invoke(*command, "--keep", 3, "--limit", 4, "--json", "--out", folder)
    assert code == 0 and json.loads(output)["plan"]["keep"] == 3, output
    assert (folder / "environment.jsonl").read_text() == starts


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--rollouts", 6], "holds 4 rollouts a prefix: run it with --rollouts 4, or choose another --out"),
        (["--keep", 6], "--keep 6 of --traces 6: keep fewer"),
        (["--keep", 5], "no problem has more than 5 prefixes with rollouts yet"),
        (["--cuts", "50"], "cuts [50.0]: give shares of a trace between 0 and 1"),
        (["--cuts", "half"], "cuts 'half': give shares of a trace such as 0.25,0.5,0.75"),
        (["--scorer", "confidence"], "two scorers are called 'confidence'"),
        (["--scorer", "verifier:Qwen/Qwen2.5-Math-PRM-7B"], "a verifier cannot judge prefixes here"),
    ],
)
def test_mistakes_are_reported(command, folder, more, words):
    code, output = invoke(*command, "--out", folder, *more)
    assert code == 2 and words in " ".join(output.split()), output


def test_a_line_that_is_no_rollouts_is_named(folder, tmp_path):
    (tmp_path / ROLLOUTS_FILE).write_text('{"prefix": "a.1.1"}\n')
    with pytest.raises(Exception, match=r"rollouts.jsonl, line 1 is not the rollouts of a prefix: .*: Field required"):
        read_rollouts(tmp_path, 4)


def test_a_scorer_of_another_model_is_refused_before_any_trace_is_written(command, tmp_path):
    code, output = invoke(*command, "--scorer", Path(locate("pawn")) / "scorer.safetensors", "--out", tmp_path / "run")
    said = " ".join(output.split())
    assert code == 2 and "made for hidden states of 256 numbers" in said and "name one that was trained for" in said
    assert not (tmp_path / "run").exists()
