"""Trains a verifier within a time, watched by its ranking of held-out problems."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gambit.config.trust import ScorerTrust
from gambit.engines.local.model import pick_device
from gambit.errors import UserError
from gambit.models import files as models
from gambit.stats import Floats, Ints
from gambit.training.dataset import Dataset, Part, read_labels, with_labels
from gambit.training.networks import chance_loss, ranking_loss
from gambit.training.scoring import QUARTERS, calibrating_line, clearly_better
from gambit.training.train import Say, parts_of
from gambit.training.verifier.batches import (
    ProblemOrder,
    ReadTraces,
    TrainingPass,
    lengths_of,
    load_passages,
    made_ahead,
    passage_of,
    read_traces,
)
from gambit.training.verifier.kernels import fit_to_memory, flash_works, recompute, use_fused_layers, use_packing
from gambit.training.verifier.recipe import PASS_TOKENS, UPDATE_TOKENS, VerifierPlan, VerifierRecipe, starting_verifier
from gambit.types import Aggregation
from gambit.verifiers.lora import LoraVerifier
from gambit.verifiers.lora_folder import Platt, read_info

LOOKS = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)  # of the training, when some held-out problems are ranked
WATCHED_PROBLEMS, WATCHED_TRACES = 96, 8  # of those looks; the last one ranks all
MOST_LOOKING = 0.05  # of a limited time, for one look
REPORT_SECONDS = 5.0  # between two lines of progress
SCALE_PASSAGES = 16  # by which the size of states is measured
MOST_PASS_HALVINGS = 6
PROBE_TOKENS = 4_096  # of the pass by which memory is measured


def train_verifier(plan: VerifierPlan, data: Dataset | None = None, say: Say = lambda _: None) -> LoraVerifier:
    """Trains on the collection's training problems alone, and chooses by its validation problems alone.

    The description of the verifier has its figures on them, its seconds and its speed.
    """
    data = data or passages_of(plan)
    device = pick_device(plan.device)
    train, held_out = parts_of(data, plan.division)
    train = drawn_problems(train, data, plan.recipe)
    torch.manual_seed(plan.recipe.seed)
    say(f"loading {models.name_of(plan.model)} on {device}")
    run = _TrainingRun(starting_verifier(plan, data.header, device), data, train, held_out, plan, say)
    run.fit()
    return run.finished()


def passages_of(plan: VerifierPlan, skipped: list[str] | None = None) -> Dataset:
    """Reads what a plan trains on; `skipped` gathers corrupted shards, which raise without it."""
    labels = read_labels(plan.labels)
    data = load_passages(plan.data, skipped)
    return with_labels(data, labels, plan.labels)


def drawn_problems(train: Ints, data: Dataset, recipe: VerifierRecipe) -> Ints:
    """Returns traces of as many problems as the recipe has; fewer are a subset of more, as a learning curve needs."""
    problem_of = data.traces.problem_of[train]
    problems = np.random.default_rng(recipe.seed).permutation(np.unique(problem_of))
    return train[np.isin(problem_of, problems[: recipe.num_problems])]


class MasterWeights:
    """The trained weights: they run in the model's precision and are stepped in float32, in which small steps count.

    AdamW has a rate that follows the progress of the training.
    """

    def __init__(self, verifier: LoraVerifier, recipe: VerifierRecipe) -> None:
        self._recipe = recipe
        adapter = [each for each in verifier.network.parameters() if each.requires_grad]
        self._live: list[Tensor] = [*adapter, verifier.head.weight]
        self._masters = [each.detach().float().clone() for each in self._live]
        groups = [
            {"params": self._masters[:-1], "top": recipe.rate},
            {"params": self._masters[-1:], "top": recipe.head_rate},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=0.0, weight_decay=recipe.weight_decay, betas=(0.9, 0.98))

    @torch.no_grad()
    def step(self, progress: float) -> None:
        """Steps by the gradients that passes have gathered, and clears them."""
        for master, live in zip(self._masters, self._live, strict=True):
            master.grad = torch.zeros_like(master) if live.grad is None else live.grad.float()
        self.clear_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._recipe.most_gradient)
        is_sound = torch.isfinite(norm)  # stays on the device: the host prepares the next pass meanwhile
        for master in self._masters:  # one overflow would leave nothing but NaN
            assert master.grad is not None
            master.grad = torch.where(is_sound, master.grad, 0.0)
        for group in self._optimiser.param_groups:
            group["lr"] = group["top"] * share_of_rate(progress, self._recipe.warmup)
        self._optimiser.step()
        self.restore(self._masters)

    def clear_gradients(self) -> None:
        """Drops the gradients of passes, which may not have come to an end."""
        for live in self._live:
            live.grad = None

    def copied(self) -> list[Tensor]:
        return [each.clone() for each in self._masters]

    @torch.no_grad()
    def restore(self, values: Sequence[Tensor]) -> None:
        """Sets the weights to these values."""
        for master, live, value in zip(self._masters, self._live, values, strict=True):
            master.copy_(value)
            live.copy_(value)


def share_of_rate(progress: float, warmup: float) -> float:
    """Returns the share of the highest rate: it rises to 1 over the warm-up, then falls to 0 at the end."""
    rising = progress / warmup if warmup > 0 else 1.0
    return max(0.0, min(rising, (1 - progress) / max(1e-9, 1 - warmup)))


@dataclass(frozen=True, slots=True)
class Look:
    """The ranking of held-out problems at one moment of a training."""

    num_problems: int  # trained on by then, each as often as it was: within the first epoch, a learning curve
    aucs: Floats  # by held-out problem
    weights: list[Tensor]


class _TrainingRun:
    """One verifier in training."""

    def __init__(
        self, verifier: LoraVerifier, data: Dataset, train: Ints, held_out: Ints, plan: VerifierPlan, say: Say
    ) -> None:
        self._verifier, self._data, self._held_out, self._say = verifier, data, held_out, say
        self._plan, self._recipe = plan, plan.recipe
        rng = np.random.default_rng(self._recipe.seed)
        self._lengths = lengths_of(data)
        self._watched = watched(data, held_out, rng)
        use_packing(verifier)
        use_fused_layers(verifier.network)
        self._is_continued = bool(verifier.head.weight.any())
        self._uses_flash = flash_works(verifier.device, verifier.network.dtype)  # type: ignore[arg-type]
        self._is_cuda = verifier.device.type == "cuda"
        verifier.input_scale = _unit_scale(verifier, data, train)
        with torch.no_grad():
            verifier.head.weight /= verifier.input_scale  # of a verifier that was trained before; zeros else
        self._weights = MasterWeights(verifier, self._recipe)
        self._num_updates = self._num_problems = self._num_tokens = 0
        self._most_tokens = self._fit_to_memory(train)
        self._order = ProblemOrder(
            data, train, rng, pass_tokens=self._most_tokens,
            update_tokens=self._recipe.update_tokens or UPDATE_TOKENS[verifier.device.type],
            traces_per_problem=self._recipe.traces_per_problem, uniform_traces=self._recipe.uniform_traces,
        )  # fmt: skip
        self._seconds_read = 0.0  # spent on looks, which are no training
        self._looks: list[Look] = []
        self._last_report = 0.0
        self._losses: list[Tensor] = []

    # -- the loop ----------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Trains for all epochs, or until the time is over."""
        self._began = time.monotonic()
        attention = "torch's flash kernel" if self._uses_flash else "one trace after the other"
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
            self._report(progress)
        if self._looks:
            self._look()

    def _updates(self) -> Iterator[tuple[float, list[TrainingPass]]]:
        """Yields updates, each with the share of the epochs that is done before it."""
        for epoch in range(self._recipe.epochs):
            done = 0
            for update in self._order.epoch():
                share = (epoch + done / self._order.num_problems) / self._recipe.epochs
                yield share, [self._ready(problems) for problems in update]
                done += sum(map(len, update))

    def _ready(self, problems: Sequence[Ints]) -> TrainingPass:
        found = TrainingPass.of(problems, self._data, self._uses_flash)
        return found.pinned() if self._is_cuda else found

    def _fit_to_memory(self, train: Ints) -> int:
        """Returns the tokens of a pass. Also decides whether activations are computed again on the way back."""
        wanted = self._recipe.pass_tokens or PASS_TOKENS[self._verifier.device.type]
        if not self._is_cuda:
            if self._recipe.recomputes:
                recompute(self._verifier)
            return wanted
        some = self._ready([train[: max(1, np.searchsorted(np.cumsum(self._lengths[train]), PROBE_TOKENS))]])
        fitted = fit_to_memory(self._verifier, lambda: self._pass(some, 1.0), some.num_tokens, wanted,
                               self._recipe.recomputes, self._say)  # fmt: skip
        self._weights.clear_gradients()
        self._num_tokens = 0
        return fitted

    def _is_time_to_look(self, progress: float) -> bool:
        """Returns whether a look is due and, in a limited time, worth it: it takes a third of training's time."""
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
            for within in self._within_memory(each):
                self._losses.append(self._backward(within, len(within.problems) / count))
        self._num_problems += count

    def _within_memory(self, each: TrainingPass) -> Iterator[TrainingPass]:
        """Yields a pass, in halves if it would not fit."""
        if each.num_tokens <= self._most_tokens or len(each.problems) == 1:
            yield each
            return
        half = len(each.problems) // 2
        for problems in (each.problems[:half], each.problems[half:]):
            yield from self._within_memory(self._ready(problems))

    def _backward(self, each: TrainingPass, weight: float) -> Tensor:
        """Returns the loss of a pass. Where memory is short, fewer traces are read, and fewer tokens from then on."""
        for _ in range(MOST_PASS_HALVINGS):
            try:
                return self._pass(each, weight)
            except torch.OutOfMemoryError:
                self._weights.clear_gradients()
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
        """Ranks the watched traces and keeps the weights."""
        began = time.monotonic()
        found = self._read(self._watched).quarter_aucs(self._watched, Aggregation.LAST).mean(axis=0)
        self._looks.append(Look(self._num_problems, found, self._weights.copied()))
        self._say(f"{self._elapsed:.0f} s, {self._num_problems:,} problems read: AUC within "
                  f"{np.isfinite(found).sum()} held-out ones, mean over 25-100 %: {np.nanmean(found):.4f}")  # fmt: skip
        self._seconds_read += time.monotonic() - began

    def _read(self, traces: Ints) -> ReadTraces:
        self._verifier.network.eval()
        found = read_traces(self._verifier, self._data, traces)
        self._verifier.network.train()
        return found

    def _report(self, progress: float) -> None:
        if self._elapsed - self._last_report < REPORT_SECONDS:
            return
        self._last_report = self._elapsed
        loss = float(torch.stack(self._losses).mean())
        self._losses.clear()
        left = self._elapsed * (1 - progress) / max(progress, 1e-9)
        if self._recipe.seconds:
            left = min(left, self._recipe.seconds - self._elapsed)
        auc = np.nanmean(self._looks[-1].aucs) if self._looks else np.nan
        self._say(f"{self._elapsed:.0f} s, {progress:.0%}: step {self._num_updates}, loss {loss:.4f}, held-out AUC "
                  f"{auc:.4f}, {self.tokens_per_second:,.0f} tokens/s, about {left:.0f} s left")  # fmt: skip

    @property
    def tokens_per_second(self) -> float:
        return self._num_tokens / max(1e-9, self._elapsed - self._seconds_read)

    # -- the end -----------------------------------------------------------------------------------------------

    def finished(self) -> LoraVerifier:
        """Returns the verifier with the aggregation that ranks held-out problems best, calibrated on them."""
        seconds, speed = self._elapsed, self.tokens_per_second
        look = best_look([each.aucs for each in self._looks])
        if look is not None:
            self._weights.restore(self._looks[look].weights)
        read = self._read(self._held_out)
        quarters = {each: read.quarter_aucs(self._held_out, each) for each in (Aggregation.LAST, Aggregation.MEAN)}
        reached = {each: float(np.nanmean(found.mean(axis=0))) for each, found in quarters.items()}
        chosen = max(reached, key=reached.__getitem__)
        at_quarters = tuple(np.nanmean(quarters[chosen], axis=1).tolist())
        training = {
            **self._data.origin(self._plan.division),
            "start": self._start(), "recipe": dataclasses.asdict(self._recipe),
            "updates": self._num_updates, "tokens": self._num_tokens, "seconds": seconds, "tokens_per_second": speed,
            "watched_auc": [float(np.nanmean(each.aucs)) for each in self._looks], "chosen_look": look,
            "watched_after_problems": [each.num_problems for each in self._looks],
        }  # fmt: skip
        metrics = {
            "held_out_auc": reached[chosen],
            "auc": {f"{share:g}": auc for share, auc in zip(QUARTERS, at_quarters, strict=True)},
            "held_out_problems": int(np.isfinite(quarters[chosen][0]).sum()),
            "by_aggregation": {str(each): auc for each, auc in reached.items()},
        }
        self._verifier.info = self._verifier.info.model_copy(update={
            "aggregation": chosen, "calibration": calibrated_on(read, self._held_out, chosen), "training": training,
            "metrics": metrics, "trust": self._trust(quarters[chosen], chosen),
        })  # fmt: skip
        self._verifier.network.eval()
        return self._verifier

    def _start(self) -> dict[str, object] | None:
        """Returns the origin of the verifier that this one continues; None for a fresh one."""
        if self._plan.start is None:
            return None
        made = read_info(self._plan.start).training
        return {name: made.get(name) for name in ("collection", "updates", "tokens", "seconds", "labels", "start")}

    def _trust(self, chosen_by: Floats, aggregation: Aggregation) -> ScorerTrust:
        """Returns how far a search may trust the verifier, by the problems kept for testing.

        Those that it was chosen by flatter it. Their figures, `chosen_by`, serve where no kept problem has right and
        wrong traces.
        """
        data = self._data
        traces, quarters = self._held_out, chosen_by
        if len(kept := data.of_part(self._plan.division, Part.TEST)):
            found = self._read(kept).quarter_aucs(kept, aggregation)
            if np.isfinite(found[0]).any():
                traces, quarters = kept, found
        return ScorerTrust(
            auc=tuple(np.nanmean(quarters, axis=1).tolist()), num_problems=int(np.isfinite(quarters[0]).sum()),
            base_model=data.header.model, source=data.header.source,
            median_tokens=float(np.median(data.traces.num_tokens[traces])),
        )  # fmt: skip


def best_look(looks: list[Floats]) -> int | None:
    """Returns the last look, unless an earlier one ranks the same problems clearly better; None without any."""
    if not looks:
        return None
    best = len(looks) - 1
    for number, aucs in enumerate(looks[:-1]):
        if np.isfinite(aucs - looks[best]).sum() > 1 and clearly_better(aucs, looks[best]):
            best = number
    return best


def watched(data: Dataset, held_out: Ints, rng: np.random.Generator) -> Ints:
    """Returns some traces of some held-out problems that have right and wrong ones."""
    is_correct = data.traces.is_correct
    order = ProblemOrder(data, held_out, rng, update_tokens=1, pass_tokens=1 << 40,
                         traces_per_problem=WATCHED_TRACES, uniform_traces=0)  # fmt: skip
    drawn = [traces for update in order.epoch() for problems in update for traces in problems]
    mixed = [traces for traces in drawn if 0 < is_correct[traces].sum() < len(traces)]
    return np.sort(np.concatenate(mixed[:WATCHED_PROBLEMS]))


def calibrated_on(read: ReadTraces, traces: Ints, aggregation: Aggregation) -> Platt:
    """Fits the line from the logits of traces at every quarter to the share of them that ends right."""
    known = read.data.traces
    seen = traces[known.num_thoughts[traces] > 0]
    logits = np.concatenate([read.logits(seen, share, aggregation) for share in QUARTERS])
    outcomes = np.tile(known.is_correct[seen].astype(np.float64), len(QUARTERS))
    slope, offset = calibrating_line(torch.from_numpy(logits), torch.from_numpy(outcomes))
    return Platt(slope=slope, offset=offset)


@torch.no_grad()
def _unit_scale(verifier: LoraVerifier, data: Dataset, train: Ints) -> float:
    """Returns the scale that brings states to a length of about 1, so that one rate for the head suits every model."""
    some = [passage_of(data, trace) for trace in train[:: max(1, len(train) // SCALE_PASSAGES)][:SCALE_PASSAGES]]
    states = torch.cat([verifier.picked_states([each]) for each in some])
    return 1 / max(1e-9, float(states.norm(dim=-1).mean()))
