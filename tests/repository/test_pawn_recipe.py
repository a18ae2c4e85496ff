"""The making of pawn at useless size: a network that transformers loads, and scorers with their card and report."""

import json
import math
from pathlib import Path
from random import Random

import pytest
import torch
from benchmarks.pawn import scorers
from benchmarks.pawn.corpus import make_corpus
from benchmarks.pawn.network import TINY_SHAPE, build_model, take_over
from benchmarks.pawn.pretraining import CurvePoint, Recipe, is_failing
from benchmarks.pawn.probe import Probe, is_product_result
from benchmarks.pawn.scorers import ScorerPlan
from benchmarks.pawn.traces import random_trace, verify
from benchmarks.pawn.train import main
from benchmarks.pawn.vocabulary import END, ID, PAD, UNKNOWN, VOCABULARY, decode, encode, render_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

from gambit.pawn import MODEL
from gambit.pawn.puzzles import Split, generate, parse_puzzle
from gambit.scorers.checkpoint import load_checkpoint, read_metadata
from gambit.training.dataset import Dataset
from support.collected import make_generated

pytestmark = pytest.mark.contract


def test_the_corpus_holds_training_puzzles_only() -> None:
    for bucket in make_corpus(40, seed=0, num_workers=1):
        for row, (prompt_length, length) in zip(bucket.tokens.tolist(), bucket.spans.tolist(), strict=True):
            prompt, trace = decode(row[:prompt_length]), decode(row[prompt_length:length])
            puzzle = parse_puzzle(prompt.removeprefix("<|user|>").removesuffix("<|assistant|><think>\n"))
            assert puzzle.split is Split.TRAIN
            assert verify(puzzle, trace.removesuffix("<|end|>")).is_valid
            assert set(decode(row[length:]).split(PAD)) <= {""}


# -- its training ----------------------------------------------------------------------------------------------


def test_a_network_begins_with_an_earlier_one(folder: Path) -> None:
    torch.manual_seed(1)
    model = build_model(TINY_SHAPE)
    take_over(model, folder)
    earlier = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(weights, earlier[name]) for name, weights in model.state_dict().items())


def test_an_earlier_network_may_lack_the_last_tokens(tmp_path: Path) -> None:
    model = build_model(TINY_SHAPE)
    before = model.model.embed_tokens.weight[-1].clone()
    smaller = build_model(TINY_SHAPE)
    smaller.resize_token_embeddings(len(VOCABULARY) - 1)
    smaller.save_pretrained(tmp_path)
    take_over(model, tmp_path)
    assert torch.equal(model.model.embed_tokens.weight[:-1], smaller.model.embed_tokens.weight)
    assert torch.equal(model.model.embed_tokens.weight[-1], before) and model.config.tie_word_embeddings


def test_products_not_learnt_are_told_once_and_in_time() -> None:
    recipe = Recipe(num_updates=100)
    curve = [CurvePoint(update, 1.0, 4.5, None) for update in (30, 60, 90)]
    assert [is_failing(curve[:count], recipe) for count in (1, 2, 3)] == [False, True, False]
    assert not is_failing([curve[0], CurvePoint(60, 0.1, 0.02, None)], recipe)


def test_the_probe_looks_at_the_results_of_products() -> None:
    tokens = torch.tensor([encode("c = a * b = 17 * 61 = 67\n\nd = c - a = 67 - 17 = 50\n\n")])
    (places,) = is_product_result(tokens)
    assert [decode([token]) for token in tokens[0][places].tolist()] == ["67"] and places.nonzero().item() == 10


def test_the_probe_of_a_network_that_guesses() -> None:
    torch.manual_seed(0)
    model = build_model(TINY_SHAPE)
    probe = Probe.of(model, num_puzzles=3)
    assert abs(probe.product_loss(model) - math.log(len(VOCABULARY))) < 1.0
    assert probe.pass_at_1(model) == 0.0


# -- the network -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pawn") / "model"
    main(["--tiny", "--only", "network", "--workers", "1", "--out", str(path)])
    return path


def test_transformers_loads_and_runs_the_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.tie_word_embeddings
    prompt = torch.tensor([encode(render_prompt(next(generate(Split.DEV, 0)).text))])
    assert model.generate(prompt, max_new_tokens=3).shape[1] <= prompt.shape[1] + 3


def test_the_tokenizer_is_in_bijection_with_text(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    puzzle = next(generate(Split.DEV, 0))
    text = render_prompt(puzzle.text) + random_trace(puzzle, Random(0)) + END
    assert tokenizer.encode(text) == encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("\n\n") == [ID["\n\n"]]
    assert tokenizer.encode(puzzle.text.replace(" ", "")) == encode(puzzle.text)
    assert ID[UNKNOWN] in tokenizer.encode("Was ist die größte Primzahl unter 100?")


def test_the_chat_template_opens_the_thinking_and_ignores_the_system(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    puzzle = next(generate(Split.DEV, 0))
    user = [{"role": "user", "content": puzzle.text}]
    for messages in (user, [{"role": "system", "content": "Think hard."}, *user]):
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert rendered == render_prompt(puzzle.text)


def test_the_run_is_seeded(folder: Path, tmp_path: Path) -> None:
    main(["--tiny", "--only", "network", "--workers", "1", "--out", str(tmp_path / "model")])
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_model_brings_its_folder_and_refuses_what_is_no_puzzle() -> None:
    assert MODEL.folder.is_dir()
    assert MODEL.check_question("a = 17; b = 61; c = a * b; c?") == parse_puzzle("a = 17; b = 61; c = a * b; c?")


# -- its scorers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(folder: Path) -> Path:
    """Scorers fitted to the generator's own traces: a network of useless size never answers right."""

    def collected(plan: ScorerPlan, model: Path, data: Path, device: str) -> tuple[Dataset, Dataset]:
        make_generated(data / "scorer", Split.SCORER, 60, 8)
        make_generated(data / "dev", Split.DEV, 20, 8)
        return scorers._load(data / "scorer"), scorers._load(data / "dev")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorers, "collect_splits", collected)
        main(["--tiny", "--only", "scorers", "--out", str(folder)])
    return folder


def test_the_folder_is_complete(made: Path) -> None:
    preset = json.loads((made / "gambit.json").read_text())
    assert preset["capacity"] == 64 and preset["median_length"] > 100 and 10 < preset["mean_thought_length"] < 15
    assert set(preset) >= {"swap_size", "check_interval", "warmup_tokens", "max_new_tokens", "temperature"}
    card = (made / "README.md").read_text()
    assert "`python -m benchmarks.pawn.train --workers 1 --tiny`" in card and str(made) not in card
    assert "| perfect judge |" in card and "| fitted to these |" in card


@pytest.mark.parametrize(
    ("name", "architecture"), [("scorer", "mlp"), ("scorers/mlp", "mlp"), ("scorers/sequence", "sequence")]
)
def test_every_scorer_says_what_it_is_and_what_it_reached(made: Path, name: str, architecture: str) -> None:
    path = made / f"{name}.safetensors"
    metadata = read_metadata(path)
    assert load_checkpoint(path).info.architecture == architecture
    assert metadata["base_model"] == "pawn" and metadata["boundary_rule"] == "blank-line"
    figures = metadata["metrics"]["test"]
    report = json.loads((made.parent / "pawn_scorers.json").read_text())
    (ranking,) = (ranking for ranking in report["rankings"] if ranking["name"] == path.stem)
    assert figures["source"] == "pawn:dev" and figures["mean_auc"] == ranking["mean_auc"]
    (ceiling,) = (ranking for ranking in report["rankings"] if ranking["name"] == "perfect judge")
    assert ceiling["auc"]["1"]["value"] > figures["auc"]["0.25"]["value"]


def test_scorers_without_a_network_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--only network"):
        main(["--tiny", "--only", "scorers", "--out", str(tmp_path / "model")])
