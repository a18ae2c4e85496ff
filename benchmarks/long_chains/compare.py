"""Counts the planned comparison on long chains: `rows.jsonl` of all shards, `comparison.json` beside it.

    python -m benchmarks.long_chains.compare SEARCH_FOLDER… --out benchmarks/results/long_chains

Only problems that both methods have finished count; any other method is compared with plain sampling on those that
both of these have finished. Every measure has its 95 % interval from resampled problems, and
p-values by sign flips; the secondary ones are corrected by Holm.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.long_chains.answers import expected_votes, vote_share

from gambit.stats import Interval, holm, mean_interval, ratio_interval, resamples, sign_flip_p

Row = dict[str, Any]
METHODS = ("sc", "gambit")
VOTES = ("majority", "score", "position", "best")
SIZES = (1, 2, 4, 8, 16, 32, 64)
NUM_HALVES = 100  # ways to divide plain traces
EDGES = (0.0, 0.05, 0.1, 0.2, 0.4, 1.0)  # of the share of right traces, by difficulty
KEPT = (
    "variant", "problem", "seed", "answer", "gold", "correct", "stop_reason", "generated", "branched", "pruned",
    "completed", "right_traces", "wrong_traces", "revotes", "steps", "began", "seconds", "shard",
)  # fmt: skip
KEPT_SINCE = ("at_limit", "evicted", "recomputed", "waited_steps", "kv_peak")  # not in the rows of the first comparison


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """Returns what is kept of the rows of all shards, in the order in which they began."""
    rows = []
    for folder in folders:
        lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        rows += [{key: row[key] for key in (*KEPT, *KEPT_SINCE) if key in row} for row in map(json.loads, lines)]
    return sorted(rows, key=lambda row: (row["shard"], row["began"]))


def in_pairs(rows: Sequence[Row], methods: Collection[str] = METHODS) -> list[dict[str, Row]]:
    """Returns the rows of each problem by method, where all of these methods have finished it."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["problem"], {})[row["variant"]] = row
    return [own for _, own in sorted(found.items()) if own.keys() >= set(methods)]


def other_methods(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Returns how every further method does against plain sampling's majority, on the problems of both."""
    found = {}
    for name in sorted({row["variant"] for row in rows} - set(METHODS)):
        both = Comparison(in_pairs(rows, ("sc", name)))
        if both.pairs:
            right = both.values(name, lambda row: row["correct"])
            gap = both.gap(right, both.values("sc", lambda row: row["correct"]))
            tokens = round(float(both.values(name, lambda row: row["generated"]).mean()))
            found[name] = {"problems": len(both.pairs), "tokens": tokens, name: gap.pop("gambit"), **gap}
    return found


def pass_at_1(row: Row) -> float:
    return float(row["right_traces"]) / max(float(row["completed"]), 1.0)


def rounded(found: Interval, digits: int = 4) -> list[float]:
    return [round(each, digits) for each in (found.value, found.low, found.high)]


class Comparison:
    """The measures of both methods over the same problems."""

    def __init__(self, pairs: Sequence[dict[str, Row]]) -> None:
        self.pairs, self.draws = pairs, resamples(len(pairs))

    def values(self, method: str, measure: Callable[[Row], float]) -> np.ndarray:
        return np.array([float(measure(own[method])) for own in self.pairs])

    def gap(self, ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
        """Returns both means, their difference with its interval, problems won and lost, and a p-value."""
        difference = ours - theirs
        exact = [Fraction(float(each)).limit_denominator(10_000) for each in difference]
        return {
            "sc": round(float(theirs.mean()), 4), "gambit": round(float(ours.mean()), 4),
            "difference": rounded(mean_interval(difference, self.draws)),
            "won": int((difference > 0).sum()), "lost": int((difference < 0).sum()), "p": sign_flip_p(exact),
        }  # fmt: skip

    def by_difficulty(self) -> list[dict[str, Any]]:
        """Returns accuracies by the share of right traces in one half of the plain ones; the other half votes.

        Sorted by all plain traces, low shares would be unlucky draws of plain sampling, and sorted by both methods'
        traces, Gambit's own gain would move a problem up. A problem counts in each group as often as halves put it
        there.
        """
        halves = [_halves(answers(own["sc"])) for own in self.pairs]
        right = self.values("gambit", lambda row: row["correct"])
        found = []
        for low, high in pairwise(EDGES):
            own = [[vote for share, vote in each if low < share <= high or share == low == 0.0] for each in halves]
            weight = np.array([len(each) / NUM_HALVES for each in own])
            votes = np.array([sum(each) / NUM_HALVES for each in own])
            gap = ratio_interval(weight * right - votes, weight, self.draws)
            if gap is None:
                continue
            found.append({
                "right traces": [low, high], "problems": round(float(weight.sum()), 1), "difference": rounded(gap),
                "half of sc": round(float(votes.sum() / weight.sum()), 4),
                "gambit": round(float((weight * right).sum() / weight.sum()), 4),
            })  # fmt: skip
        return found

    def votes_by_size(self) -> list[dict[str, float]]:
        """Returns how a majority of fewer plain traces does, and the tokens that those have."""
        tokens = self.values("sc", lambda row: row["generated"]).mean()
        votes = np.array([expected_votes(answers(own["sc"]), "right", SIZES) for own in self.pairs]).mean(0)
        found = zip(SIZES, votes, strict=True)
        return [
            {"traces": n, "tokens": round(tokens * n / SIZES[-1]), "accuracy": round(float(v), 4)} for n, v in found
        ]


def answers(row: Row) -> list[str | None]:
    """Returns the answers of the traces under other names: `right`, then a number for each wrong one."""
    given = ["right"] * row["right_traces"]
    given += [str(i) for i, count in enumerate(row["wrong_traces"]) for _ in range(count)]
    return [*given, *[None] * (row["completed"] - len(given))]


def _halves(given: Sequence[str | None]) -> list[tuple[float, float]]:
    """Returns, for random halves of traces, the share of right ones in one and the chance of the other's vote."""
    rng, half = np.random.default_rng(0), len(given) // 2
    found = []
    for _ in range(NUM_HALVES):
        order = [given[i] for i in rng.permutation(len(given))]
        found.append((order[:half].count("right") / half, vote_share(Counter(order[half:]), "right")))
    return found


def seconds(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns seconds of a problem on one engine and tokens a second, by turns of a method in one shard.

    A shard's last turn is left out, since the time limit may have cut it.
    """
    turns: list[list[Row]] = []
    for row in rows:
        last = turns[-1][-1] if turns else None
        if last is None or (last["variant"], last["shard"]) != (row["variant"], row["shard"]):
            turns.append([])
        turns[-1].append(row)
    final = {turn[0]["shard"]: turn for turn in turns}
    whole = [turn for turn in turns if turn is not final[turn[0]["shard"]]]
    found: dict[str, Any] = {"turns": dict(Counter(turn[0]["variant"] for turn in whole))}
    spans = {name: np.array([lasted(turn) for turn in whole if turn[0]["variant"] == name]) for name in found["turns"]}
    for name, span in spans.items():
        took, problems, tokens = span.sum(0)
        found[name] = {"seconds a problem": round(took / problems, 4), "tokens a second": round(tokens / took, 1)}
    if not spans.keys() >= set(METHODS):
        return found  # the time was over too soon
    num = min(len(spans[name]) for name in METHODS)
    each = {name: spans[name][:num, 0] / spans[name][:num, 1] for name in METHODS}
    ratio = ratio_interval(each["gambit"], each["sc"], resamples(num))
    assert ratio is not None
    return found | {"gambit / sc": rounded(ratio)}


def lasted(turn: Sequence[Row]) -> tuple[float, int, int]:
    ends = max(row["began"] + row["seconds"]["total"] for row in turn)
    return ends - min(row["began"] for row in turn), len(turn), sum(row["generated"] for row in turn)


def compare(rows: Sequence[Row]) -> dict[str, Any]:
    both = Comparison(in_pairs(rows))
    right = both.values("gambit", lambda row: row["correct"])
    votes = {name: both.values("sc", lambda row, name=name: row["revotes"][name]) for name in VOTES}  # type: ignore[misc]
    secondary = {
        **{f"{name} vote": both.gap(right, votes[name]) for name in ("score", "position")},
        "pass@1": both.gap(both.values("gambit", pass_at_1), both.values("sc", pass_at_1)),
        **other_methods(rows),
    }
    for found, p in zip(secondary.values(), holm([each["p"] for each in secondary.values()]), strict=True):
        found["p by Holm"] = p
    return {
        "problems": len(both.pairs),
        "accuracy": {
            name: rounded(mean_interval(both.values(name, lambda row: row["correct"]), both.draws)) for name in METHODS
        },
        "primary": both.gap(right, both.values("sc", lambda row: row["correct"])),
        "secondary": secondary,
        "the same vote": {
            name: both.gap(both.values("gambit", lambda row, name=name: row["revotes"][name]), votes[name])  # type: ignore[misc]
            for name in VOTES
        },
        "tokens": {name: round(float(both.values(name, lambda row: row["generated"]).mean())) for name in METHODS},
        "decode steps": {name: round(float(both.values(name, lambda row: row["steps"]).mean())) for name in METHODS},
        "seconds": seconds(rows),
        "by difficulty": both.by_difficulty(),
        "plain votes": both.votes_by_size(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of gambit bench, or a result to count again")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = read_rows(options.folders)
    if options.out not in options.folders:
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        (options.out / "rows.jsonl").write_text(text, encoding="utf-8")
    found = compare(rows)
    (options.out / "comparison.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
