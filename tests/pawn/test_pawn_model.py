"""The model that ships: what it is, what it can do, and that its figures are the ones we quote."""

import hashlib
import itertools
import json

import pytest
from benchmarks.pawn.traces import verify
from benchmarks.pawn.vocabulary import encode, render_prompt

from gambit import SearchConfig, Solver, UserError
from gambit.cli.demo import MEASURED, unseen_problem
from gambit.pawn import MODEL_FOLDER, Level, Split, generate, parse_puzzle
from gambit.results.record import fold
from gambit.scorers.checkpoint import read_metadata
from gambit.text.prompts import encode_problem
from gambit.text.tokenizers import load_tokenizer
from gambit.tree import TraceState
from support import ROOT

pytestmark = pytest.mark.contract
RESULTS = ROOT / "benchmarks" / "results"


def test_the_folder_is_small_and_whole():
    files = {path.name: path.stat().st_size for path in MODEL_FOLDER.rglob("*") if path.is_file()}
    assert {
        "config.json",
        "model.safetensors",
        "scorer.safetensors",
        "mlp.safetensors",
        "sequence.safetensors",
        "tokenizer.json",
        "gambit.json",
        "README.md",
    } <= set(files)
    assert sum(files.values()) < 15_000_000


@pytest.fixture(scope="module")
def report():
    """What was measured when pawn was made, on its development split."""
    return json.loads((RESULTS / "pawn_scorers.json").read_text())


@pytest.mark.parametrize("name", ["scorer", "scorers/mlp", "scorers/sequence"])
def test_the_scorers_belong_to_the_weights_and_quote_their_report(name, report):
    path = MODEL_FOLDER / f"{name}.safetensors"
    metadata = read_metadata(path)
    digest = hashlib.sha256((MODEL_FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert metadata["base_model_hash"] == digest and metadata["training"]["source"] == "pawn:scorer"
    (ranking,) = (r for r in report["rankings"] if r["name"] == path.stem)
    assert metadata["metrics"]["test"]["mean_auc"] == ranking["mean_auc"]


def test_the_model_is_neither_too_good_nor_too_bad(report):
    assert report["source"] == "pawn:dev"
    assert 0.25 <= report["accuracy"]["all"]["pass_at_1"] <= 0.45
    assert report["accuracy"]["all"]["valid_format"] >= 0.97
    assert 0.5 <= report["accuracy"]["all"]["majority"] <= 0.75


def test_scorers_know_most_of_what_can_be_known(report):
    auc = {ranking["name"]: ranking["auc"] for ranking in report["rankings"]}
    for share in ("0.5", "0.75"):
        ceiling = auc["perfect judge"][share]["value"] - 0.5
        assert (auc["scorer"][share]["value"] - 0.5) / ceiling >= 0.8
    assert 0.87 <= auc["perfect judge"]["1"]["value"] <= 0.93


def test_neither_length_nor_states_tell_what_nobody_can_know(report):
    auc = {ranking["name"]: ranking["auc"] for ranking in report["rankings"]}
    assert abs(auc["fewer tokens"]["1"]["value"] - 0.5) < 0.03
    (probe,) = (r for r in report["without_misreading"] if r["name"] == "fitted to these")
    assert probe["auc"]["1"]["value"] < 0.6


def test_a_scorer_that_travels_with_the_model_is_found_by_its_name():
    with Solver("pawn", device="cpu", scorer="sequence") as solver:
        result = solver.solve("a = 17; b = 61; c = a + b; c?", SearchConfig(capacity=4))
    assert result.answer == "78"
    with pytest.raises(UserError, match="sequense"):
        Solver("pawn", device="cpu", scorer="sequense")


def test_prompts_are_those_of_the_training():
    tokenizer = load_tokenizer(str(MODEL_FOLDER))
    for puzzle in itertools.islice(generate(Split.TEST, 3), 5):
        prompt = encode_problem(tokenizer, puzzle.text, system_prompt=None)
        assert list(prompt.token_ids) == encode(render_prompt(puzzle.text)) and prompt.thinks


@pytest.fixture(scope="module")
def pawn():
    with Solver("pawn", device="cpu") as solver:
        yield solver


def test_it_solves_easy_puzzles_in_the_format_it_was_taught(pawn):
    """Few traces, easy puzzles: enough to see a broken model, prompt or scorer at once."""
    right = traces = valid = 0
    for puzzle in itertools.islice(generate(Split.TEST, 5, Level.EASY), 3):
        seen = []
        result = pawn.solve(puzzle.text, SearchConfig(capacity=16), on_event=seen.append)
        right += result.answer == str(puzzle.answer)
        tree = fold(seen).tree
        done = [tree.tokens_of(trace.id) for trace in tree.in_state(TraceState.FINISHED)]
        traces += len(done)
        valid += sum(verify(puzzle, pawn.engine.tokenizer.decode(tokens[:-1])).is_valid for tokens in done)
    assert right >= 2
    assert valid >= 0.9 * traces and traces >= 48


def test_what_is_no_puzzle_gets_a_hint(pawn):
    for text in ("What is 2+2?", [{"role": "user", "content": "Hi"}]):
        with pytest.raises(UserError, match="needs a real model"):
            pawn.solve(text)


def test_the_demo_puzzle_is_unseen_and_right():
    problem, answer = unseen_problem(0)
    puzzle = parse_puzzle(problem.question)
    assert puzzle.split is Split.TEST and str(puzzle.answer) == answer
    assert unseen_problem(1) != unseen_problem(0)


def test_the_figures_we_quote_are_the_measured_ones():
    found = json.loads((RESULTS / "islands_noise.json").read_text())
    methods, ahead = found["methods"], found["gambit, shipped, against"]
    gambit, sc = methods["gambit, shipped"], methods["sc"]
    assert gambit["searches"] == sc["searches"] == 900 and found["options"]["puzzles"] == 300
    saved = 1 - gambit["tokens_against_sc"]
    assert (
        f"Gambit {gambit['accuracy'][0]:.1f} % right, with {100 * saved:.0f} % fewer tokens than plain voting, "
        f"which has {sc['accuracy'][0]:.1f} %"
    ) == MEASURED
    assert ahead["sc"][0] >= 15 and min(gain for gain, *_ in ahead.values()) >= 4
    assert all(low > 0 for _, low, _ in ahead.values())


def test_no_scorer_however_bad_or_misjudged_costs_more_than_a_point():
    methods = json.loads((RESULTS / "islands_noise.json").read_text())["methods"]
    worse = {name: found["against sc"] for name, found in methods.items() if "trust" in name}
    assert len(worse) == 8
    for name, (gain, low, _) in worse.items():
        assert gain >= -1 and low > -3, name
