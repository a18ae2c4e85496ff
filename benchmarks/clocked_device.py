"""vLLM workers whose device is a clock: a step takes as long as it is told to, whatever the machine. For gpu_speed.py.

All the rest is real: front, core and scheduler in their processes, asynchronous scheduling, prefix cache. So what they
cost beside a busy device can be seen without one; what a device itself takes for scoring cannot.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from gambit.engines.vllm.compat.core import join_front
from gambit.engines.vllm.compat.model_runner import attach_rows
from gambit.engines.vllm.messages import RowValues
from speed_parts import CLOCK

RUNNER_SHARE = 0.45  # of a step: the host's work to launch it, about what model runner V2 needs for 256 rows of 4B
MIXED_SHARE = 1.6  # of a plain step: one that reads prompts
MIXED_TOKEN_SHARE = 0.0005


@dataclass(slots=True)
class Clock:
    """A device that does one thing after the other."""

    step_seconds: float = field(default_factory=lambda: float(os.environ[CLOCK]) / 1000)
    free_at: float = 0.0

    def launch(self, began: float, num_tokens: int, *, is_mixed: bool) -> float:
        """Returns the time at which it will be done."""
        while time.perf_counter() - began < RUNNER_SHARE * self.step_seconds:
            pass
        shares = MIXED_SHARE + MIXED_TOKEN_SHARE * num_tokens if is_mixed else 1.0
        self.free_at = max(time.perf_counter(), self.free_at) + shares * self.step_seconds
        return self.free_at


@dataclass(slots=True)
class Pending(AsyncModelRunnerOutput):
    output: ModelRunnerOutput
    done_at: float
    scores: np.ndarray | None

    def get_output(self) -> ModelRunnerOutput:
        wait = max(self.done_at - time.perf_counter(), 0.0)
        time.sleep(wait)
        if self.scores is None:
            return self.output
        return attach_rows(self.output, RowValues(self.scores, None, None, 0.0, waited=wait))


class ClockedWorker(CPUWorker):
    """A worker of stock vLLM that returns random tokens."""

    gives_scores = False

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        self._clock = Clock()
        self._rng = np.random.default_rng(0)
        self._prompts: dict[str, int] = {}
        return super().load_model(*args, **kwargs)

    def execute_model(self, scheduled: Any) -> ModelRunnerOutput | None:
        began = time.perf_counter()
        counts = scheduled.num_scheduled_tokens
        if not counts:
            return output_of([], [])
        done = {new.req_id: new.num_computed_tokens + counts[new.req_id] for new in scheduled.scheduled_new_reqs}
        self._prompts |= {new.req_id: len(new.prompt_token_ids) for new in scheduled.scheduled_new_reqs}
        tokens = self._rng.integers(5, self.model_config.get_vocab_size(), len(counts)).tolist()
        said = [
            [] if name in done and done[name] < self._prompts[name] else [token]
            for name, token in zip(counts, tokens, strict=True)
        ]
        total = scheduled.total_num_scheduled_tokens
        done_at = self._clock.launch(began, total, is_mixed=total > len(counts))
        scores = self._rng.random(len(counts), np.float32) if self.gives_scores else None
        self._pending = Pending(output_of(list(counts), said), done_at, scores)
        return None

    def sample_tokens(self, grammar_output: object) -> Pending:
        return self._pending


class ClockedScorer(ClockedWorker):
    """A worker of Gambit's engine that returns random tokens, with a score for every row."""

    gives_scores = True

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        join_front()
        return super().load_model(*args, **kwargs)


def output_of(names: list[str], said: list[list[int]]) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)}, sampled_token_ids=said,
        logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
    )  # fmt: skip
