"""Pauses the traces of a problem, continues the prefix that the scorer ranks highest, and compares it with the traces.

    python benchmarks/paper/prefix_value.py --out runs/prefix_value                  # prefix_value.yaml, on a large GPU
    python benchmarks/paper/prefix_value.py --recipe FILE.yaml --cut 0.5 --out runs/other

The paper's figure on AIME 2025, questions 27 (6.2 to 87.5 %) and 12 (1.6 to 39.1 %). All traces are paused after the
same number of tokens, a share (`--cut`) of their median length; those that have ended by then are no candidates. The
best prefix is continued as often as there were traces. Each line of `arms.jsonl` is a problem under one seed: right
traces, tokens and the peak of the KV cache of both arms. Run it again to go on where it stopped. `gambit prefix-value`
measures every prefix of many problems.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gambit import events as ev
from gambit.bench.datasets import Item, benchmark_for
from gambit.bench.recipe import BenchRecipe, outlook, planned_searches, recipe_from
from gambit.config.options import EngineConfig, SearchConfig, build
from gambit.config.yaml_file import read_mapping
from gambit.scorers import published
from gambit.solver import Solver
from gambit.storage.files import append_synced, drop_torn_line, opened_to_append, whole_lines
from gambit.tree import TraceState
from gambit.types import Aggregation, Problem

RECIPE = Path(__file__).with_suffix(".yaml")
ARMS_FILE = "arms.jsonl"


@dataclass(frozen=True, slots=True)
class Arm:
    """The traces of one arm; tokens are those it generated."""

    right: int
    completed: int
    tokens: int
    kv_peak: int  # tokens, the prefix's own once
    kv_capacity: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Paused:
    """The prefix that is continued."""

    trace: int
    score: float
    candidates: int  # traces that were running and had a score
    tokens: tuple[int, ...]


def searched(solver: Solver, problem: Problem, config: SearchConfig, gold: str) -> tuple[Arm, list[ev.Event]]:
    events: list[ev.Event] = []
    result = solver.solve(problem, config, on_event=events.append)
    samples = [event for event in events if isinstance(event, ev.Sample)]
    ended = [trace for trace in result.traces if trace.state is TraceState.FINISHED]
    arm = Arm(
        sum(solver.grade(trace.answer, gold) for trace in ended), len(ended), result.tokens.generated,
        max(sample.kv_used_tokens for sample in samples), max(sample.kv_capacity_tokens for sample in samples),
        round(result.seconds.total, 2),
    )  # fmt: skip
    return arm, events


def best_prefix(events: Sequence[ev.Event], cut: float) -> Paused | None:
    """Returns the prefix with the best score at the pause; None where no trace has a score by then."""
    whole = {event.trace: event.tokens for event in events if isinstance(event, ev.Finished)}
    pause = max(1, round(cut * statistics.median(map(len, whole.values()))))
    scores: dict[int, list[float]] = {trace: [] for trace, tokens in whole.items() if len(tokens) > pause}
    for event in events:
        if isinstance(event, ev.Scored):
            for trace, score, length in zip(event.traces, event.scores, event.num_tokens, strict=True):
                if length <= pause and trace in scores:
                    scores[trace].append(score)
    by_last = any(isinstance(event, ev.RunStarted) and event.aggregation == Aggregation.LAST for event in events)
    standing = {trace: found[-1] if by_last else statistics.mean(found) for trace, found in scores.items() if found}
    if not standing:
        return None
    best = max(standing, key=lambda trace: (standing[trace], -trace))
    return Paused(best, standing[best], len(standing), tuple(whole[best][:pause]))


def compared(solver: Solver, item: Item, config: SearchConfig, cut: float) -> dict[str, object]:
    """Returns both arms of a problem; the second is None where nothing could be continued."""
    problem = Problem(item.question, item.id)
    traces, events = searched(solver, problem, config, item.answer)
    paused = best_prefix(events, cut)
    found = {"problem": item.id, "seed": config.seed, "cut": cut, "traces": asdict(traces), "continued": None}
    if paused is None:
        return found
    prefix = {"trace": paused.trace, "score": paused.score, "candidates": paused.candidates,
              "tokens": len(paused.tokens)}  # fmt: skip
    again = Problem(item.question, f"{item.id}.{paused.trace}", paused.tokens)
    continued, _ = searched(solver, again, config, item.answer)
    return {**found, "prefix": prefix, "continued": asdict(continued)}


def table(arms: Sequence[dict]) -> str:
    """Returns a line for each arm of each problem; means over seeds."""
    lines = [
        "| problem | arm | seeds | right | tokens | peak KV tokens | of capacity |",
        "| --- | --- " + "| --: " * 5 + "|",
    ]
    for problem in dict.fromkeys(arm["problem"] for arm in arms):
        for name in ("traces", "continued"):
            mine = [arm[name] for arm in arms if arm["problem"] == problem and arm[name] is not None]
            if not mine:
                continue
            right, completed = sum(arm["right"] for arm in mine), sum(arm["completed"] for arm in mine)
            tokens, peak, room = (
                statistics.mean(arm[key] for arm in mine) for key in ("tokens", "kv_peak", "kv_capacity")
            )
            label = {"traces": "independent traces", "continued": "from the best prefix"}[name]
            share = f"{right} of {completed} ({right / completed:.1%})" if completed else "none ended"
            lines.append(
                f"| {problem} | {label} | {len(mine)} | {share} | {tokens:,.0f} | {peak:,.0f} | {peak / room:.0%} |"
            )
    return "\n".join(lines)


def show_plan(recipe: BenchRecipe) -> None:
    planned = list(planned_searches(recipe))
    num_tokens = 2 * sum(each.num_tokens for each in planned)  # the second arm shares its prefix, and takes less
    for each in planned:
        print(f"{each.num_problems} problems of {each.benchmark}, {each.num_traces} traces and as many continuations")
    print(f"at most about {num_tokens:,} tokens")
    print(*outlook(recipe, num_tokens), sep="\n")
    print(published.outlook(build(EngineConfig, recipe.engine).model) or "no scorer is published for this model")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--cut", type=float, default=0.5, help="share of the traces' median length")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    recipe = recipe_from(read_mapping(options.recipe, "recipe"))
    recipe.check()
    if options.dry_run:
        show_plan(recipe)
        return
    if options.out is None or not 0 < options.cut < 1:
        parser.error("give --out FOLDER, and a --cut between 0 and 1")
    (variant,) = recipe.variants()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ARMS_FILE
    drop_torn_line(path)
    arms = [json.loads(line) for _, line in whole_lines(path)] if path.is_file() else []
    done = {(arm["problem"], arm["seed"], arm["cut"]) for arm in arms}
    engine = build(EngineConfig, recipe.engine)
    with Solver(**engine.model_dump(exclude_unset=True)) as solver, opened_to_append(path) as file:
        for benchmark in map(benchmark_for, recipe.bench.benchmarks):
            fixed = {} if benchmark.answer is None else {"answer": benchmark.answer}
            for item in benchmark.first(recipe.bench.limit, recipe.bench.problems):
                for seed in recipe.bench.seeds:
                    if (item.id, seed, options.cut) not in done:
                        config = recipe.search_config(variant, seed, fixed)
                        arms.append(compared(solver, item, config, options.cut))
                        append_synced(file, json.dumps(arms[-1]))
    text = table(arms)
    (options.out / "report.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
