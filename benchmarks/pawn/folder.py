"""Writes the folder that ships: weights, tokenizer, preset and model card."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from benchmarks.pawn import traces
from benchmarks.pawn.network import build_tokenizer
from benchmarks.pawn.pretraining import CurvePoint

from gambit.pawn.puzzles import Level, Split

if TYPE_CHECKING:
    from benchmarks.pawn.measure import Accuracy
    from transformers import Qwen3ForCausalLM

    from gambit.training.evaluate import ScorerReport

MAX_NEW_TOKENS = 448
QUARTERS = (0.25, 0.5, 0.75, 1.0)
TEMPLATE = Path(__file__).with_name("card.md")


@dataclass(frozen=True, slots=True)
class Preset:
    """Search settings that suit the model, of which lengths are measured."""

    median_length: int
    mean_thought_length: float
    # Chosen among seven on version 1's development split; a round every two thoughts.
    capacity: int = 64
    swap_size: int = 16
    check_interval: int = 24
    warmup_tokens: int = 12
    max_new_tokens: int = MAX_NEW_TOKENS
    # The plain distribution: a nucleus would cut away the very slips that the puzzles are about.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    system_prompt: str = ""  # it knows no words but those of its puzzles


@dataclass(frozen=True, slots=True)
class NetworkRun:
    """The making of the network; kept beside it until the card is written."""

    command: str
    device: str
    seconds: float
    num_parameters: int
    num_traces: int
    curve: list[CurvePoint]


@dataclass(frozen=True, slots=True)
class Measured:
    """The model card's figures on the development split."""

    accuracy: Mapping[str, "Accuracy"]
    report: "ScorerReport"
    unseen: "ScorerReport"  # of traces without a misreading: what scorers know of miscalculations
    num_samples: int


def write_model(model: "Qwen3ForCausalLM", folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    generation = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    generation |= {"eos_token_id": model.config.eos_token_id}
    generation |= {"pad_token_id": model.config.pad_token_id, "max_new_tokens": MAX_NEW_TOKENS}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_preset(preset: Preset, folder: Path) -> None:
    (folder / "gambit.json").write_text(json.dumps(asdict(preset), indent=2) + "\n")


def write_card(run: NetworkRun, measured: Measured, folder: Path) -> None:
    """The template with everything measured and every constant of the traces."""
    text = TEMPLATE.read_text().format(**_of_traces(), **_of_run(run), **_of_measured(measured))
    (folder / "README.md").write_text(text)


def _of_traces() -> dict[str, object]:
    return {
        "levels": ", ".join(f"{level.name.lower()} {level.value}" for level in Level),
        "splits": ", ".join(f"{split.name.lower()} {split.value}/16" for split in Split),
        "misreading": traces.MISREADING_RATE,
        "trap_digit": traces.TRAP_DIGIT,
        "trap": traces.TRAP_RATE,
        "hasty_steps": traces.HASTY_STEPS,
        "calm": 1 / traces.CALM_SHARE,
        "miscalculation": traces.MISCALCULATION_RATE,
        "second_look": traces.SECOND_LOOK_RATE,
        "fitting_word": traces.FITTING_WORD_RATE,
        "wait": traces.WAIT.strip(),
        "check": traces.CHECK.strip(),
    }


def _of_run(run: NetworkRun) -> dict[str, object]:
    return asdict(run) | {
        "num_parameters": run.num_parameters / 1e6,
        "curve": ", ".join(f"{point.update}: {point.loss:.4f}" for point in run.curve),
        "product_curve": ", ".join(f"{point.update}: {point.product_loss:.3f}" for point in run.curve),
    }


def _of_measured(measured: Measured) -> dict[str, object]:
    accuracy = [
        f"| {name} | {a.num_puzzles} | {a.pass_at_1:.3f} | {a.majority:.3f} | {a.score_weighted:.3f} "
        f"| {a.best_of_n:.3f} | {a.valid_format:.4f} | {a.mean_tokens:.0f} | {a.mean_thoughts:.1f} |"
        for name, a in measured.accuracy.items()
    ]
    return {
        "num_samples": measured.num_samples,
        "accuracy": "\n".join(accuracy),
        "ranking": _auc_rows(measured.report),
        "unseen": _auc_rows(measured.unseen),
    }


def _auc_rows(report: "ScorerReport") -> str:
    return "\n".join(
        f"| {ranking.name} | " + " | ".join(f"{ranking.auc[share].value:.3f}" for share in QUARTERS) + " |"
        for ranking in report.rankings
    )
