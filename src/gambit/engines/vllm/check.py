"""The start-up self-check: one short generation shows that states belong to their rows and that eviction is wired."""

from __future__ import annotations

from gambit.engines.base import SearchSpec
from gambit.engines.vllm.engine import VllmEngine
from gambit.engines.vllm.messages import Report
from gambit.errors import EngineError
from gambit.prompts import BoundaryRule
from gambit.types import Evicted, Finished, OnPressure, PressureAction, RunningScore, Sampling, TraceKey, TraceSpec

SEARCH = -1
SCORES = (0.8, 0.6, 0.2, 0.4)  # of the traces; the third must be the victim
VICTIM = 2
NEW_TOKENS = 12
MOST_STEPS = 100
MOST_MISMATCHES = 0.2  # of the rows: half precision has ties, a mixed-up row is wrong nearly always
_NO_RULE = BoundaryRule(1, frozenset(), frozenset(), frozenset(), None)


def has_room(engine: VllmEngine) -> bool:
    """A budget of a few blocks cannot hold the check itself."""
    return engine.info.kv_capacity_tokens >= 3 * len(SCORES) * max(engine.info.block_tokens, NEW_TOKENS)


def self_check(engine: VllmEngine, vocab_size: int) -> None:
    """Run greedy traces with different texts; let one allocation fail on the way."""
    reports, evicted, finished = _generate(engine, vocab_size)
    reasons = [*_wrong_states(reports), *_wrong_eviction(evicted), *_wrong_ends(finished)]
    if reasons:
        versions = ", ".join(f"{name} {version}" for name, version in engine.info.versions.items())
        raise EngineError(f"Gambit does not work inside this vLLM ({versions}): {'; '.join(reasons)}")


def _generate(engine: VllmEngine, vocab_size: int) -> tuple[list[Report], list[Evicted], list[Finished]]:
    engine.open(SearchSpec(SEARCH, (1 % vocab_size,), _NO_RULE, frozenset()))
    engine.submit_checks([_spec(trace, vocab_size) for trace in range(len(SCORES))])
    reports, evicted, finished = [], [], []
    while engine.progress(SEARCH) and len(reports) < MOST_STEPS:
        report, steps = engine.step_report()
        reports.append(report)
        if SEARCH in steps:
            evicted += steps[SEARCH].evicted
            finished += steps[SEARCH].finished
    engine.close_search(SEARCH)
    return reports, evicted, finished


def _spec(trace: int, vocab_size: int) -> TraceSpec:
    prefix = tuple((7 + 13 * trace + 5 * position) % vocab_size for position in range(trace + 2))
    score = SCORES[trace]
    return TraceSpec(
        TraceKey(SEARCH, trace),
        Sampling(temperature=0.0, top_p=1.0, top_k=0),
        len(prefix) + NEW_TOKENS,
        OnPressure(PressureAction.GHOST),
        inherited=len(prefix),
        prefix=prefix,
        score=RunningScore(1, score, score, score),
    )


def _wrong_states(reports: list[Report]) -> list[str]:
    checked, mismatches = sum(r.checked for r in reports), sum(r.mismatches for r in reports)
    if checked == 0:
        return ["the worker gave no states"]
    if mismatches > MOST_MISMATCHES * checked:
        return [f"{mismatches} of {checked} states do not make the token that was sampled for their row"]
    return []


def _wrong_eviction(evicted: list[Evicted]) -> list[str]:
    if [(lost.trace, lost.action) for lost in evicted] == [(VICTIM, PressureAction.GHOST)]:
        return []
    victims = ", ".join(f"{lost.trace} ({lost.score})" for lost in evicted) or "nobody"
    return [f"when an allocation failed, {victims} had to go instead of trace {VICTIM}, the lowest-scoring one"]


def _wrong_ends(finished: list[Finished]) -> list[str]:
    lengths = {done.trace: len(done.tokens) for done in finished}
    expected = {trace: trace + 2 + NEW_TOKENS for trace in range(len(SCORES)) if trace != VICTIM}
    return [] if lengths == expected else [f"traces of {expected} tokens were asked for, {lengths} came"]
