"""Collects on engines under Ray: each samples traces and reads their states, the driver grades and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from gambit import events as ev
from gambit.cluster.actor import JobDesk
from gambit.cluster.engines import EnginePool
from gambit.cluster.work import Work, run_work
from gambit.errors import EngineError
from gambit.training.collect import CollectPlan, EngineFacts, LocalEngines
from gambit.training.sampling import Sampled, Task

if TYPE_CHECKING:
    import torch


def sample_one(task: Task, plan: CollectPlan, engines: LocalEngines, desk: JobDesk) -> Sampled:
    """Samples the traces of one problem and reads their states, in the process of an engine."""

    def on_event(event: ev.Event) -> None:
        if isinstance(event, ev.Sample):
            desk.send(event)

    found = list(engines.sample([task], plan, desk.should_stop, on_event))
    sampled = found[0] if found else Sampled(task, [])  # none: stopped before it began
    if sampled.traces:
        sampled.states = engines.states_of([sampled])
    return sampled


class RayEngines:
    """The engines of a collection under Ray. The caller closes the pool."""

    def __init__(self, pool: EnginePool[LocalEngines], should_stop: Callable[[], bool] = lambda: False) -> None:
        """Waits until an engine is ready."""
        self._pool = pool
        facts: EngineFacts | None = pool.ask_one(attrgetter("facts"), should_stop)
        if facts is None:
            raise EngineError("stopped before an engine was ready: nothing was collected")
        self.facts = facts

    def sample(self, tasks: Iterable[Task], plan: CollectPlan, should_stop: Callable[[], bool]) -> Iterator[Sampled]:
        work = (Work(partial(sample_one, task, plan), task) for task in tasks)
        for end in run_work(self._pool, work, jobs_per_engine=plan.most_problems_at_once, should_stop=should_stop):
            yield end.value if isinstance(end.value, Sampled) else Sampled(end.tag, [], end.error)

    def states_of(self, problems: Sequence[Sampled]) -> list[dict[str, torch.Tensor]]:
        """Returns the states that came with the traces."""
        return [states for problem in problems for states in problem.states or ()]
