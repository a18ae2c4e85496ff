"""The recipe end to end at useless size: it writes a folder that transformers loads and a scorer file as specified."""

import hashlib
import json
from pathlib import Path
from random import Random

import pytest
import torch
from gambit.pawn.scorer import StateTable, fit_scorer, running_means, within_puzzle_auc
from gambit.pawn.train import main
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from gambit.pawn.puzzles import Split, generate
from gambit.pawn.traces import random_trace
from gambit.pawn.vocabulary import END, ID, UNKNOWN, encode, render_prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pawn")
    main(["--tiny", "--workers", "1", "--out", str(path)])
    return path


def test_the_folder_is_complete(folder: Path) -> None:
    preset = json.loads((folder / "gambit.json").read_text())
    assert preset["capacity"] == 64
    assert set(preset) >= {"swap_size", "check_interval", "warmup_tokens", "max_new_tokens", "temperature"}
    assert set(preset) >= {"median_length", "mean_thought_length"}
    card = (folder / "README.md").read_text()
    assert "`python -m gambit.pawn.train --workers 1 --tiny`" in card and str(folder) not in card


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


def test_the_scorer_file_says_what_it_needs(folder: Path) -> None:
    with safe_open(folder / "scorer.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["gambit"])
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
        assert all(file.get_tensor(name).dtype == torch.float32 for name in shapes)
    hidden_size = metadata["hidden_size"]
    assert shapes == {
        "net.0.weight": (512, hidden_size),
        "net.0.bias": (512,),
        "net.2.weight": (1, 512),
        "net.2.bias": (1,),
    }
    assert metadata["base_model_hash"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    expected = {"format": 1, "architecture": "mlp", "base_model": "pawn", "layer": -1, "aggregation": "mean"}
    assert metadata | expected | {"boundary_rule": "blank-line", "is_probability": True} == metadata
    assert metadata["state_position"] in ("before", "boundary")


def test_the_run_is_seeded(folder: Path, tmp_path: Path) -> None:
    main(["--tiny", "--workers", "1", "--out", str(tmp_path)])
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_scorer_learns_to_rank() -> None:
    """States that carry the outcome in one coordinate from half of the steps on."""
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(12, 8, 10, 6, generator=rng)
    is_correct = torch.rand(12, 8, generator=rng) < 0.4
    states[:, :, 5:, 0] += 3.0 * is_correct[..., None]
    table = StateTable(states, torch.full((12, 8), 10), is_correct)
    from gambit.pawn.scorer import FitRecipe

    fit = fit_scorer(table, FitRecipe(num_updates=60, puzzles_per_update=4, check_every=20))
    assert within_puzzle_auc(running_means(fit.scorer, table)[..., -1], is_correct) > 0.9


def test_ties_count_half() -> None:
    assert within_puzzle_auc(torch.zeros(1, 4), torch.tensor([[True, False, True, False]])) == 0.5
