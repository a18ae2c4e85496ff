"""Fits a stack to traces that none of its parts was trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gambit.config.trust import ScorerTrust
from gambit.engines.local.model import pick_device
from gambit.errors import UserError
from gambit.scorers.stack import StackInfo, write_stack
from gambit.scorers.stack_states import StateVectors, compares_states, load_vectors
from gambit.training.evaluate import SHARES, PartRatings, Rated
from gambit.training.fit import Say
from gambit.training.loading import CollectionReader
from gambit.training.ranking import QUARTERS, Floats, Ints, mean_estimate
from gambit.training.stack.fit import StackData, cross_fitted, fit_stack, stack_aucs
from gambit.training.stack.parts import Asked, StackParts, vectors_in
from gambit.training.storage import Header

FEWEST_MIXED = 5


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to fit to what."""

    data: Path
    parts: StackParts
    model: str | None = None
    device: str = "auto"
    skip_corrupted: bool = False


@dataclass(frozen=True, slots=True)
class TrainedStack:
    info: StackInfo
    parts: StackParts
    vectors: StateVectors | None

    def save(self, folder: Path) -> None:
        self.parts.copy_to(folder)
        if self.vectors is not None:
            self.vectors.save(folder)
        write_stack(folder, self.info)


def train_stack(
    plan: StackPlan,
    choose: Callable[[CollectionReader], Ints],
    say: Say = lambda _: None,
) -> TrainedStack:
    """`choose` gives the traces that no part was trained on."""
    reader = CollectionReader(plan.data, skip_corrupted=plan.skip_corrupted)
    traces = choose(reader)
    vectors = vectors_in(reader, plan.parts) if compares_states(plan.parts.names) else None
    say(f"what {', '.join(plan.parts.names)} say about {len(traces)} held-out traces")
    data = plan.parts.stack_data(Asked(reader, traces, QUARTERS, vectors, pick_device(plan.device), plan.model))
    _check_enough(data)
    names = plan.parts.names
    smaller = {name: [other for other in names if other != name] for name in names} if len(names) > 1 else {}
    header = reader.header
    info = StackInfo(
        base_model=header.model, base_model_hash=header.model_hash, hidden_size=header.hidden_size,
        boundary_rule=header.boundary_rule, parts=names, lines=fit_stack(data, names),
        without={name: fit_stack(data, others) for name, others in smaller.items()},
        training={"collection": header.id, "source": header.source, "traces": len(traces)},
        metrics=_metrics(data, smaller), trust=_trust(data, header).to_json(),
    )  # fmt: skip
    if vectors is not None:
        info = info.model_copy(update={"closeness_layer": vectors.layer, "closeness_position": str(vectors.position)})
    return TrainedStack(info, plan.parts, vectors)


def _trust(data: StackData, header: Header) -> ScorerTrust:
    """By problems that other problems' lines judged."""
    quarters = stack_aucs(data, cross_fitted(data, list(data.features)))
    reached = tuple(float(np.nanmean(each)) for each in quarters)
    length = float(np.median(data.data.traces.num_tokens[data.traces]))
    num_problems = int(np.isfinite(quarters[0]).sum())
    return ScorerTrust(reached, num_problems, header.model, header.source, median_tokens=length)


def _check_enough(data: StackData) -> None:
    aucs = stack_aucs(data, {share: np.zeros(len(data.traces)) for share in QUARTERS})
    mixed = int(np.isfinite(aucs[0]).sum())
    if mixed < FEWEST_MIXED:
        raise UserError(f"{mixed} held-out problems have right and wrong traces: a stack needs {FEWEST_MIXED}; "
                        "collect more, or train the parts with a larger --test")  # fmt: skip


def _metrics(data: StackData, smaller: dict[str, list[str]]) -> dict[str, object]:
    """Each problem judged by lines that the others gave."""
    names = list(data.features)
    whole = stack_aucs(data, cross_fitted(data, names))
    without = {name: stack_aucs(data, cross_fitted(data, others)) for name, others in smaller.items()}
    alone = {name: stack_aucs(data, data.features[name]) for name in names}
    return {
        "cross_fitted": _plain(whole),
        "alone": {name: _plain(found) for name, found in alone.items()},
        "added": {name: _plain([a - b for a, b in zip(whole, less, strict=True)]) for name, less in without.items()},
    }


def _plain(quarters: list[Floats]) -> dict[str, object]:
    found = {f"{share:g}": mean_estimate(each) for share, each in zip(QUARTERS, quarters, strict=True)}
    return {name: dataclasses.asdict(each) for name, each in {**found, "mean": mean_estimate(_mean(quarters))}.items()}


def _mean(quarters: list[Floats]) -> Floats:
    found: Floats = np.mean(quarters, axis=0)
    return found


def rate_stack(
    folder: Path, info: StackInfo, reader: CollectionReader, traces: Ints, device: str, model: str | None
) -> tuple[Rated, PartRatings]:
    """A stack's verdict on traces, beside those of its parts alone and of the stack without each of them."""
    parts = StackParts.of_folder(folder, info)
    data = parts.stack_data(Asked(reader, traces, SHARES, load_vectors(folder, info), pick_device(device), model))
    whole, *without = (
        Rated({share: data.chances(lines, share) for share in SHARES}) for lines in (info.lines, *info.without.values())
    )
    alone = {name: Rated(found, is_probability=False) for name, found in data.features.items()}
    return whole, PartRatings(alone, dict(zip(info.without, without, strict=True)))
