"""Trains a verifier within a time, watched by its ranking of held-out problems."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gambit.config.trust import ScorerTrust
from gambit.engines.local.model import pick_device
from gambit.errors import UserError
from gambit.models import files as models
from gambit.stats import Floats, Ints
from gambit.training.dataset import Division, Part, read_labels
from gambit.training.fit import Say, parts_of
from gambit.training.logistic import calibrating_line
from gambit.training.ranking import QUARTERS
from gambit.training.verifier.batches import BatchSizes, ProblemOrder
from gambit.training.verifier.beginning import beginning
from gambit.training.verifier.fused import use_fused_layers
from gambit.training.verifier.memory import fit_to_memory, recompute
from gambit.training.verifier.objective import chance_loss, ranking_loss
from gambit.training.verifier.optimiser import MasterWeights
from gambit.training.verifier.packing import flash_works, use_packing
from gambit.training.verifier.passages import Passages, load_passages
from gambit.training.verifier.passes import TrainingPass, made_ahead
from gambit.training.verifier.reading import ReadTraces, problem_aucs_read, quarter_aucs, read_traces
from gambit.training.verifier.recipe import PASS_TOKENS, UPDATE_TOKENS, VerifierPlan, VerifierRecipe
from gambit.types import Aggregation
from gambit.verifiers.lora import LoraVerifier
from gambit.verifiers.lora_folder import Platt, read_info

LOOKS = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)  # of the training, when some held-out problems are ranked
WATCHED_PROBLEMS, WATCHED_TRACES = 96, 8  # of those looks; the last one ranks all
MOST_LOOKING = 0.05  # of a limited time, for one look
TOLD_EVERY = 5.0  # seconds
SCALE_PASSAGES = 16  # by which the size of states is measured
MOST_PASS_HALVINGS = 6
PROBE_TOKENS = 4_096  # of the pass by which memory is measured


@dataclass(frozen=True, slots=True, eq=False)
class TrainedVerifier:
    """A verifier and how it ranks held-out problems."""

    verifier: LoraVerifier
    held_out: Floats  # [problem], mean over the quarters
    quarters: tuple[float, ...]  # AUC at each
    seconds: float
    tokens_per_second: float

    @property
    def held_out_auc(self) -> float:
        return float(np.nanmean(self.held_out))


def train_verifier(plan: VerifierPlan, passages: Passages | None = None, say: Say = lambda _: None) -> TrainedVerifier:
    """Nothing but the collection's training problems is trained on, nothing but its validation problems chosen by."""
    passages = passages or passages_of(plan)
    device = pick_device(plan.device)
    train, held_out = parts_of(passages.data, plan.division)
    recipe = plan.recipe
    train = drawn_problems(train, passages, recipe)
    torch.manual_seed(recipe.seed)
    say(f"loading {models.name_of(plan.model)} on {device}")
    verifier = beginning(plan, passages.data.header, device)
    run = _TrainingRun(verifier, passages, train, held_out, recipe, say)
    run.fit()
    return run.finished(plan)


def passages_of(plan: VerifierPlan, skipped: list[str] | None = None) -> Passages:
    """Reads what a plan trains on; `skipped` gathers shards that were left out."""
    labels = read_labels(plan.labels)
    passages = load_passages(plan.data, skip_corrupted=plan.skip_corrupted, on_skip=skipped)
    return Passages.of(labels.on(passages.data))


def drawn_problems(train: Ints, passages: Passages, recipe: VerifierRecipe) -> Ints:
    """Traces of as many problems as the recipe wants; fewer are part of more, so that a curve is of one drawing."""
    problem_of = passages.data.traces.problem_of[train]
    problems = np.random.default_rng(recipe.seed).permutation(np.unique(problem_of))
    return train[np.isin(problem_of, problems[: recipe.num_problems])]


@dataclass(frozen=True, slots=True)
class Look:
    """How well held-out problems were ranked at one moment of a training."""

    num_problems: int  # trained on by then, each as often as it was: within the first epoch, a learning curve
    aucs: Floats  # by held-out problem
    weights: list[Tensor]


class _TrainingRun:
    """One verifier in training."""

    def __init__(
        self, verifier: LoraVerifier, passages: Passages, train: Ints, held_out: Ints, recipe: VerifierRecipe, say: Say
    ) -> None:
        self._verifier, self._passages, self._recipe, self._say = verifier, passages, recipe, say
        self._held_out = held_out
        rng = np.random.default_rng(recipe.seed)
        self._lengths = passages.lengths
        self._order = ProblemOrder(passages.data.traces, self._lengths, train, rng)
        self._watched = watched(passages, held_out, rng)
        use_packing(verifier)
        use_fused_layers(verifier.network)
        self._is_continued = bool(verifier.head.weight.any())
        self._uses_flash = flash_works(verifier.device, verifier.network.dtype)  # type: ignore[arg-type]
        self._is_cuda = verifier.device.type == "cuda"
        verifier.input_scale = _unit_scale(verifier, passages, train)
        with torch.no_grad():
            verifier.head.weight /= verifier.input_scale  # of a verifier that was trained before; zeros else
        self._weights = MasterWeights(verifier, recipe)
        self._num_updates = self._num_problems = self._num_tokens = 0
        self._most_tokens = self._fit_to_memory(train)
        self._sizes = BatchSizes(recipe.update_tokens or UPDATE_TOKENS[verifier.device.type], self._most_tokens,
                                 recipe.traces_per_problem, recipe.uniform_traces)  # fmt: skip
        self._seconds_read = 0.0  # spent on looks, which are no training
        self._looks: list[Look] = []
        self._told = 0.0
        self._losses: list[Tensor] = []
        self._last_auc = float("nan")

    # -- the loop ----------------------------------------------------------------------------------------------

    def fit(self) -> None:
        self._began = time.monotonic()
        attention = "torch's flash kernel" if self._uses_flash else "padded"
        self._say(f"{self._order.num_problems} problems to train on, {len(self._watched)} traces watched; passes of "
                  f"{self._most_tokens:,} tokens, attention: {attention}")  # fmt: skip
        self._verifier.network.train()
        if self._is_continued:
            self._look()
        for share, update in made_ahead(self._updates()):
            progress = max(share, self._elapsed / self._recipe.seconds) if self._recipe.seconds else share
            if progress >= 1:
                break
            if self._is_time_to_look(progress):
                self._look()
            self._train_update(update)
            self._weights.step(progress)
            self._num_updates += 1
            self._tell(progress)
        if self._looks:
            self._look()

    def _updates(self) -> Iterator[tuple[float, list[TrainingPass]]]:
        """With the share of the epochs that is done before each."""
        for epoch in range(self._recipe.epochs):
            done = 0
            for update in self._order.epoch(self._sizes):
                share = (epoch + done / self._order.num_problems) / self._recipe.epochs
                yield share, [self._ready(problems) for problems in update]
                done += sum(map(len, update))

    def _ready(self, problems: Sequence[Ints]) -> TrainingPass:
        found = TrainingPass.of(problems, self._passages, self._uses_flash)
        return found.pinned() if self._is_cuda else found

    def _fit_to_memory(self, train: Ints) -> int:
        """Tokens of a pass; also decides whether activations are computed again on the way back."""
        wanted = self._recipe.pass_tokens or PASS_TOKENS[self._verifier.device.type]
        if not self._is_cuda:
            if self._recipe.recomputes:
                recompute(self._verifier)
            return wanted
        some = self._ready([train[: max(1, np.searchsorted(np.cumsum(self._lengths[train]), PROBE_TOKENS))]])
        fitted = fit_to_memory(self._verifier, lambda: self._pass(some, 1.0), some.num_tokens, wanted,
                               self._recipe.recomputes)  # fmt: skip
        self._weights.forget()
        self._num_tokens = 0
        self._say(str(fitted))
        return fitted.pass_tokens

    def _is_time_to_look(self, progress: float) -> bool:
        """Where time is limited, a look must be worth it: reading takes about a third of training's time."""
        num_looks = len(self._looks) - self._is_continued
        if num_looks == len(LOOKS) or progress < LOOKS[num_looks]:
            return False
        seconds = int(self._lengths[self._watched].sum()) / (3 * self.tokens_per_second + 1)
        return not self._recipe.seconds or seconds < MOST_LOOKING * self._recipe.seconds

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _train_update(self, update: list[TrainingPass]) -> None:
        count = sum(len(each.problems) for each in update)
        for each in update:
            for part in self._within_memory(each):
                self._losses.append(self._backward(part, len(part.problems) / count))
        self._num_problems += count

    def _within_memory(self, each: TrainingPass) -> Iterator[TrainingPass]:
        """In halves if it would not fit."""
        if each.num_tokens <= self._most_tokens or len(each.problems) == 1:
            yield each
            return
        half = len(each.problems) // 2
        for part in (each.problems[:half], each.problems[half:]):
            yield from self._within_memory(self._ready(part))

    def _backward(self, each: TrainingPass, weight: float) -> Tensor:
        for _ in range(MOST_PASS_HALVINGS):
            try:
                return self._pass(each, weight)
            except torch.OutOfMemoryError:
                self._weights.forget()
            torch.cuda.empty_cache()  # outside of the handler, whose traceback holds activations
            self._most_tokens = min(self._most_tokens, each.num_tokens) // 2
            self._say(f"out of memory with {each.num_tokens} tokens a pass: {self._most_tokens} from now on")
            fewer = each.problems[: max(1, len(each.problems) // 2)]
            each = self._ready([traces[: max(2, len(traces) // 2)] for traces in fewer])
        raise UserError(f"the GPU has no room to train on {self._most_tokens} tokens at a time: free its memory, or "
                        "train with --recompute")  # fmt: skip

    def _pass(self, each: TrainingPass, weight: float) -> Tensor:
        batch = each.batch(self._verifier)
        self._num_tokens += each.num_tokens
        loss = ranking_loss(batch) + self._recipe.chance_weight * chance_loss(batch)
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    # -- what is seen of it ------------------------------------------------------------------------------------

    def _look(self) -> None:
        began = time.monotonic()
        found = problem_aucs_read(self._read(self._watched), self._passages, self._watched, Aggregation.LAST)
        self._looks.append(Look(self._num_problems, found, self._weights.copied()))
        self._last_auc = float(np.nanmean(found))
        self._say(f"{self._elapsed:.0f} s, {self._num_problems:,} problems read: AUC within "
                  f"{np.isfinite(found).sum()} held-out ones, mean over 25-100 %: {self._last_auc:.4f}")  # fmt: skip
        self._seconds_read += time.monotonic() - began

    def _read(self, traces: Ints) -> ReadTraces:
        self._verifier.network.eval()
        found = read_traces(self._verifier, self._passages, traces)
        self._verifier.network.train()
        return found

    def _tell(self, progress: float) -> None:
        if self._elapsed - self._told < TOLD_EVERY:
            return
        self._told = self._elapsed
        loss = float(torch.stack(self._losses).mean())
        self._losses.clear()
        left = self._elapsed * (1 - progress) / max(progress, 1e-9)
        if self._recipe.seconds:
            left = min(left, self._recipe.seconds - self._elapsed)
        self._say(f"{self._elapsed:.0f} s, {progress:.0%}: step {self._num_updates}, loss {loss:.4f}, held-out AUC "
                  f"{self._last_auc:.4f}, {self.tokens_per_second:,.0f} tokens/s, about {left:.0f} s left")  # fmt: skip

    @property
    def tokens_per_second(self) -> float:
        return self._num_tokens / max(1e-9, self._elapsed - self._seconds_read)

    # -- the end -----------------------------------------------------------------------------------------------

    def finished(self, plan: VerifierPlan) -> TrainedVerifier:
        """With the aggregation that ranks held-out problems best, and calibrated on them."""
        seconds, speed = self._elapsed, self.tokens_per_second
        look = best_look([each.aucs for each in self._looks])
        if look is not None:
            self._weights.put_back(self._looks[look].weights)
        read = self._read(self._held_out)
        aucs = {
            each: problem_aucs_read(read, self._passages, self._held_out, each)
            for each in (Aggregation.LAST, Aggregation.MEAN)
        }
        chosen = max(aucs, key=lambda each: float(np.nanmean(aucs[each])))
        quarters = quarter_aucs(read, self._passages, self._held_out, chosen)
        reached = tuple(float(np.nanmean(each)) for each in quarters)
        calibration = calibrated_on(read, self._held_out, chosen)
        described = {
            **description(plan, self._passages),
            "updates": self._num_updates, "tokens": self._num_tokens, "seconds": seconds, "tokens_per_second": speed,
            "watched_auc": [float(np.nanmean(each.aucs)) for each in self._looks], "chosen_look": look,
            "watched_after_problems": [each.num_problems for each in self._looks],
        }  # fmt: skip
        num_problems = int(np.isfinite(aucs[chosen]).sum())
        metrics = {
            "held_out_auc": float(np.nanmean(aucs[chosen])),
            "auc": {f"{share:g}": auc for share, auc in zip(QUARTERS, reached, strict=True)},
            "held_out_problems": num_problems,
            "by_aggregation": {str(each): float(np.nanmean(found)) for each, found in aucs.items()},
        }
        trust = self._trust(plan.division, quarters, chosen)
        verifier = self._verifier.with_info(
            aggregation=chosen, calibration=calibration, training=described, metrics=metrics, trust=trust
        )
        verifier.network.eval()
        return TrainedVerifier(verifier, aucs[chosen], reached, seconds, speed)

    def _trust(self, division: Division, chosen_by: list[Floats], aggregation: Aggregation) -> ScorerTrust:
        """By the problems kept for testing: those that the verifier was chosen by flatter it.

        `chosen_by`: how it ranks the latter, which must do where no problem was kept that says anything.
        """
        data = self._passages.data
        traces, quarters = self._held_out, chosen_by
        if len(kept := data.of_part(division, Part.TEST)):
            found = quarter_aucs(self._read(kept), self._passages, kept, aggregation)
            if np.isfinite(found[0]).any():
                traces, quarters = kept, found
        reached = tuple(float(np.nanmean(each)) for each in quarters)
        length = float(np.median(data.traces.num_tokens[traces]))
        num_problems = int(np.isfinite(quarters[0]).sum())
        return ScorerTrust(auc=reached, num_problems=num_problems, base_model=data.header.model,
                           source=data.header.source, median_tokens=length)  # fmt: skip


def description(plan: VerifierPlan, passages: Passages) -> dict[str, object]:
    """What a checkpoint says of its making."""
    data = passages.data
    return {
        "collection": data.header.id,
        "source": data.header.source,
        "problems": len(data.problems),
        "traces": {str(part): len(data.of_part(plan.division, part)) for part in Part},
        "labels": data.labelled_by,
        "start": None if plan.start is None else start_of(plan.start),
        "division": dataclasses.asdict(plan.division),
        "recipe": dataclasses.asdict(plan.recipe),
    }


def start_of(folder: Path) -> dict[str, object]:
    """What was known of the verifier that this one goes on from."""
    made = read_info(folder).training
    return {name: made.get(name) for name in ("collection", "updates", "tokens", "seconds", "labels", "start")}


def best_look(looks: list[Floats]) -> int | None:
    """The last one, unless an earlier one ranks the same problems better by more than the error of the difference."""
    if not looks:
        return None
    best = len(looks) - 1
    for number, aucs in enumerate(looks[:-1]):
        gains = aucs - looks[best]
        gains = gains[np.isfinite(gains)]
        if len(gains) > 1 and gains.mean() > gains.std(ddof=1) / np.sqrt(len(gains)):
            best = number
    return best


def watched(passages: Passages, held_out: Ints, rng: np.random.Generator) -> Ints:
    """Some traces of some held-out problems that have right and wrong ones."""
    known = passages.data.traces
    order = ProblemOrder(known, passages.lengths, held_out, rng)
    sizes = BatchSizes(1, 1 << 40, WATCHED_TRACES, 0)
    drawn = [traces for update in order.epoch(sizes) for one in update for traces in one]
    mixed = [traces for traces in drawn if 0 < known.is_correct[traces].sum() < len(traces)]
    return np.sort(np.concatenate(mixed[:WATCHED_PROBLEMS]))


def calibrated_on(read: ReadTraces, traces: Ints, aggregation: Aggregation) -> Platt:
    """From the logits of traces at every quarter to the share of them that ends right."""
    known = read.traces
    seen = traces[known.num_thoughts[traces] > 0]
    logits = np.concatenate([read.logits(seen, share, aggregation) for share in QUARTERS])
    outcomes = np.tile(known.is_correct[seen].astype(np.float64), len(QUARTERS))
    slope, offset = calibrating_line(torch.from_numpy(logits), torch.from_numpy(outcomes))
    return Platt(slope=slope, offset=offset)


@torch.no_grad()
def _unit_scale(verifier: LoraVerifier, passages: Passages, train: Ints) -> float:
    """Of states whose length is then about 1, so that one rate for the head suits every model."""
    some = [passages.passage(trace) for trace in train[:: max(1, len(train) // SCALE_PASSAGES)][:SCALE_PASSAGES]]
    states = torch.cat([verifier.picked_states([each]) for each in some])
    return 1 / max(1e-9, float(states.norm(dim=-1).mean()))
