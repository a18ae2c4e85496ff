"""How full is an engine of searches in rounds? Tokens a step, as a share of the traces that vLLM runs at a time.

    python benchmarks/rounds_rows.py --out benchmarks/results/rounds_rows.json     # about ten minutes on two cores

The bundled model on vLLM, which runs 64 traces at a time: pools of 16 traces (`sc`) and searches that begin with 4
(`gambit` in rounds), with as many problems at a time as pools fit, and with all that the engine has a place for. Steps
and tokens are counted, not timed: on a GPU that is far from full a step takes about as long whatever is in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gambit import events as ev
from gambit.api import SearchConfig, Solver
from gambit.bench.datasets import benchmark_for
from gambit.types import Problem, StepBatch

ROWS, POOL, FIRST = 64, 16, 4
ROUNDS = SearchConfig(capacity=POOL, islands=POOL // FIRST, first_traces=FIRST, consensus_stop=0.6)
WAYS = {"sc": SearchConfig(capacity=POOL, policy="sc"), "gambit in rounds": ROUNDS}


@dataclass
class Steps:
    """What the engine did between two looks."""

    num_steps: int = 0
    num_tokens: int = 0
    num_begun: int = 0  # searches
    share: float = 0.0  # of the engine's rows that was in use, over all steps
    share_before_last: float = (
        0.0  # and before the last search began: after that nothing can take the place of what ends
    )

    def note(self, batch: StepBatch, num_problems: int) -> None:
        self.num_steps += 1
        self.num_tokens += sum(step.num_generated for step in batch.searches.values())
        self.share = round(self.num_tokens / self.num_steps / ROWS, 3)
        if self.num_begun < num_problems:
            self.share_before_last = self.share

    def note_event(self, _: str, event: ev.Event) -> None:
        self.num_begun += isinstance(event, ev.RunStarted)


class Counted:
    """A solver whose engine's steps are counted."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        self._steps, self._num_problems = Steps(), 0
        step = solver.engine.step

        def counted() -> StepBatch:
            batch = step()
            self._steps.note(batch, self._num_problems)
            return batch

        solver.engine.step = counted  # type: ignore[method-assign]

    def run(self, problems: Sequence[Problem], config: SearchConfig, concurrency: int) -> Steps:
        steps, self._num_problems = Steps(), len(problems)
        self._steps = steps
        for result in self._solver.solve_many(problems, config, concurrency=concurrency, on_event=steps.note_event):
            assert result.error is None, result.error
        return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--puzzles", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    problems = [Problem(item.question, item.id) for item in benchmark_for("pawn").first(options.puzzles)]
    rows = []
    with Solver("pawn", engine="vllm", kv_budget_tokens=65_536, engine_options={"max_num_seqs": ROWS}) as solver:
        counted = Counted(solver)
        for way, config in WAYS.items():
            for concurrency in (ROWS // POOL, len(problems)):
                steps = counted.run(problems, config, concurrency)
                rows.append({"way": way, "concurrency": concurrency, **asdict(steps)})
                print(rows[-1], flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"rows": ROWS, "puzzles": len(problems), "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
