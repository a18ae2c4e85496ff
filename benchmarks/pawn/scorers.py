"""Pawn's scorers: traces collected, MLP and sequence scorers fitted and judged, all by `gambit.training`."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.pawn.folder import MAX_NEW_TOKENS
from benchmarks.pawn.judge import FRACTIONS, Judgement, judge
from benchmarks.pawn.vocabulary import END, decode

from gambit.config.options import EngineConfig, SearchConfig
from gambit.pawn.puzzles import Split, parse_puzzle
from gambit.scorers.checkpoint import load_checkpoint, save_checkpoint
from gambit.stats import Ints
from gambit.storage.folders import locked
from gambit.training.collect import CollectPlan, LocalEngines, collect
from gambit.training.dataset import Dataset, Division, load_dataset
from gambit.training.evaluate import Rated, ScorerReport, compare, evaluate, rated_by, write_figures
from gambit.training.networks import recipe_for
from gambit.training.sampling import PAWN_SOURCE, pawn_tasks
from gambit.training.train import Fitted, TrainPlan, fit, info_for, train
from gambit.types import StatePosition

POSITION = StatePosition.BOUNDARY
SHIPPED_OBJECTIVE = "bce+pairwise"  # its scores are chances of success, which votes and the floor want, and rank well
TOKENS_PER_TRACE = 640  # a prompt, MAX_NEW_TOKENS and what blocks round up
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "system_prompt": ""}


@dataclass(frozen=True, slots=True)
class ScorerPlan:
    """The size of the collection, and how long scorers are fitted (None: as long as they get better)."""

    train_puzzles: int = 480
    dev_puzzles: int = 200
    traces_per_puzzle: int = 32
    traces_at_once: int = 1024
    max_epochs: int | None = None
    width: int = 128  # of the sequence scorer: small enough to ship
    seed: int = 0

    @property
    def changes(self) -> dict[str, int | float | bool]:
        epochs = {} if self.max_epochs is None else {"max_epochs": self.max_epochs}
        return {"seed": self.seed, "width": self.width, **epochs}


TINY_SCORERS = ScorerPlan(
    train_puzzles=24, dev_puzzles=6, traces_per_puzzle=6, traces_at_once=36, max_epochs=2, width=16
)


def collect_splits(plan: ScorerPlan, model: Path, data: Path, device: str) -> tuple[Dataset, Dataset]:
    """Traces of the scorer split to fit to, and of the development split to judge by: the test split stays unseen."""
    room = plan.traces_at_once * TOKENS_PER_TRACE
    engine = EngineConfig(model=str(model), engine="local", device=device, kv_budget_tokens=room)
    search = SearchConfig(seed=plan.seed, max_new_tokens=MAX_NEW_TOKENS, **SAMPLING)
    how = CollectPlan(
        data, "", engine, search, plan.traces_per_puzzle, plan.traces_at_once, positions=(POSITION,), num_graders=6
    )
    with closing(LocalEngines(how)) as engines:
        for split, count in ((Split.DEV, plan.dev_puzzles), (Split.SCORER, plan.train_puzzles)):
            name = split.name.lower()
            with locked(data / name):
                tasks = pawn_tasks(name, count, plan.seed)
                collect(tasks, replace(how, out=data / name, source=PAWN_SOURCE + name), engines=engines)
    return _load(data / "scorer"), _load(data / "dev")


def _load(folder: Path) -> Dataset:
    """Under the name that the model will ship with, whatever folder it was sampled from."""
    data = load_dataset(folder, POSITION, with_tokens=True)
    return replace(data, header=data.header.model_copy(update={"model": "pawn"}))


def fit_scorers(plan: ScorerPlan, data: Dataset, folder: Path, device: str) -> list[Path]:
    """`scorer.safetensors`, the default; `scorers/mlp` and `scorers/sequence`, which rank held-out puzzles best."""
    made = {}
    for architecture in ("mlp", "sequence"):
        how = TrainPlan(folder, architecture, division=_division(), changes=plan.changes, device=device)
        trained = train(how, [data])
        made[folder / "scorers" / f"{architecture}.safetensors"] = trained.best, trained.metadata
        if architecture == "mlp":
            shipped = next(fitted for fitted in trained.tried if fitted.recipe.objective == SHIPPED_OBJECTIVE)
            made[folder / "scorer.safetensors"] = shipped, trained.metadata_of(shipped)
    for path, (fitted, metadata) in made.items():
        save_checkpoint(fitted.scorer, path, metadata)
    return list(made)


def _division() -> Division:
    return Division(validation=0.15, test=0.0)


def judge_checkpoints(paths: Sequence[Path], data: Dataset, device: torch.device) -> ScorerReport:
    """All scorers on the development split, beside the perfect judge; each checkpoint then quotes its own figures."""
    traces = data.all_traces()
    rated = {path.stem: rated_by(load_checkpoint(path), data, traces, device) for path in paths}
    chances = np.array([judgement.chances for judgement in judge_traces(data, traces)])
    rated["perfect judge"] = Rated(dict(zip(FRACTIONS, chances.T, strict=True)))
    report = compare(rated, data, traces)
    write_figures([str(path) for path in paths], report)
    return report


def judge_traces(data: Dataset, traces: Ints) -> list[Judgement]:
    """Returns what the perfect judge knows of each of these traces."""
    puzzles = [parse_puzzle(problem.question) for problem in data.problems]
    texts = [decode(data.tokens[trace].tolist()).removesuffix(END) for trace in traces]
    return [judge(puzzles[data.traces.problem_of[trace]], text) for trace, text in zip(traces, texts, strict=True)]


# -- what scorers cannot know ----------------------------------------------------------------------------------


def judge_unseen(
    plan: ScorerPlan,
    fitted_to: Dataset,
    judged_by: Dataset,
    judgements: Sequence[Judgement],
    shipped: Path,
    device: torch.device,
) -> ScorerReport:
    """Among traces without a misreading: the shipped scorer, and an MLP that may learn nothing else."""
    every = judge_traces(fitted_to, fitted_to.all_traces())
    own = _fitted_to_miscalculations(plan, fitted_to, _without_misreading(every), device)
    scorers = {"scorer": load_checkpoint(shipped), "fitted to these": own.scorer}
    judged = {name: (scorer, judged_by) for name, scorer in scorers.items()}
    return evaluate(judged, _without_misreading(judgements), device)


def _without_misreading(judgements: Sequence[Judgement]) -> Ints:
    """Traces that are right, or wrong by a miscalculation alone."""
    return np.flatnonzero([judgement.is_valid and not judgement.has_misreading for judgement in judgements])


def _fitted_to_miscalculations(plan: ScorerPlan, data: Dataset, traces: Ints, device: torch.device) -> Fitted:
    known = data.traces
    per_trace = ("problem_of", "starts", "num_thoughts", "num_tokens", "is_correct")
    kept = replace(known, **{name: getattr(known, name)[traces] for name in per_trace})
    recipe = replace(recipe_for("pairwise", "mlp"), **plan.changes)
    return fit(
        replace(data, traces=kept, tokens=()), _division(), recipe, info_for(data, "mlp"), device, lambda _: None
    )
