"""The prefix-value experiment: its statistics on made-up prefixes, and a whole run on a tiny model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gambit.bench.prefix_judges import VerifierJudge
from gambit.bench.prefix_report import cautions, findings, write_prefix_report
from gambit.bench.prefix_rollouts import VALUES_FILE, TraceText, nearest_step, read_texts, read_values
from gambit.bench.prefix_statistics import (
    NO_ANSWER,
    RIGHT,
    CutProblem,
    class_counts,
    pairs_won,
    summarise_cut,
    variance_parts,
    vote_right,
)
from gambit.bench.prefix_value import PLAN_FILE, PrefixPlan, PrefixSummary, answer_classes
from gambit.cli.app import app
from gambit.errors import UserError
from gambit.models.files import locate
from gambit.scorers.verifier.folder import Platt, read_info
from gambit.scorers.verifier.model import Verifier, info_for
from gambit.training.loading import CollectionReader
from gambit.types import Aggregation
from support.collected import problem_record

# -- statistics --------------------------------------------------------------------------------------------------


def problem(values, num_rollouts=8, seed=0, **scores):
    """Prefixes of these values; wrong answers are all different."""
    rng = np.random.default_rng(seed)
    values = np.asarray(values, dtype=float)
    is_right = rng.random((len(values), num_rollouts + 1)) < values[:, None]
    classes = np.where(is_right, RIGHT, 1 + np.arange(is_right.size).reshape(is_right.shape))
    shares = np.full(len(values), 0.5)
    return CutProblem(f"p{seed}", shares, is_right[:, 0], classes[:, 0], classes[:, 1:], scores)


def test_the_variance_between_prefixes_is_estimated_without_bias():
    rng = np.random.default_rng(0)
    values = rng.beta(0.5, 0.5, (4000, 6))
    parts = [variance_parts(rng.random((6, 4)) < row[:, None]) for row in values]
    between, whole = np.mean(parts, axis=0)
    assert between == pytest.approx(0.125, abs=0.005) and whole == pytest.approx(0.25, abs=0.005)


def test_pairs_are_of_two_prefixes_and_a_tie_is_half():
    scores, right, wrong = np.array([[3.0, 1.0, 1.0]]), np.array([[2.0, 1.0, 0.0]]), np.array([[2.0, 1.0, 3.0]])
    # The first wins against 1 + 3 wrong ones, twice; the second loses to 2 and ties with 3.
    assert pairs_won(scores, right, wrong) == (2 * 4 + 0.5 * 3, 2 * 4 + 2 + 3)


def test_a_vote_goes_to_the_most_frequent_answer_and_a_tie_by_its_share():
    ballots = np.array([[0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, -1], [-1, -1, -1, -1]])
    assert vote_right(class_counts(ballots, 3)) == pytest.approx([1, 0, 1 / 3, 0])


def test_answers_that_are_equal_share_a_class():
    answers = ["7", "1/2", "0.5", None, "", "8", "7.0"]
    is_right = [True, False, False, False, False, False, True]
    found = answer_classes(answers, is_right, lambda a, b: a == b)
    assert found.tolist() == [RIGHT, 1, 1, NO_ANSWER, NO_ANSWER, 2, RIGHT]


def test_prefixes_that_decide_everything():
    values = [1, 1, 0, 0, 0, 0]
    made = [problem(values, seed=i, good=np.array(values, float), bad=-np.array(values, float)) for i in range(30)]
    found = summarise_cut(0.5, made, keep=2)
    judge, good, bad = found.judges
    assert found.decided.value == pytest.approx(1) and found.one_right.value == pytest.approx(1 / 3)
    assert judge.auc.value == good.auc.value == judge.original_auc.value == 1 and bad.auc.value == 0
    assert judge.vote.value == good.vote.value == judge.one_right.value == 1 and bad.vote.value == 0
    assert judge.gain.value == pytest.approx(1 - found.random_vote.value) and bad.gain.value < 0


def test_prefixes_that_decide_nothing_give_no_judge_an_edge():
    """Whoever saw the rollouts that it is judged by would look good here."""
    rng = np.random.default_rng(1)
    made = [problem([0.5] * 8, seed=i, guess=rng.random(8)) for i in range(300)]
    found = summarise_cut(0.25, made, keep=2)
    for judge in found.judges:
        assert [judge.auc.value, judge.original_auc.value] == pytest.approx([0.5, 0.5], abs=0.03)
        assert judge.gain.value == pytest.approx(0, abs=0.03)
    assert found.decided.value == pytest.approx(0, abs=0.03)


def test_noise_leads_from_the_judge_down_to_chance():
    rng = np.random.default_rng(2)
    found = summarise_cut(0.5, [problem(rng.beta(0.4, 0.8, 12), seed=i) for i in range(60)], keep=3)
    aucs, votes = [point.auc.value for point in found.curve], [point.vote.value for point in found.curve]
    assert aucs[0] == found.judges[0].auc.value and aucs == sorted(aucs, reverse=True)
    assert aucs[-1] == pytest.approx(0.5, abs=0.03) and votes[-1] == pytest.approx(found.random_vote.value, abs=0.02)
    rise = (votes[0] - votes[-1]) / (aucs[0] - aucs[-1]) / 10
    assert found.points_per_tenth.value == pytest.approx(rise, rel=0.2) and found.points_per_tenth.low > 0


def test_an_outcome_that_is_always_the_same_has_no_auc():
    found = summarise_cut(0.5, [problem([1] * 4, seed=i) for i in range(3)], keep=2)
    assert found.judges[0].auc is None and found.decided is None and found.points_per_tenth is None


def summary_of(num_problems):
    made = []
    for i in range(num_problems):
        values = [1, 1, 0, 0, 0, 0] if i % 2 else [1, 1, 1, 0, 0, 0]  # alike, yet not so that all intervals are points
        made.append(problem(values, seed=i, good=np.array(values, float)))
    return PrefixSummary(40, num_problems, 6, 8, 2, 1000, 0, 0, (summarise_cut(0.5, made, 2),))


def test_few_problems_carry_no_claim():
    assert findings(summary_of(19)) == [] and "Only 19 problems: nothing is claimed" in cautions(summary_of(19))[0]
    claims = findings(summary_of(20))
    assert claims[0].startswith("At 50 % the prefix decides 100.0 %") and cautions(summary_of(20)) == []
    assert any("that good (AUC 1.000" in claim and "raises the vote" in claim for claim in claims)


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


def test_a_run_leaves_rows_and_a_report(folder):
    figures = json.loads((folder / "report.json").read_text())
    assert figures["num_sampled"] == 5 and [cut["fraction"] for cut in figures["cuts"]] == [0.25, 0.5]
    assert [judge["name"] for judge in figures["cuts"][0]["judges"]] == ["rollouts", "confidence", "constant"]
    assert figures["cuts"][0]["judges"][2]["auc"]["value"] == 0.5, "a constant ranks nothing"
    assert figures["num_missing"] == 0 and figures["findings"] == [] and "Only" in figures["cautions"][0]
    page = (folder / "report.html").read_text()
    assert page.count("<figure>") == 4 and "a judge of 2 rollouts" in page
    assert {path.stem for path in (folder / "figures").iterdir()} == {"decided", "auc", "vote", "curve"}
    assert all(len(value.answers) == 4 for value in read_values(folder))


def test_what_was_cut_short_goes_on_and_comes_to_the_same(command, folder, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    lines = (folder / VALUES_FILE).read_text().splitlines(keepends=True)
    (again / VALUES_FILE).write_text("".join(lines[:3]) + lines[3][:30])
    (again / "report.json").unlink()
    assert invoke(*command, "--out", again)[0] == 0
    assert sorted((again / VALUES_FILE).read_text().splitlines(keepends=True)) == sorted(lines)
    before, after = (json.loads((each / "report.json").read_text())["cuts"] for each in (folder, again))
    assert after == before


def test_a_finished_run_needs_no_model(command, folder):
    starts = (folder / "environment.jsonl").read_text()
    code, output = invoke(*command, "--keep", 3, "--json", "--out", folder)
    assert code == 0 and json.loads(output)["keep"] == 3 and (folder / "environment.jsonl").read_text() == starts


def test_shards_are_merged_into_the_whole(command, folder, tmp_path):
    parts = [tmp_path / "1", tmp_path / "2"]
    for number, part in enumerate(parts, start=1):
        invoke(*command, "--shard", f"{number}/2", "--out", part)
    merged = CliRunner().invoke(app, ["scorer", "merge", *map(str, parts), "--out", str(tmp_path / "whole")])
    assert merged.exit_code == 0, merged.output
    code, output = invoke(*command, "--out", tmp_path / "whole")
    assert code == 0 and not (tmp_path / "whole" / "environment.jsonl").exists(), output
    assert sorted(map(repr, read_values(tmp_path / "whole"))) == sorted(map(repr, read_values(folder)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--rollouts", 6], "was begun with another plan (num_rollouts: 4 there, 6 now)"),
        (["--temperature", 0.5, "--limit", 5, "--all-problems"], "all_problems: false there, true now"),
        (["--keep", 6], "--keep 6 of --traces 6: keep fewer"),
        (["--cuts", "50"], "cuts [50.0]: give shares of a trace between 0 and 1"),
        (["--cuts", "half"], "cuts 'half': give shares of a trace such as 0.25,0.5,0.75"),
        (["--scorer", "confidence"], "two scorers are called 'confidence'"),
    ],
)
def test_mistakes_are_told(command, folder, more, words):
    code, output = invoke(*command, "--out", folder, *more)
    assert code == 2 and words in " ".join(output.split())


def test_a_scorer_of_another_model_is_refused_before_any_trace_is_written(command, tmp_path):
    code, output = invoke(*command, "--scorer", Path(locate("pawn")) / "scorer.safetensors", "--out", tmp_path / "run")
    said = " ".join(output.split())
    assert code == 2 and "made for hidden states of 256 numbers" in said and "name one that was trained for" in said
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def verifier_folder(tiny_folder, tmp_path_factory):
    """A verifier with random weights that say something."""
    made = Verifier.fresh(str(tiny_folder), info_for(str(tiny_folder), rank=2), torch.device("cpu"))
    torch.manual_seed(0)
    torch.nn.init.normal_(made.head.weight)
    out = tmp_path_factory.mktemp("verifiers") / "reads"
    made.save(out)
    return out


def test_a_verifier_judges_prefixes_by_reading_them(command, folder, verifier_folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    code, output = invoke(*command, "--scorer", f"prm:gambit:{verifier_folder}", "--json", "--out", tmp_path / "run")
    assert code == 0, output
    judges = json.loads(output)["cuts"][1]["judges"]
    assert [judge["name"] for judge in judges] == ["rollouts", "confidence", "constant", "reads"]
    assert judges[3]["auc"]["value"] != 0.5


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_a_prefix_is_judged_as_if_nothing_came_after_it(folder, tiny_folder, verifier_folder, aggregation):
    calibration = Platt(slope=0.3, offset=0.2)
    info = read_info(verifier_folder).model_copy(update={"aggregation": aggregation, "calibration": calibration})
    texts, passages = read_texts(folder), CollectionReader(folder).passages
    after = VerifierJudge(verifier_folder, info, str(tiny_folder)).judgements(folder, texts, torch.device("cpu"))
    verifier = Verifier.load(verifier_folder, torch.device("cpu"), str(tiny_folder))
    number, text = next((i, text) for i, text in enumerate(texts) if len(text.inner_ends) >= 3)
    prompt = passages.prompts[passages.data.traces.problem_of[number]].tolist()

    def read(end):
        """A pass of its own over no more than the prefix."""
        tokens = torch.tensor([prompt + text.tokens[:end].tolist()])
        with torch.inference_mode():
            logit = verifier.head(verifier.network(tokens).last_hidden_state[0, -1].float())
            return float(torch.sigmoid(0.3 * logit + 0.2))

    each = [read(end) for end in text.step_ends[:3]]
    assert after(text, 3) == pytest.approx(each[2] if aggregation is Aggregation.LAST else np.mean(each), abs=1e-4)


def test_who_cannot_judge_prefixes_is_told_why(command, tmp_path):
    name, words = (
        "prm:Qwen/Qwen2.5-Math-PRM-7B",
        "is no folder that `gambit scorer train --architecture verifier` wrote",
    )
    code, output = invoke(*command, "--scorer", name, "--out", tmp_path / "run")
    assert code == 2 and words in " ".join(output.split()) and not (tmp_path / "run").exists(), output


def test_a_report_without_matplotlib_says_so(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("gambit.bench.prefix_report.is_available", lambda: False)
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "figures")
    raw = json.loads((folder / PLAN_FILE).read_text())
    from gambit.bench.folder import BenchmarkInfo

    plan = PrefixPlan(BenchmarkInfo(**raw["benchmark"]), raw["shard"], (0.5,), 4, all_problems=False)
    report = write_prefix_report(tmp_path / "run", plan, summary_of(20))
    assert "matplotlib is not installed" in report.markdown and not (tmp_path / "run" / "figures").exists()


def test_the_nearest_thought_is_never_the_end():
    def text(ends, num_tokens):
        return TraceText(problem_record("p", []), 0, np.arange(num_tokens, dtype=np.int32), np.array(ends, np.int32))

    long = text([10, 40, 50, 100], 100)
    assert [nearest_step(long, share) for share in (0.01, 0.25, 0.44, 0.5, 0.99)] == [1, 1, 2, 3, 3]
    assert nearest_step(text([100], 100), 0.5) is None


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"is_right": [True]}, "2 answers, 1 of them graded"),
        ({"answers": [], "is_right": []}, "at least 1 item"),
        ({"step": 0}, "greater than or equal to 1"),
        ({"trace": -1}, "greater than or equal to 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_line(tmp_path, changes, culprit):
    value = {"problem": "p", "trace": 0, "step": 1, "answers": ["1", None], "is_right": [True, False], "num_tokens": 9}
    lines = [json.dumps(value), json.dumps({**value, **changes})]
    (tmp_path / VALUES_FILE).write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=f"line 2: not the value of a prefix .*{culprit}"):
        list(read_values(tmp_path))
