"""The model that ships: what it is, what it can do, and that its figures are the ones we quote."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from gambit import SearchConfig, Solver, UserError
from gambit.cli.demo import MEASURED, affordable, unseen_problem
from gambit.core import events as ev
from gambit.core.tree import TraceState
from gambit.core.types import EndReason
from gambit.pawn import MODEL_FOLDER, Level, Split, generate, parse_puzzle, verify
from gambit.pawn.vocabulary import encode, render_prompt
from gambit.results.record import SearchRecord, fold
from gambit.scorers.checkpoint import read_metadata
from gambit.text.prompts import encode_problem
from gambit.text.tokenizers import load_tokenizer
from searching import make_header, make_settings

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


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


def test_the_scorer_belongs_to_the_weights():
    with safe_open(MODEL_FOLDER / "scorer.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["gambit"])
    digest = hashlib.sha256((MODEL_FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert metadata["base_model_hash"] == digest
    assert metadata["training"]["split"] == "scorer"
    chosen = metadata["metrics"][metadata["state_position"]]
    for fraction in ("0.5", "0.75"):
        share = (chosen["scorer"][fraction] - 0.5) / (chosen["ceiling"][fraction] - 0.5)
        assert share >= 0.8
    assert chosen["scorer"]["0.75"] >= 0.70


@pytest.mark.parametrize("name", ["mlp", "sequence"])
def test_further_scorers_belong_to_the_weights_and_quote_their_report(name):
    metadata = read_metadata(MODEL_FOLDER / "scorers" / f"{name}.safetensors")
    digest = hashlib.sha256((MODEL_FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert metadata["base_model_hash"] == digest and metadata["training"]["source"] == "pawn:scorer"
    report = json.loads((RESULTS / "pawn_scorers.json").read_text())
    objective = metadata["training"]["objective"]
    (ranking,) = (r for r in report["rankings"] if r["name"] == f"{name}-{objective}")
    assert metadata["metrics"]["test"]["mean_auc"] == ranking["mean_auc"]


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
        with pytest.raises(UserError, match="name a real model with --model"):
            pawn.solve(text)


def test_the_demo_puzzle_is_unseen_and_right():
    problem, answer = unseen_problem(0)
    puzzle = parse_puzzle(problem.question)
    assert puzzle.split is Split.TEST and str(puzzle.answer) == answer
    assert unseen_problem(1) != unseen_problem(0)


def test_the_demos_rival_votes_with_whole_traces_that_gambits_tokens_pay_for():
    """Traces of 3, 2, 4 and 1 tokens: in the order of their beginning, as many as fit."""
    record = SearchRecord(make_header(make_settings("sc", capacity=4), "majority"))
    for trace, length in enumerate((3, 2, 4, 1)):
        record.apply(ev.Created(0, trace))
        record.apply(ev.Admitted(0, trace, 0, 0, 0))
        record.apply(ev.Finished(9, trace, EndReason.STOP, str(trace), (7,) * length))
    assert [ballot.trace for ballot in affordable(record, 8)] == [0, 1]
    assert [ballot.trace for ballot in affordable(record, 9)] == [0, 1, 2]
    assert len(affordable(record, 2)) == 0 and len(affordable(record, 10)) == 4


def test_the_figures_we_quote_are_the_measured_ones():
    report = json.loads((RESULTS / "pawn_search.json").read_text())
    methods, differences = report["methods"], report["differences"]
    assert report["options"]["puzzles"] == 300 and report["options"]["seeds"] == 3
    saved = 1 - methods["gambit"]["tokens"] / methods["sc"]["tokens"]
    quoted = (
        f"gambit {methods['gambit']['accuracy']:.1%}, sc {methods['sc']['accuracy']:.1%}, with {saved:.0%} fewer tokens"
    )
    assert quoted.replace("%", " %") == MEASURED
    assert differences["gambit - sc"]["gain"] >= 0.08 and differences["gambit - sc"]["interval"][0] > 0
    assert differences["gambit - sc, score vote"]["gain"] >= 0.04
    assert differences["gambit - sc, score vote"]["interval"][0] > 0
    single = methods["single trace"]["accuracy"]
    assert 0.25 <= single <= 0.45 <= methods["sc"]["accuracy"]
