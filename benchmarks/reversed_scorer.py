"""What a scorer that ranks the wrong way round does to searches and votes, and what a careful vote can save.

    python benchmarks/reversed_scorer.py --out runs/reversed --seconds 900   # a second call goes on
    python benchmarks/reversed_scorer.py --out runs/reversed --table         # of what is there
    … --table --bench runs/pawn_methods                      # and over the logs of a bench by pawn_methods.yaml

Every scorer carries the shipped one's figures, so that nothing but its scores can give it away: the shipped one, its
negative, its last layer in random directions (as wide as the shipped logit), and noise on its logit
(`noisy_scorer.py`). Each row keeps the ballots, so that all votes are counted over the same traces.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gambit import SearchConfig, Solver
from gambit import events as ev
from gambit.models import files as models
from gambit.pawn.puzzles import Puzzle, Split, generate
from gambit.results.record import SearchRecord, fold
from gambit.results.result import LEAST_ISLAND, SearchResult
from gambit.results.vote import Ballot, VoteKind, VoteResult, ballots_of, count_votes
from gambit.scorers.checkpoint import load_checkpoint
from gambit.scorers.mlp import MlpScorer
from gambit.stats import mean_interval, resamples
from gambit.types import Problem

ROOM = 16_384  # tokens of KV cache to a search: nothing has to go
TOGETHER = 5  # searches side by side
RANDOM_DIRECTIONS = 1
NOISES = (1.0,)  # standard deviations of the logit
PAIRS = (("gambit 32", "shipped"), ("gambit 32", "negative"))  # the same with 32 islands, each of two places
Vote = Callable[[Sequence[Ballot]], VoteResult]


# -- the scorers -----------------------------------------------------------------------------------------------


def scorers(states: torch.Tensor) -> dict[str, MlpScorer]:
    """Returns the scorers to try, the most telling first; `states`: a sample of those that they read."""
    from noisy_scorer import with_noise

    path = models.side_file(models.locate("pawn"), models.SCORER_FILE)
    assert path is not None
    shipped = load_checkpoint(path)
    assert isinstance(shipped, MlpScorer)
    w1, b1, w2, b2 = shipped.weights
    made = {"shipped": shipped, "negative": MlpScorer(shipped.info, (w1, b1, -w2, -b2))}
    for seed in range(RANDOM_DIRECTIONS):
        made[f"random {seed}"] = with_random_direction(shipped, states, seed)
    return made | {f"noise {noise:g}": with_noise(shipped, states, noise) for noise in NOISES}


def with_random_direction(scorer: MlpScorer, states: torch.Tensor, seed: int) -> MlpScorer:
    """Returns a scorer with another last layer, whose logit has the mean and the width of the first one's."""
    w1, b1, w2, _ = scorer.weights
    hidden = torch.relu(states.double() @ w1.double().T + b1.double())
    drawn = torch.randn(w2.shape, generator=torch.Generator().manual_seed(seed)).double()
    logits, wanted = hidden @ drawn.T, scorer.logits(states).double()
    other = drawn * (wanted.std() / logits.std())
    offset = (wanted.mean() - (hidden @ other.T).mean()).reshape(1)
    return MlpScorer(scorer.info, (w1, b1, other.float().contiguous(), offset.float()))


def sampled_states(num_puzzles: int) -> torch.Tensor:
    """Returns the states at the boundaries of plain traces over development puzzles."""
    import tempfile

    from gambit.config.options import EngineConfig
    from gambit.training.collect import CollectPlan, collect
    from gambit.training.dataset import load_dataset
    from gambit.training.sampling import pawn_tasks
    from gambit.types import StatePosition

    with tempfile.TemporaryDirectory() as folder:
        engine = EngineConfig(model="pawn", engine="local", kv_budget_tokens=ROOM)
        plan = CollectPlan(
            Path(folder) / "dev", "pawn:dev", engine, SearchConfig(), 16, 16,
            positions=(StatePosition.BOUNDARY,), with_confidence=False,
        )  # fmt: skip
        collect(pawn_tasks("dev", num_puzzles, 0), plan)
        return load_dataset(Path(folder) / "dev", StatePosition.BOUNDARY).states.float()


# -- the searches ----------------------------------------------------------------------------------------------


def run(out: Path, options: argparse.Namespace) -> None:
    """Searches puzzle by puzzle with every scorer, until the time is up."""
    ends = time.time() + options.seconds
    puzzles = list(itertools.islice(generate(Split.TEST, seed=0), options.puzzles))
    known = {(row["scorer"], row["policy"], row["puzzle"]) for row in rows_of(out)}
    states_file = out / "states.pt"
    if not states_file.exists():
        torch.save(sampled_states(options.judging_puzzles), states_file)
    solvers = {name: Solver("pawn", scorer=scorer, engine="local", kv_budget_tokens=ROOM * TOGETHER)
               for name, scorer in scorers(torch.load(states_file)).items()}  # fmt: skip
    with (out / "rows.jsonl").open("a", buffering=1) as file:
        for start in range(0, len(puzzles), TOGETHER):
            for policy, name in [("sc", "shipped"), *(("gambit", name) for name in solvers), *PAIRS]:
                if options.methods and f"{policy}, {name}" not in options.methods:
                    continue
                if time.time() > ends:
                    return
                numbers = range(start, min(start + TOGETHER, len(puzzles)))
                wanted = {number: puzzles[number] for number in numbers if (name, policy, number) not in known}
                for number, row in searched(solvers[name], policy, wanted, options.seed):
                    file.write(json.dumps({"scorer": name, "policy": policy, "puzzle": number, **row}) + "\n")


def searched(
    solver: Solver, policy: str, puzzles: Mapping[int, Puzzle], seed: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the row of each puzzle's search."""
    logs: dict[str, list[ev.Event]] = defaultdict(list)
    name, _, islands = policy.partition(" ")
    config = SearchConfig(
        capacity=64, seed=seed, own_noise=True, policy=name, islands=int(islands) if islands else None
    )
    problems = [Problem(puzzle.text, id=str(number)) for number, puzzle in puzzles.items()]
    for result in solver.solve_many(
        problems, config, concurrency=TOGETHER, on_event=lambda name, event: logs[name].append(event)
    ):
        number = int(result.problem_id)
        yield number, row_of(result, puzzles[number], logs.pop(result.problem_id))


def row_of(result: SearchResult, puzzle: Puzzle, events: Sequence[ev.Event]) -> dict[str, Any]:
    """Returns a search's ballots, with the weights of both votes by score, and the right answer."""
    record = fold(events)
    by_position = ballots_of(record.tree, VoteKind.POSITION)
    by_score = ballots_of(record.tree, VoteKind.SCORE)
    return {
        "gold": str(puzzle.answer),
        "islands": record.num_islands,
        "seconds": round(result.seconds.total, 2),
        "tokens": result.tokens.generated,
        "warnings": list(result.warnings),
        "first_scores": first_scores(record, events),
        "ballots": [(ballot.answer, round(ballot.weight, 5), round(other.weight, 5), ballot.root, ballot.island)
                    for ballot, other in zip(by_position, by_score, strict=True)],
    }  # fmt: skip


def first_scores(record: SearchRecord, events: Sequence[ev.Event]) -> list[float]:
    """Returns the score of the first thought of each root."""
    found: dict[int, float] = {}
    for event in events:
        if isinstance(event, ev.Scored):
            for trace, score in zip(event.traces, event.scores, strict=True):
                if record.tree.traces[trace].parent is None:
                    found.setdefault(trace, round(score, 4))
    return list(found.values())


# -- the votes -------------------------------------------------------------------------------------------------


def rows_of(out: Path) -> list[dict[str, Any]]:
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ballots_in(row: Mapping[str, Any]) -> list[Ballot]:
    return [Ballot(number, answer, position, root, island=island)
            for number, (answer, position, _, root, island) in enumerate(row["ballots"])]  # fmt: skip


def shrunk(share: float) -> Vote:
    """Returns a vote whose weights are `share` of the score and the rest the same for all."""
    return lambda ballots: counted(
        [dataclasses.replace(ballot, weight=1 - share + share * ballot.weight) for ballot in ballots]
    )


def counted(ballots: Sequence[Ballot], kind: VoteKind = VoteKind.POSITION) -> VoteResult:
    return count_votes(ballots, kind, lambda a, b: a == b)


def by_majority(ballots: Sequence[Ballot]) -> VoteResult:
    return counted([dataclasses.replace(ballot, weight=1.0) for ballot in ballots], VoteKind.MAJORITY)


def falling_back(most_share: float) -> Vote:
    """Returns a vote that counts where counting has another winner and the weighted one has no such share."""

    def vote(ballots: Sequence[Ballot]) -> VoteResult:
        weighted, plain = counted(ballots), by_majority(ballots)
        total = sum(entry.weight for entry in weighted.entries)
        is_split = bool(total) and weighted.entries[0].weight < most_share * total
        return plain if is_split and weighted.answer != plain.answer else weighted

    return vote


VOTES: Mapping[str, Vote] = {
    "position": counted,
    "majority": by_majority,
    **{f"shrunk to {share:g}": shrunk(share) for share in (0.25, 0.5, 0.64, 0.75)},
    **{f"counts below {share:g}": falling_back(share) for share in (0.25, 0.4, 0.5, 0.67)},
}


def per_cent(values: Sequence[float]) -> list[float]:
    """Returns the mean and its interval over puzzles; nothing of nothing."""
    import numpy as np

    if not values:
        return []
    found = mean_interval(np.array(values), resamples(len(values)))
    return [round(100 * value, 1) for value in (found.value, found.low, found.high)]


@dataclass(frozen=True, slots=True)
class Line:
    """The searches of one method and scorer, by puzzle."""

    rows: Mapping[int, dict[str, Any]]

    def hits(self, vote: Vote) -> dict[int, float]:
        return {number: float(vote(ballots_in(row)).answer == row["gold"]) for number, row in self.rows.items()}

    def share(self, vote: Vote) -> list[float]:
        return per_cent(list(self.hits(vote).values()))

    def change(self, vote: Vote) -> list[float]:
        """Returns the points that a vote wins or loses against the default one, puzzle by puzzle."""
        before = self.hits(counted)
        return per_cent([hit - before[number] for number, hit in self.hits(vote).items()])

    def overruled(self) -> float:
        """Returns the share of searches, in per cent, in which the weighted vote overrules the counted one."""
        parted = [counted(ballots).answer != by_majority(ballots).answer
                  for ballots in map(ballots_in, self.rows.values())]  # fmt: skip
        return round(100 * sum(parted) / len(parted), 1)

    def apart(self) -> list[int]:
        """Returns the puzzles in whose searches most islands never found the winner, as results warn."""
        return [
            number
            for number, row in self.rows.items()
            if row["islands"] > 1
            and len(row["ballots"]) >= LEAST_ISLAND * row["islands"]
            and 2 * counted(ballots_in(row)).entries[0].islands <= row["islands"]
        ]

    def second_opinion(self, plain: Line) -> list[float]:
        """Returns the share right if such a search is followed by plain voting, which then answers."""
        other, doubtful = plain.hits(by_majority), set(self.apart())
        hits = {number: hit for number, hit in self.hits(counted).items() if number in other}
        return per_cent([other[number] if number in doubtful else hit for number, hit in hits.items()])


def lines_of(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Line]]:
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        found[f"{row['policy']}, {row['scorer']}"][row["puzzle"]] = row
        if (row["policy"], row["scorer"]) == ("sc", "shipped"):
            found["sc, negative"][row["puzzle"]] = turned(row)
    for name, by_puzzle in sorted(found.items(), reverse=True):
        yield name, Line(dict(sorted(by_puzzle.items())))


def bench_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a bench with logs: the default vote over what plain voting and Gambit found there."""
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["variant"] not in ("sc", "gambit") or row["error"]:
            continue
        record = fold(ev.read_log(folder / row["log"]))
        ballots = ballots_of(record.tree, VoteKind.POSITION)
        yield {
            "scorer": "shipped, in a bench",
            "policy": row["variant"],
            "puzzle": int(row["problem"].rpartition("-")[2]),
            "gold": row["gold"],
            "islands": record.num_islands,
            "seconds": row["seconds"]["total"],
            "ballots": [(ballot.answer, ballot.weight, 0.0, ballot.root, ballot.island) for ballot in ballots],
        }


def turned(row: dict[str, Any]) -> dict[str, Any]:
    """Returns plain traces as the negative scorer weighs them: each thought's chance becomes what is left of one."""
    ballots = [(answer, round(1 - position, 5), round(1 - score, 5), root, island)
               for answer, position, score, root, island in row["ballots"]]  # fmt: skip
    return {**row, "ballots": ballots}


def table(out: Path, options: argparse.Namespace) -> None:
    lines = dict(lines_of([*rows_of(out), *(bench_rows(options.bench) if options.bench else ())]))
    plain = lines.get("sc, shipped, in a bench") or lines.get("sc, shipped") or Line({})
    figures: dict[str, Any] = {}
    for name, line in lines.items():
        figures[name] = {
            "searches": len(line.rows),
            "overruled": line.overruled(),
            "islands_apart": round(100 * len(line.apart()) / len(line.rows), 1),
            "right": {vote: line.share(VOTES[vote]) for vote in VOTES},
            "change": {vote: line.change(VOTES[vote]) for vote in VOTES if vote not in ("position", "majority")},
            "right_with_a_second_opinion": line.second_opinion(plain),
            "seconds": round(sum(row["seconds"] for row in line.rows.values()) / len(line.rows), 1),
        }
        right = figures[name]["right"]
        print(f"{name}: {figures[name]}, best vote {max(right, key=lambda vote: right[vote][0])}")
    summary = {
        "what": (__doc__ or "").splitlines()[0],
        "options": {name: getattr(options, name) for name in ("puzzles", "seed")},
        "methods": figures,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl and summary.json")
    parser.add_argument("--seconds", type=float, default=900.0, help="no search begins later")
    parser.add_argument("--puzzles", type=int, default=300)
    parser.add_argument("--judging-puzzles", type=int, default=12, help="development puzzles for the logit's width")
    parser.add_argument("--methods", nargs="*", help="only these, such as 'gambit, shipped'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bench", type=Path, help="folder of a bench on pawn: its logs are voted on too")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        run(options.out, options)
    table(options.out, options)


if __name__ == "__main__":
    main()
