"""Carries out a policy's decisions on the engine, and records them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gambit import events as ev
from gambit.config.presets import SearchSettings
from gambit.engines.base import Engine
from gambit.policies.base import Branch, Discard, Evict, Prune, SplitIslands, Start
from gambit.policies.islands import Islands
from gambit.search.recorder import Recorder
from gambit.search.scores import Scores
from gambit.tree import TraceState
from gambit.types import OnPressure, StopRule, TraceKey, TraceSpec


class Execution:
    """Starts, branches and ends the traces of one search."""

    def __init__(
        self,
        engine: Engine,
        search: int,
        settings: SearchSettings,
        islands: Islands,
        recorder: Recorder,
        scores: Scores,
    ) -> None:
        self._engine = engine
        self._search = search
        self._settings = settings
        self._islands = islands
        self._recorder = recorder
        self._scores = scores
        self._tree = recorder.record.tree
        self._num_on_island = [0] * settings.islands  # traces created so far
        self._lots: list[int] = []  # by trace: the random numbers of its root
        self._unsent: list[TraceSpec] = []  # decided in this round

    def execute(self, decision: Start | Branch | Prune | Evict | Discard, at: int) -> None:
        """`at`: the step. New traces are on the engine after `send`."""
        if isinstance(decision, Start):
            self._start(decision, at)
        elif isinstance(decision, Branch):
            self._branch(decision, at)
        elif isinstance(decision, Discard):
            self._recorder.emit(ev.Discarded(at, decision.trace, decision.reason))
        elif isinstance(decision, Prune | Evict):
            self._end(decision, at)

    def split(self, decision: SplitIslands, at: int) -> Islands:
        """Divide the islands; gives the new ones.

        A root's random numbers say where it belongs, however many islands there are: the roots of each are those it
        would have had from the start. Traces to come get random numbers that none has had.
        """
        island_of = tuple(lot % decision.islands for lot in self._lots)
        used = max(map(self._islands.noise_id, self._islands, self._num_on_island))
        self._islands = dataclasses.replace(self._islands, count=decision.islands)
        self._num_on_island = [-(-used // decision.islands)] * decision.islands
        self._recorder.emit(ev.IslandsSplit(at, **dataclasses.asdict(decision), island_of=island_of))
        live = [trace for trace in self._tree.traces if trace.is_live]
        self._engine.regroup({TraceKey(self._search, trace.id): trace.island for trace in live})
        return self._islands

    def send(self) -> None:
        """A round's new traces together: an engine may begin them in one step."""
        specs, self._unsent = self._unsent, []
        if specs:
            self._engine.submit(specs)

    def stop(self, trace_ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Own tokens of traces that were still going."""
        tokens = self._engine.stop([TraceKey(self._search, trace_id) for trace_id in trace_ids])
        return {key.trace: self._recorder.own(key.trace, all_tokens) for key, all_tokens in tokens.items()}

    def _start(self, decision: Start, at: int) -> None:
        for _ in range(decision.count):
            spec = self._spec_of(decision.island, decision.on_pressure, decision.stop_rule)
            self._unsent.append(spec)
            self._lots.append(spec.noise)
            self._recorder.join(ev.Created(at, spec.key.trace, decision.island))

    def _branch(self, decision: Branch, at: int) -> None:
        parent = self._tree.traces[decision.parent]
        child = self._spec_of(parent.island, decision.on_pressure)
        temperature = child.sampling.temperature * self._settings.child_temperature
        is_ghost = parent.state is TraceState.GHOST
        score, eviction_score = self._scores.branch(child.key.trace, parent, decision.inherited)
        child = dataclasses.replace(
            child,
            sampling=dataclasses.replace(child.sampling, temperature=temperature),
            inherited=decision.inherited,
            parent=None if is_ghost else TraceKey(self._search, parent.id),
            prefix=self._recorder.ghost_tokens[parent.id][: decision.inherited] if is_ghost else (),
            score=score,
            eviction_score=eviction_score,
            history_of=TraceKey(self._search, parent.id) if is_ghost else None,
        )
        self._unsent.append(child)
        self._lots.append(self._lots[parent.root])
        self._recorder.join(ev.Branched(at, child.key.trace, parent.id, decision.inherited, temperature))

    def _end(self, decision: Prune | Evict, at: int) -> None:
        kind = ev.Pruned if isinstance(decision, Prune) else ev.Evicted
        trace = self._tree.traces[decision.trace]
        score = self._tree.score_of(trace)
        if any(trace.id in (spec.key.trace, spec.parent and spec.parent.trace) for spec in self._unsent):
            self.send()
        own = self.stop([trace.id] if trace.is_live else []).get(trace.id, ())
        self._recorder.leave(kind(at, trace.id, decision.reason, score, own))

    def _spec_of(self, island: int, on_pressure: OnPressure, stop_rule: StopRule | None = None) -> TraceSpec:
        """The next trace's; its random numbers are those of its place on its island."""
        noise_id = self._islands.noise_id(island, self._num_on_island[island])
        self._num_on_island[island] += 1
        return TraceSpec(
            TraceKey(self._search, len(self._tree.traces)),
            self._settings.sampling,
            self._settings.max_new_tokens,
            on_pressure,
            stop_rule=stop_rule,
            island=island,
            noise_id=noise_id,
        )
