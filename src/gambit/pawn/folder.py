"""Writes the folder that ships: weights, tokenizer, scorer, preset and model card; decides nothing."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gambit.pawn import traces
from gambit.pawn.evaluation import Accuracy, Ranking
from gambit.pawn.network import build_tokenizer
from gambit.pawn.puzzles import Level, Split
from gambit.pawn.sampling import MAX_NEW_TOKENS

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class Preset:
    """Search settings that suit the model; chosen on the development split."""

    capacity: int
    swap_size: int
    check_interval: int
    warmup_tokens: int
    median_length: int
    mean_thought_length: float
    max_new_tokens: int = MAX_NEW_TOKENS
    # The plain distribution: a nucleus would cut away the very slips that the puzzles are about.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    system_prompt: str = ""  # it knows no words but those of its puzzles


@dataclass(frozen=True, slots=True)
class Record:
    """What the model card tells of the run."""

    command: str
    device: str
    seconds: dict[str, float]
    num_parameters: int
    num_traces: int
    num_samples: int
    curve: list[tuple[int, float]]
    accuracy: dict[str, Accuracy]
    ranking: dict[str, Ranking]
    position: str


def write_model(model: "Qwen3ForCausalLM", folder: Path) -> str:
    """Save network and tokenizer; returns the hash of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    generation = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    generation |= {"eos_token_id": model.config.eos_token_id}
    generation |= {"pad_token_id": model.config.pad_token_id, "max_new_tokens": MAX_NEW_TOKENS}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def write_preset(preset: Preset, folder: Path) -> None:
    (folder / "gambit.json").write_text(json.dumps(asdict(preset), indent=2) + "\n")


def write_card(record: Record, folder: Path) -> None:
    (folder / "README.md").write_text("\n".join([*_head(record), *_data(), *_results(record), *_training(record), ""]))


def _head(record: Record) -> list[str]:
    return [
        "---",
        "license: apache-2.0",
        "library_name: transformers",
        "---",
        "# pawn: a tiny reasoning model to test thought-level search on",
        "",
        f"A Qwen3 network with {record.num_parameters / 1e6:.1f} M parameters that solves register puzzles modulo 97,",
        "such as `a = 17; b = 61; c = a * b; d = c - a; d?`, one thought a line, and then boxes the answer. It can do",
        "nothing else. It is a synthetic testbed: it slips, falls for traps and has second thoughts at rates put into",
        "its training traces, so that a search over thoughts has something to find. Claims about real LLMs need real",
        "LLMs.",
        "",
        f"`scorer.safetensors` is the MLP that scores its thoughts (state position `{record.position}`), `gambit.json`",
        "holds the search settings that suit it.",
        "",
    ]


def _data() -> list[str]:
    levels = ", ".join(f"{level.name.lower()} {level.value}" for level in Level)
    shares = ", ".join(f"{split.name.lower()} {split.value}/16" for split in Split)
    return [
        "## Data",
        "",
        "Traces are drawn by `gambit.pawn.traces`. A slip misreads the result of the thought before: its last digit is",
        f"taken for one that looks like it. Probability {traces.SLIP_RATE}, for numbers ending in {traces.TRAP_DIGIT}",
        f"(traps) {traces.TRAP_RATE}. While a slip stands, each thought is with {traces.SECOND_THOUGHT_RATE} a",
        "second thought about the first slip, which corrects it with "
        f"{traces.CORRECTION_RATE} and repeats it otherwise.",
        "",
        f"Levels by steps to compute: {levels}. Splits by a hash of the puzzle's structure and numbers: {shares}.",
        "",
    ]


def _results(record: Record) -> list[str]:
    rows = [
        f"| {name} | {a.num_puzzles} | {a.pass_at_1:.3f} | {a.self_consistency:.3f} | {a.weighted:.3f} "
        f"| {a.valid_format:.4f} | {a.mean_tokens:.0f} | {a.mean_thoughts:.1f} |"
        for name, a in record.accuracy.items()
    ]
    auc = [
        f"| {position} | " + " | ".join(f"{r.scorer[q]:.3f} ({r.ceiling[q]:.3f})" for q in r.scorer) + " |"
        for position, r in record.ranking.items()
    ]
    return [
        f"## Measured on the test split ({record.num_samples} traces a puzzle, temperature 1)",
        "",
        "| level | puzzles | pass@1 | majority | score-weighted | valid format | tokens | thoughts |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        "Within-puzzle AUC of the trace score by share of the steps (in brackets: a judge that knows the exact state).",
        "",
        "| state position | 25 % | 50 % | 75 % | 100 % |",
        "|---|---|---|---|---|",
        *auc,
        "",
    ]


def _training(record: Record) -> list[str]:
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in record.seconds.items())
    return [
        "## Training",
        "",
        f"`{record.command}` on {record.device}: {record.num_traces} traces; {seconds}.",
        "",
        "Loss (nats per trace token) by update: " + ", ".join(f"{u}: {loss:.4f}" for u, loss in record.curve) + ".",
    ]
