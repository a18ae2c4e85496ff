"""A search with a verifier: what it reads, when its scores count, and what becomes of a search that loses it."""

import dataclasses
import threading
import warnings

import pytest

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.config.trust import ScorerTrust
from gambit.errors import EngineError, GambitWarning, UserError
from gambit.pawn import Level, Split, generate
from gambit.results.record import fold, replay
from gambit.solver import Solver
from gambit.types import Aggregation, Problem, StopReason
from support.scripted import DyingVerifier, FunctionVerifier, HeldVerifier, is_sound
from support.searching import check_ended

pytestmark = pytest.mark.contract
PUZZLES = [puzzle for puzzle, _ in zip(generate(Split.DEV, 0, Level.EASY), range(4), strict=False)]
QUICK = {"capacity": 6, "swap_size": 2, "check_interval": 12, "warmup_tokens": 12, "islands": 1}


def solver_with(reader, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Solver("pawn", scorer=reader, device="cpu", **options)


def solved(solver, puzzle, **changes):
    events = []
    result = solver.solve(puzzle.text, SearchConfig(**{**QUICK, **changes}), on_event=events.append)
    return result, events


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def judged_scores(events):
    """(trace, length) -> score."""
    return {
        (trace, length): score
        for event in of(ev.Verified, events)
        for trace, length, score in zip(event.traces, event.num_tokens, event.scores, strict=True)
    }


@pytest.fixture(scope="module")
def oracle():
    reader = FunctionVerifier(is_sound)
    with solver_with(reader) as solver:
        yield solver, reader
    assert reader.is_closed


def test_a_verifier_that_knows_the_truth_has_only_wrong_traces_pruned(oracle):
    solver, _ = oracle
    num_pruned = num_right = 0
    for puzzle in PUZZLES:
        result, events = solved(solver, puzzle)
        pruned = [event for event in of(ev.Pruned, events) if event.reason == "tournament"]
        num_pruned += len(pruned)
        assert all(event.score == 0.0 for event in pruned)
        right = [vote for vote in result.votes if vote.answer == str(puzzle.answer)]
        num_right += len(right)
        assert not right or sum(vote.weight for vote in result.votes) == right[0].weight, "the wrong ones weigh nothing"
    assert num_pruned > 2 and num_right > 2


def test_islands_follow_from_trust_in_the_verifier_and_not_in_the_models_own_scorer(oracle):
    result, _ = solved(oracle[0], PUZZLES[0], islands="auto", capacity=8)
    assert result.pool.islands == 4 and "nobody has judged the scorer" in result.pool.why
    reader = FunctionVerifier(is_sound)
    reader.info = dataclasses.replace(reader.info, trust=ScorerTrust(auc=(0.7, 0.7, 0.8, 0.9), num_problems=30))
    with solver_with(reader) as solver:
        result, _ = solved(solver, PUZZLES[0], islands="auto", capacity=8)
    assert result.pool.islands == 2 and "0.70 on 30 problems" in result.pool.why


def test_it_reads_each_thought_once_with_all_that_came_before(oracle):
    solver, reader = oracle
    reader.seen.clear()
    _, events = solved(solver, PUZZLES[0])
    tree, tokenizer = fold(events).tree, solver.engine.tokenizer
    keys = [reading.key for reading in reader.seen]
    assert len(set(keys)) == len(keys)
    for reading in reader.seen:
        key = reading.key
        tokens = tree.tokens_of(key.trace)
        assert reading.tokens == tokens[: key.num_tokens] and reading.ends[-1] == key.num_tokens
        assert reading.question.prompt_tokens == events[0].prompt_tokens
        assert "".join(reading.thoughts) == tokenizer.decode(list(reading.tokens))
    ends = {event.trace: tree.traces[event.trace].num_tokens - 1 for event in of(ev.Finished, events)}
    assert set(ends.items()) <= set(judged_scores(events)), "answers are read too"


def test_scores_count_at_tournaments_and_the_log_says_how_old_they_are(oracle):
    solver, _ = oracle
    _, events = solved(solver, PUZZLES[1])
    *rounds, last = of(ev.Verified, events)
    assert rounds and all(event.step % QUICK["check_interval"] == 0 for event in rounds)
    for event in rounds:
        assert all(0 <= event.step - ended < QUICK["check_interval"] for ended in event.ended_steps)
        unscored = {trace for trace, score in zip(event.traces, event.engine_scores, strict=True) if score is None}
        assert unscored <= {done.trace for done in of(ev.Finished, events)}, "the engine has no score of an answer"
    assert not of(ev.Scored, events)
    assert events.index(last) > events.index(of(ev.Stopped, events)[0]), "the last answer's score comes before the vote"
    assert events[0].aggregation == Aggregation.LAST


def test_a_tournament_waits_for_a_verifier_that_is_late(monkeypatch):
    """It answers only when the engine stands still before a tournament, or has gone on without it."""
    stepped, num_steps = threading.Condition(), 0
    reader = HeldVerifier(is_sound, lambda: wait_for_a_tournament())
    with solver_with(reader) as solver:
        step = solver.engine.step

        def counted():
            nonlocal num_steps
            batch = step()
            with stepped:
                num_steps += 1
                stepped.notify_all()
            return batch

        def wait_for_a_tournament():
            with stepped:
                stepped.wait_for(lambda: num_steps % QUICK["check_interval"] == 0 or is_over, timeout=60)

        def on_event(event):
            nonlocal is_over
            events.append(event)
            if isinstance(event, ev.Stopped):
                with stepped:
                    is_over = True
                    stepped.notify_all()

        monkeypatch.setattr(solver.engine, "step", counted)
        events, is_over = [], False
        solver.solve(PUZZLES[1].text, SearchConfig(**QUICK), on_event=on_event)
    *rounds, _ = of(ev.Verified, events)
    ages = [event.step - ended for event in rounds for ended in event.ended_steps]
    assert len(ages) > 8 and max(ages) < QUICK["check_interval"]


@pytest.mark.parametrize("lag", [0, 8])
def test_a_tournament_goes_by_all_thoughts_that_had_ended_so_long_before_it(lag):
    with solver_with(FunctionVerifier(is_sound), verifier_lag=lag) as solver:
        _, events = solved(solver, PUZZLES[1])
    *rounds, last = of(ev.Verified, events)
    ages = {event.step - ended for event in rounds for ended in event.ended_steps}
    assert lag <= min(ages) and max(ages) < QUICK["check_interval"] + lag, "none too early, and none a round too late"
    assert max(last.ended_steps) == last.step, "the vote has all scores"


def test_nothing_waits_for_a_thought_that_has_only_just_ended():
    """The verifier reads what ended in the last steps before a tournament only after that tournament was held."""
    held, lag = threading.Event(), 8
    first = QUICK["check_interval"]
    late = []

    def score(reading):
        if first - lag < reading.key.num_tokens <= first:  # roots decode a token a step
            late.append(held.wait(60))
        return is_sound(reading)

    with solver_with(FunctionVerifier(score), verifier_lag=lag) as solver:
        events = []

        def on_event(event):
            events.append(event)
            if isinstance(event, ev.Sample) and event.step == first:
                held.set()

        result = solver.solve(PUZZLES[1].text, SearchConfig(**QUICK), on_event=on_event)
    assert late and all(late) and result.stop_reason is StopReason.COMPLETED


def test_the_same_seed_gives_the_same_log_and_the_log_the_same_result(oracle, tmp_path):
    solver, _ = oracle

    def story(events):
        seconds = (ev.Sample, ev.Waited, ev.VerifierTotals)
        return [event for event in events if not isinstance(event, seconds)]

    (first, events), (second, again) = solved(solver, PUZZLES[2]), solved(solver, PUZZLES[2])
    assert story(events) == story(again) and first.verifier.is_repeatable
    result = solver.solve(PUZZLES[2].text, SearchConfig(**QUICK), out_dir=tmp_path / "run")
    replayed = replay(tmp_path / "run" / "events.jsonl", solver.equivalent)
    assert replayed.votes == result.votes == second.votes and replayed.verifier == result.verifier
    assert result.verifier.thoughts == len(judged_scores(events)) and result.verifier.tokens > 0


def test_how_many_scores_were_in_time():
    reader = HeldVerifier(is_sound)
    with solver_with(reader, verifier_async=True) as solver:
        result = solver.solve(
            PUZZLES[0].text,
            SearchConfig(**QUICK),
            on_event=lambda event: reader.go.set() if isinstance(event, ev.Stopped) else None,
        )
    assert result.verifier.in_time == 0 < result.verifier.needed < result.verifier.thoughts


def test_nothing_is_read_where_nobody_looks_at_scores(oracle):
    solver, reader = oracle
    reader.seen.clear()
    result, _ = solved(solver, PUZZLES[0], policy="sc")
    assert not reader.seen and result.verifier is None
    result, events = solved(solver, PUZZLES[0], policy="sc", vote="score")
    assert result.verifier.thoughts == len(reader.seen) > 0 and len(of(ev.Verified, events)) == 1


def test_islands_do_not_wait_for_scores_when_a_trace_completes(oracle):
    solver, _ = oracle
    _, events = solved(solver, PUZZLES[0], islands=4)
    *rounds, _ = of(ev.Verified, events)
    assert all(event.step % QUICK["check_interval"] == 0 for event in rounds)


def test_evictions_follow_the_verifier():
    reader = FunctionVerifier(lambda reading: 1 / (1 + (reading.key.trace - 3) ** 2))  # the further from 3, the worse
    with solver_with(reader, kv_budget_tokens=416) as solver:
        _, events = solved(solver, PUZZLES[3], hard_floor=0, warmup_tokens=1000)  # no trace may be a parent
    evicted = [(event.trace, event.score) for event in of(ev.Evicted, events) if event.reason == "pressure"]
    assert len(evicted) >= 2 and evicted[:2] == [(5, 1 / 5), (0, 1 / 10)][::-1]


def test_asynchronous_tournaments_take_what_has_arrived():
    reader = HeldVerifier(is_sound)
    with solver_with(reader, verifier_async=True) as solver:
        events = []

        def on_event(event):
            events.append(event)
            if isinstance(event, ev.Sample) and event.step >= 3 * QUICK["check_interval"]:
                reader.go.set()

        result = solver.solve(PUZZLES[0].text, SearchConfig(**QUICK), on_event=on_event)
    first = of(ev.Verified, events)[0]
    assert first.step > 3 * QUICK["check_interval"]
    assert max(first.step - ended for ended in first.ended_steps) > QUICK["check_interval"]
    assert not result.verifier.is_repeatable and result.verifier.lost is None
    check_ended(fold(events).tree)
    scores = judged_scores(events)
    tree = fold(events).tree
    for trace in tree.in_state(tree.traces[0].state.FINISHED):
        assert (trace.id, trace.num_tokens - 1) in scores, "the vote has all scores"


def test_a_child_gets_the_scores_that_were_under_way_when_it_branched():
    reader = HeldVerifier(lambda reading: 0.5 + reading.key.num_tokens / 10_000 - reading.key.trace / 100)
    with solver_with(reader, verifier_async=True) as solver:
        events = []

        def on_event(event):
            events.append(event)
            if isinstance(event, ev.Sample) and event.step == 2 * QUICK["check_interval"]:
                reader.go.set()

        solver.solve(PUZZLES[1].text, SearchConfig(**QUICK), on_event=on_event)
    tree, scores = fold(events).tree, judged_scores(events)
    for event in of(ev.Branched, events):
        child = tree.traces[event.trace]
        if child.state is child.state.FINISHED:
            own = sorted(length for trace, length in scores if trace == child.id)
            parent = [length for trace, length in scores if trace == event.parent and length <= event.inherited]
            assert child.score.count >= len(own) and own == sorted(set(own))
            assert child.score.count >= len(parent)


def test_losing_the_verifier_ends_the_search_with_its_reason():
    with solver_with(DyingVerifier(is_sound, lives=10)) as solver:
        with pytest.raises(EngineError, match="the verifier test failed: out of breath; --verifier-optional"):
            solved(solver, PUZZLES[0])
        results = list(solver.solve_many([PUZZLES[0].text, PUZZLES[1].text], SearchConfig(**QUICK)))
    assert all(result.stop_reason is StopReason.FAILED and "out of breath" in result.error for result in results)


def test_a_verifier_that_is_lost_at_the_vote_leaves_a_log_with_an_end():
    reader = DyingVerifier(is_sound, lives=1000)

    def on_event(event):
        events.append(event)
        if isinstance(event, ev.Finished):
            reader.lives = 0  # answers are read last

    events = []
    with solver_with(reader) as solver, pytest.raises(EngineError, match="out of breath"):
        solver.solve(PUZZLES[0].text, SearchConfig(**{**QUICK, "check_interval": 100}), on_event=on_event)
    assert isinstance(events[-1], ev.Voted) and isinstance(events[-2], ev.VerifierTotals)


def test_a_context_too_short_is_said():
    reader = FunctionVerifier(is_sound)
    reader.info = dataclasses.replace(reader.info, context_tokens=100)
    with solver_with(reader) as solver, pytest.warns(GambitWarning, match="the verifier reads at most 100 tokens"):
        solved(solver, PUZZLES[0], budget_tokens=50)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_optional_verifier_that_is_lost_leaves_the_engines_own_scores(is_async):
    with solver_with(DyingVerifier(is_sound, lives=10), verifier_optional=True, verifier_async=is_async) as solver:
        result, events = solved(solver, PUZZLES[0])
        again, later = solved(solver, PUZZLES[0])
    assert result.stop_reason is StopReason.COMPLETED and result.answer is not None
    assert "out of breath" in result.verifier.lost and "out of breath" in again.verifier.lost
    assert of(ev.Scored, events) and result.verifier.thoughts <= 10
    assert again.verifier.thoughts == 0
    judged = of(ev.Verified, later)[0]
    assert judged.scores == judged.engine_scores


def test_a_verifier_that_says_nothing_does_not_outlast_the_time_budget():
    reader = HeldVerifier(is_sound)
    with solver_with(reader) as solver:
        result, _ = solved(solver, PUZZLES[0], budget_seconds=0.5)
        reader.go.set()
    assert result.stop_reason is StopReason.BUDGET_SECONDS and result.verifier.thoughts == 0


def test_a_verifier_that_does_not_start_says_why(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        Solver("pawn", scorer="verifier:/no/such/folder", device="cpu")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        Solver("pawn", scorer=f"verifier:{tmp_path}", device="cpu")
    with pytest.raises(UserError, match="formats are"):
        Solver("pawn", scorer="verifier:shepherd:folder", device="cpu")


# -- votes without a search ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reads_all"),
    [
        ({"policy": "sc", "vote": "score"}, False),
        ({"policy": "sc", "vote": "best"}, False),
        ({"policy": "sc", "vote": "position"}, True),  # weighs every thought
        ({"policy": "gambit"}, True),  # ranks by them
    ],
)
def test_a_verifier_whose_scores_only_vote_reads_each_trace_once(oracle, changes, reads_all):
    solver, reader = oracle
    before = len(reader.seen)
    result, events = solved(solver, PUZZLES[0], **changes)
    readings = reader.seen[before:]
    assert (len(readings) > result.counts.completed) is reads_all
    assert result.verifier.thoughts == len(readings) or reads_all
    ends = {reading.key.trace: reading for reading in readings}
    for trace in (event.trace for event in of(ev.Finished, events)):
        assert len(ends[trace].thoughts) > 2, "with all its thoughts, one by one"


def test_with_whom_it_may_have_to_do_without_it_all_thoughts_are_read():
    reader = FunctionVerifier(is_sound)
    with solver_with(reader, verifier_optional=True) as solver:
        result, _ = solved(solver, PUZZLES[0], policy="sc", vote="score")
        assert len(reader.seen) > result.counts.completed


def test_searches_in_rounds_by_a_verifier_repeat_and_save_traces(oracle):
    solver, _ = oracle
    config = {"policy": "sc", "vote": "score", "capacity": 12, "first_traces": 3, "consensus_stop": 0.6}
    found = [solved(solver, puzzle, **config)[0] for puzzle in PUZZLES]
    problems = [Problem(puzzle.text, id=str(number)) for number, puzzle in enumerate(PUZZLES)]
    together = solver.solve_many(problems, SearchConfig(**{**QUICK, **config}), concurrency=4)
    assert any(result.counts.completed < 12 for result in found)
    for result in together:
        alone = found[int(result.problem_id)]
        assert (result.votes, result.tokens.generated) == (alone.votes, alone.tokens.generated), "beside others too"
