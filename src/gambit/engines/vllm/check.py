"""The start-up self-check: a short generation that compares states, branches and evictions with what is expected."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gambit.engines.base import SearchSpec
from gambit.engines.vllm.engine import VllmEngine
from gambit.engines.vllm.messages import StepReport
from gambit.errors import EngineError
from gambit.text.boundary import BoundaryRule
from gambit.types import Eviction, OnPressure, PressureAction, RunningScore, Sampling, TraceKey, TraceSpec

SEARCH = -1
SCORES = (0.8, 0.6, 0.2, 0.4)  # of the traces; the third must be the victim
VICTIM = 2
BRANCHES = {len(SCORES) + trace: trace for trace in range(len(SCORES)) if trace != VICTIM}  # and their parents
NEW_TOKENS = 12
MOST_STEPS = 100
MOST_MISMATCHES = 0.2  # of the rows: half precision has ties, a mixed-up row is wrong nearly always
_NO_RULE = BoundaryRule(1, frozenset(), frozenset(), frozenset(), None)


@dataclass(slots=True)
class _Seen:
    reports: list[StepReport] = field(default_factory=list)
    evicted: list[Eviction] = field(default_factory=list)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of those that finished
    inherited: dict[int, int] = field(default_factory=dict)  # by branch


def fits(engine: VllmEngine) -> bool:
    """A budget of a few blocks cannot hold the check itself."""
    return engine.info.kv_capacity_tokens >= 3 * len(SCORES) * max(engine.info.block_tokens, NEW_TOKENS)


def self_check(engine: VllmEngine, vocab_size: int) -> None:
    """Run greedy traces with different texts; let one allocation fail on the way, then branch from the others."""
    seen = _generate(engine, vocab_size)
    reasons = [*_wrong_states(seen.reports), *_wrong_eviction(seen.evicted), *_wrong_branches(seen)]
    if reasons:
        versions = ", ".join(f"{name} {version}" for name, version in engine.info.versions.items())
        raise EngineError(f"Gambit does not work inside this vLLM ({versions}): {'; '.join(reasons)}")


def _generate(engine: VllmEngine, vocab_size: int) -> _Seen:
    engine.open(SearchSpec(SEARCH, (1 % vocab_size,), _NO_RULE, frozenset()))
    engine.submit_checks([_spec(trace, vocab_size) for trace in range(len(SCORES))])
    seen = _Seen()
    while engine.progress(SEARCH) and len(seen.reports) < MOST_STEPS:
        report, steps = engine.step_report()
        seen.reports.append(report)
        if SEARCH in steps:
            seen.evicted += steps[SEARCH].evicted
            seen.tokens |= {done.trace: done.tokens for done in steps[SEARCH].finished}
        if seen.evicted and not seen.inherited:
            branches = _branches(engine)
            seen.inherited = {spec.key.trace: spec.inherited for spec in branches}
            engine.submit_checks(branches)
    engine.close_search(SEARCH)
    return seen


def _spec(trace: int, vocab_size: int) -> TraceSpec:
    prefix = tuple((7 + 13 * trace + 5 * position) % vocab_size for position in range(trace + 2))
    return replace(_bare_spec(trace, trace), inherited=len(prefix), prefix=prefix)


def _branches(engine: VllmEngine) -> list[TraceSpec]:
    progress = engine.progress(SEARCH)
    return [
        replace(_bare_spec(branch, trace), inherited=progress[trace].num_tokens, parent=TraceKey(SEARCH, trace))
        for branch, trace in BRANCHES.items()
        if trace in progress
    ]


def _bare_spec(trace: int, like: int) -> TraceSpec:
    score = SCORES[like]
    return TraceSpec(
        TraceKey(SEARCH, trace),
        Sampling(temperature=0.0, top_p=1.0, top_k=0),
        _length(like),
        OnPressure(PressureAction.GHOST),
        score=RunningScore(1, score, score, score),
    )


def _length(trace: int) -> int:
    return trace + 2 + NEW_TOKENS


def _wrong_states(reports: list[StepReport]) -> list[str]:
    checked, mismatches = sum(r.checked for r in reports), sum(r.mismatches for r in reports)
    if checked == 0:
        return ["the worker gave no states"]
    if mismatches > MOST_MISMATCHES * checked:
        return [f"{mismatches} of {checked} states do not make the token that was sampled for their row"]
    return []


def _wrong_eviction(evicted: list[Eviction]) -> list[str]:
    if [(lost.trace, lost.action) for lost in evicted] == [(VICTIM, PressureAction.GHOST)]:
        return []
    victims = ", ".join(f"{lost.trace} ({lost.score})" for lost in evicted) or "nobody"
    return [f"when an allocation failed, {victims} had to go instead of trace {VICTIM}, the lowest-scoring one"]


def _wrong_branches(seen: _Seen) -> list[str]:
    lengths = {trace: len(said) for trace, said in seen.tokens.items()}
    expected = {trace: _length(parent) for branch, parent in BRANCHES.items() for trace in (branch, parent)}
    if lengths != expected:
        return [f"traces of {expected} tokens were asked for, {lengths} came"]
    # One token more than they inherited, and most of them: half precision has ties here too.
    same = sum(
        seen.tokens[branch][: seen.inherited[branch] + 1] == seen.tokens[parent][: seen.inherited[branch] + 1]
        for branch, parent in BRANCHES.items()
    )
    if 2 * same <= len(BRANCHES):
        return [f"only {same} of {len(BRANCHES)} greedy branches go on like the trace they come from"]
    return []
