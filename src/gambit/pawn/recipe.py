"""The whole recipe of pawn, phase by phase: corpus, network, scorer, measurements, folder; parses no arguments."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gambit.pawn.corpus import make_corpus
from gambit.pawn.evaluation import Accuracy, Ranking, accuracy_by_level, final_scores, ranking
from gambit.pawn.folder import Preset, Record, write_card, write_model, write_preset
from gambit.pawn.judge import judge
from gambit.pawn.network import Shape, build_model
from gambit.pawn.pretraining import Recipe, Report, train
from gambit.pawn.puzzles import Puzzle, Split, generate
from gambit.pawn.sampling import POSITIONS, Samples, sample_traces
from gambit.pawn.scorer import Fit, FitRecipe, fit_scorer, save_scorer, state_table

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides the outcome of a run."""

    shape: Shape = field(default_factory=Shape)
    num_traces: int = 1_200_000
    recipe: Recipe = field(default_factory=Recipe)
    scorer_puzzles: int = 600
    fit: FitRecipe = field(default_factory=FitRecipe)
    test_puzzles: int = 300
    num_samples: int = 32  # traces of each of these puzzles
    num_rollouts: int = 100
    # Chosen among seven on the development split (benchmarks/results/pawn_search_dev.json); a round every two thoughts.
    capacity: int = 64
    swap_size: int = 16
    check_interval: int = 24
    warmup_tokens: int = 12
    seed: int = 0


TINY = Plan(
    shape=Shape(num_layers=1, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_size=16),
    num_traces=64,
    recipe=Recipe(num_updates=4, tokens_per_update=2048),
    scorer_puzzles=6,
    fit=FitRecipe(num_updates=4, puzzles_per_update=2, check_every=2),
    test_puzzles=3,
    num_samples=4,
    num_rollouts=2,
)


@dataclass(slots=True)
class Clock:
    """Seconds by phase, told as each one ends."""

    report: Report
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start
        self.report(f"{name}: {self.seconds[name]:.0f} s")


def run(plan: Plan, folder: Path, device: torch.device, num_workers: int, command: str, report: Report) -> Record:
    """From nothing to the folder that ships."""
    clock = Clock(report)
    curve, digest = _make_model(plan, folder, device, num_workers, clock)
    model = load_model(folder, device)
    puzzles = list(islice(generate(Split.SCORER, plan.seed), plan.scorer_puzzles))
    test = list(islice(generate(Split.TEST, plan.seed), plan.test_puzzles))
    with clock.phase("sampling"):
        # one call for both splits: a GPU decodes twice the rows in little more time
        samples = sample_traces(model, puzzles + test, plan.num_samples, plan.seed)
    with clock.phase("scorer"):
        scorers = _fit_scorers(plan, samples.select(slice(len(puzzles))), report)
    with clock.phase("evaluation"):
        measured = _measure(plan, test, samples.select(slice(len(puzzles), None)), scorers, num_workers)
    _write_scorer(plan, scorers, measured, digest, folder)
    write_preset(_preset(plan, measured), folder)
    record = Record(
        command=command,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        seconds=clock.seconds,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_traces=plan.num_traces,
        num_samples=plan.num_samples,
        curve=curve,
        accuracy=measured.accuracy,
        ranking=measured.ranking,
        position=measured.position,
    )
    write_card(record, folder)
    return record


def _make_model(
    plan: Plan, folder: Path, device: torch.device, num_workers: int, clock: Clock
) -> tuple[list[tuple[int, float]], str]:
    """Train and write the network; everything after works on the weights as written."""
    with clock.phase("corpus"):
        corpus = make_corpus(plan.num_traces, plan.seed, num_workers)
    torch.manual_seed(plan.seed)
    model = build_model(plan.shape).to(device)
    with clock.phase("training"):
        curve = train(model, corpus, replace(plan.recipe, seed=plan.seed), clock.report)
    return curve, write_model(model, folder)


def load_model(folder: Path, device: torch.device) -> "Qwen3ForCausalLM":
    from transformers import Qwen3ForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def _fit_scorers(plan: Plan, samples: Samples, report: Report) -> dict[str, Fit]:
    """For each state position a scorer and its AUC on held-out puzzles of the scorer split."""
    found = {}
    for position in POSITIONS:
        found[position] = fit_scorer(state_table(samples, position), plan.fit)
        report(f"scorer at {position}: held-out AUC {found[position].held_out_auc:.4f}")
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    position: str  # the one to ship, chosen on the scorer split
    accuracy: dict[str, Accuracy]
    ranking: dict[str, Ranking]
    median_length: int


def _measure(
    plan: Plan, puzzles: list[Puzzle], samples: Samples, scorers: dict[str, Fit], num_workers: int
) -> Measured:
    position = max(scorers, key=lambda name: scorers[name].held_out_auc)
    judgements = judge(puzzles, samples.texts, plan.num_rollouts, num_workers)
    scores = final_scores(scorers[position].scorer, samples, position)
    return Measured(
        position,
        accuracy_by_level(puzzles, samples, scores, judgements),
        {name: ranking(fit.scorer, samples, name, judgements) for name, fit in scorers.items()},
        round(samples.num_tokens.float().median().item()),
    )


def _write_scorer(plan: Plan, scorers: dict[str, Fit], measured: Measured, digest: str, folder: Path) -> None:
    fit = scorers[measured.position]
    training = {"split": "scorer", "puzzles": plan.scorer_puzzles, "traces_per_puzzle": plan.num_samples}
    metadata = {
        "format": 1,
        "architecture": "mlp",
        "base_model": "pawn",
        "base_model_hash": digest,
        "hidden_size": plan.shape.hidden_size,
        "layer": -1,
        "state_position": measured.position,
        "boundary_rule": "blank-line",
        "aggregation": "mean",
        "is_probability": True,
        "training": training | {"held_out_auc": fit.held_out_auc} | asdict(plan.fit),
        "metrics": {position: asdict(ranked) for position, ranked in measured.ranking.items()},
    }
    save_scorer(fit.scorer, folder / "scorer.safetensors", metadata)


def _preset(plan: Plan, measured: Measured) -> Preset:
    reached = measured.accuracy["all"]
    return Preset(
        capacity=plan.capacity,
        swap_size=plan.swap_size,
        check_interval=plan.check_interval,
        warmup_tokens=plan.warmup_tokens,
        median_length=measured.median_length,
        mean_thought_length=round(reached.mean_tokens / max(1.0, reached.mean_thoughts), 2),
    )
