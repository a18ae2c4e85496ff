"""Trains scorers of hidden states on collections of `generate.py`, chooses on development problems, reports on others.

    python -m benchmarks.long_chains.judge --model DIR --data FOLDER --out OUT [--until SECONDS_SINCE_EPOCH]

Every trace is read once; the states of several layers at every candidate boundary stay in memory. Boundary and layer
are chosen by the MLP on outcomes, then architectures and labels compete on that choice. All choices are made on the
development split by the mean of the AUCs at a quarter, half, three quarters and all of the tokens, among traces that
answered. `judge.json` grows as results come.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.long_chains.collection import Collection, read_collection
from benchmarks.long_chains.fitting import ARCHITECTURES, Cut, fit_network, fit_ridge
from benchmarks.long_chains.ranking import auc_table, mean_auc, votes
from benchmarks.long_chains.reading import Reader

LABELS = ("outcome", "balanced", "unbroken")  # balanced: outcomes, right and wrong ones of a problem count the same
BOUNDARY_NAMES = {"line": "line", "blank": "blank-line"}  # as searches call them
CURVE = (25, 100, 400)


@dataclass
class Report:
    """Results so far, written after every addition."""

    path: Path
    found: dict[str, Any]
    began: float

    def add(self, *keys: str, value: Any) -> None:
        place = self.found
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        self.path.write_text(json.dumps(self.found, indent=1))
        shown = json.dumps(value)
        print(f"[{time.monotonic() - self.began:6.1f} s] {' '.join(keys)}: {shown[:300]}", flush=True)


Scores = np.ndarray
SCORE_OF_TRACE = {"gru": "last"}  # the others: the mean over the thoughts so far
Fit = tuple[str, str, int, str]  # architecture, rule, layer, labels


class Bench:
    """The three collections of a family, and what was fitted to them."""

    def __init__(self, family: str, parts: dict[str, Collection], report: Report, device: torch.device) -> None:
        self.family, self.report, self.device = family, report, device
        self.by_line: list[Fit] = []  # what a search can use, whatever else ranks better
        self.train, self.dev, self.judge = (parts[f"{family}-{split}"] for split in ("train", "dev", "judge"))

    def fit(self, wanted: Fit, seed: int = 0, num_problems: int | None = None) -> tuple[Callable[[Cut], Scores], float]:
        """Returns the fitted scorer and its mean AUC on development problems."""
        architecture, rule, layer, labels = wanted
        train, dev = self.train.cut(rule, layer, num_problems), self.dev.cut(rule, layer)
        targets = train.unbroken if labels == "unbroken" else train.outcomes

        def chosen_by(scores: Scores) -> float:
            return mean_auc(self.dev, dev, scores, SCORE_OF_TRACE.get(architecture, "mean"))

        if architecture == "ridge":
            return fit_ridge(train, targets, dev, chosen_by)
        weights = self.train.balanced(train) if labels == "balanced" else np.ones_like(targets)
        return fit_network(architecture, train, targets, weights, dev, chosen_by, seed)

    def choose(self, rules: Sequence[str], architectures: Sequence[str], kinds: Sequence[str]) -> Fit:
        """Returns the best boundary, layer, architecture and labels by the development split."""
        tried: dict[Fit, float] = {}

        def try_out(wanted: Fit) -> None:
            began = time.monotonic()
            tried[wanted] = self.fit(wanted)[1]
            value = {"dev": round(tried[wanted], 4), "seconds": round(time.monotonic() - began, 1)}
            self.report.add(self.family, "tried", "/".join(map(str, wanted)), value=value)

        for rule in rules:
            self.report.add(self.family, "boundaries", rule, value=self.train.boundary_figures(rule))
        for layer in self.train.layers:
            try_out(("mlp", rules[0], layer, "outcome"))
        layer = max(tried, key=tried.__getitem__)[2]
        for rule in rules[1:]:
            try_out(("mlp", rule, layer, "outcome"))
        rule = max(tried, key=tried.__getitem__)[1]
        for architecture in architectures:
            for labels in kinds:
                if (architecture, rule, layer, labels) not in tried:
                    try_out((architecture, rule, layer, labels))
        best = max(tried, key=tried.__getitem__)
        self.report.add(self.family, "chosen", value=best)
        self.by_line = [("mlp", "line", layer, labels) for labels in kinds]
        return best

    def report_on(self, name: str, wanted: Fit, score: Callable[[Cut], Scores]) -> Scores:
        """Reports a scorer on the judging problems; returns its scores of their thoughts."""
        cut = self.judge.cut(wanted[1], wanted[2])
        scores = score(cut)
        how = SCORE_OF_TRACE.get(wanted[0], "mean")
        self.report.add(self.family, "judged", name, value=auc_table(self.judge, cut, scores, how))
        self.report.add(self.family, "votes", name, value=votes(self.judge, cut, scores, how))
        return scores

    def baselines(self, wanted: Fit) -> None:
        cut = self.judge.cut(wanted[1], wanted[2])
        found = {
            "error so far": (cut.unbroken.astype(np.float64), "last"),
            "log-probability": (cut.log_probability, "last"),
            "fewer thoughts": (-np.ones(len(cut.trace)), "sum"),
            "shorter": (-cut.place.astype(np.float64), "last"),
        }
        for name, (values, how) in found.items():
            self.report.add(self.family, "judged", name, value=auc_table(self.judge, cut, values, how))

    def curve(self, wanted: Fit) -> None:
        for count in CURVE:
            if count < len(self.train.problems):
                score, _ = self.fit(wanted, num_problems=count)
                self.report_on(f"{count} problems", wanted, score)


def export(bench: Bench, wanted: Fit, fitted: Any, table: dict[str, Any], model: str, path: Path) -> None:
    """Writes an MLP as a scorer's checkpoint, with the AUCs on the judging problems as its trust."""
    from gambit.config.trust import ScorerTrust
    from gambit.models.files import name_of, weight_hash
    from gambit.scorers.base import ScorerInfo
    from gambit.scorers.checkpoint import save_checkpoint
    from gambit.scorers.mlp import MlpScorer
    from gambit.types import Aggregation, StatePosition

    weights = fitted.weights
    first = weights["1.weight"].double() / weights["deviation"].double()
    bias = weights["1.bias"].double() - first @ weights["mean"].double()
    info = ScorerInfo(
        "mlp",
        state_position=StatePosition.BOUNDARY,
        aggregation=Aggregation.MEAN,
        boundary_rule=BOUNDARY_NAMES[wanted[1]],
        hidden_size=len(weights["mean"]),
        layers=(wanted[2],),
        base_model=name_of(model),
        base_model_hash=weight_hash(model),
    )
    auc = tuple(table[f"answered {share:.0%}"][0] for share in (0.25, 0.5, 0.75, 1.0))
    length = float(np.median(bench.judge.length))
    trust = ScorerTrust(
        auc=auc, num_problems=table["answered problems"], base_model=name_of(model), source=f"{bench.family}-judge",
        median_tokens=length,
    )  # fmt: skip
    scorer = MlpScorer(info, (first.float(), bias.float(), weights["3.weight"], weights["3.bias"]))
    save_checkpoint(scorer, path, {"trust": trust.to_json(), "metrics": {"held_out_auc": float(np.mean(auc))}})


def export_states(bench: Bench, components: int, out: Path) -> None:
    """Writes the states at every line as principal components in eight bits, to try other fits elsewhere."""
    out.mkdir(exist_ok=True)
    layer = bench.by_line[0][2]
    train = bench.train.cut("line", layer)
    sample = train.features(train.rows[torch.randperm(len(train.row), device=bench.device)[:40000]])
    mean, deviation = sample.mean(0), sample.std(0).clamp(min=1e-3)
    basis = torch.linalg.eigh(((sample - mean) / deviation).T.cov())[1][:, -components:]
    scale = (((sample - mean) / deviation) @ basis).abs().quantile(0.999, dim=0) / 127
    for split in ("judge", "dev", "train"):
        part: Collection = getattr(bench, split)
        cut = part.cut("line", layer)
        rows = torch.split(cut.rows, 65536)
        found = [((cut.features(each) - mean) / deviation @ basis / scale).round().clamp(-127, 127) for each in rows]
        np.savez_compressed(
            out / f"{split}.npz", states=torch.cat(found).to(torch.int8).cpu().numpy(), trace=cut.trace,
            place=cut.place.astype(np.int32), unbroken=cut.unbroken.astype(bool), problem=part.problem,
            length=part.length, is_correct=part.is_correct, has_answer=part.has_answer, first_error=part.first_error,
            scale=scale.cpu().numpy(), layer=layer,
        )  # fmt: skip


def names(text: str) -> list[str]:
    return text.split(",")


def named(wanted: Fit) -> str:
    return "/".join(map(str, wanted))


def run_family(bench: Bench, other: Bench | None, options: argparse.Namespace) -> None:
    out: Path = options.out
    best = bench.choose(options.rules, options.architectures, options.labels)
    keep: dict[str, Scores] = {}
    finalists = list(dict.fromkeys([best, *bench.by_line]))
    fitted = {wanted: bench.fit(wanted) for wanted in finalists}
    for wanted, (score, _) in fitted.items():
        keep[named(wanted)] = bench.report_on(named(wanted), wanted, score)
    bench.baselines(best)
    for seed in (1, 2):
        bench.report_on(f"{named(best)} seed {seed}", best, bench.fit(best, seed)[0])
    if other is not None:
        for wanted, (score, _) in fitted.items():
            other.report_on(f"trained on {bench.family}: {named(wanted)}", wanted, score)
    if options.export_components:
        export_states(bench, options.export_components, out.parent / f"{bench.family}-states")
    np.savez_compressed(out / f"{bench.family}-scores.npz", **{k: v.astype(np.float32) for k, v in keep.items()})
    for wanted, (score, _) in fitted.items():
        table = bench.report.found[bench.family]["judged"][named(wanted)]
        if wanted[0] == "mlp" and wanted[1] in BOUNDARY_NAMES and table["answered problems"]:
            export(bench, wanted, score, table, options.model, out / f"{bench.family}-{wanted[3]}.safetensors")
    if time.time() < options.until:
        bench.curve(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", default="14,19,24,-1")
    parser.add_argument("--families", default="chains,moves")
    parser.add_argument("--rules", type=names, default=["line", "sentence", "stride", "blank"], help="cuts, best first")
    parser.add_argument("--architectures", type=names, default=list(ARCHITECTURES))
    parser.add_argument("--labels", type=names, default=list(LABELS))
    parser.add_argument("--batch-tokens", type=int, default=98304)
    parser.add_argument("--until", type=float, default=float("inf"), help="no learning curve is begun after it")
    parser.add_argument("--stop-reading", type=float, default=float("inf"), help="read fewer training traces by then")
    parser.add_argument("--wait", action="store_true", help="load the model, then wait for the collections")
    parser.add_argument("--export-components", type=int, default=0, help="write states as so many components")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report(options.out / "judge.json", {}, time.monotonic())
    layers = tuple(map(int, options.layers.split(",")))
    reader = Reader(options.model, layers, device, options.batch_tokens)
    while options.wait and not (options.data / "generate.done").exists():
        time.sleep(0.5)
    families = [each for each in options.families.split(",") if (options.data / f"{each}-train.done").exists()]
    parts: dict[str, Collection] = {}
    began = time.time()
    for split in ("dev", "judge", "train"):
        for name in [f"{family}-{split}" for family in families]:
            left = float("inf")
            if split == "train" and options.stop_reading < float("inf"):
                tokens = sum(int(part.length.sum()) for part in parts.values())
                left = tokens / (time.time() - began) * max(5.0, options.stop_reading - time.time()) / len(families)
            parts[name] = read_collection(options.data, name, reader, options.rules, left)
            report.add("read", name, value=parts[name].figures())
    reader.close()
    benches = {family: Bench(family, parts, report, device) for family in families}
    for family, bench in benches.items():
        other = next((each for name, each in benches.items() if name != family), None)
        run_family(bench, other, options)
    (options.out / "judge.done").touch()


if __name__ == "__main__":
    main()
