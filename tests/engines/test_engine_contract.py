"""The engine contract (engines/base.py), run on every engine."""

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch

from gambit import events as ev
from gambit.engines.confidence import summarise
from gambit.engines.states import embed
from gambit.errors import UserError
from gambit.results.record import fold
from gambit.search.choice import load_policy, options_model
from gambit.text.boundary import boundaries
from gambit.tree import TraceState
from gambit.types import (
    Aggregation,
    EndReason,
    Forcing,
    OnPressure,
    PressureAction,
    RunningScore,
    SearchStep,
    StatePosition,
    StopReason,
    StopRule,
    TraceKey,
)
from support.engine_setups import (
    ENGINES,
    GREEDY,
    PROMPT,
    RULE,
    SAMPLED,
    ProjectionScorer,
    finish,
    open_search,
    projection,
    run,
    spec,
    starting,
    tokens_of,
)
from support.searching import POLICY_OPTIONS, check_ended, check_tree, make_search, make_settings, run_one, run_searches
from support.tiny import tiny_model

QUEUE = OnPressure(PressureAction.QUEUE)
PRUNE = OnPressure(PressureAction.PRUNE)


@pytest.fixture(params=ENGINES)
def start(request):
    """Starts an engine and closes it after the test.

    Tests wish for a block size; an engine may know only its own, so expectations use `engine.info.block_tokens`.
    """
    with starting(request.param) as (begin, _):
        yield begin


def most_recomputed(engine):
    """An engine that shares a prefix by whole blocks computes the rest of the last one again."""
    return 0 if engine.info.name == "local" else engine.info.block_tokens - 1


def reference_states(tokens, layers=(-1,)):
    """States of transformers for prompt + tokens, one per position; those of the last layer are post-norm."""
    with torch.inference_mode():
        out = tiny_model().model(input_ids=torch.tensor([[*PROMPT, *tokens]]), output_hidden_states=True)
    return torch.cat([out.hidden_states[layer][0] for layer in layers], dim=-1)


# -- traces ------------------------------------------------------------------------------------------------------


def test_a_greedy_trace_is_what_transformers_says(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=40)])
    tokens = tokens_of(finish(engine))[0]
    model, ids = tiny_model(), list(PROMPT)
    with torch.inference_mode():
        for token in tokens:
            assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


def test_a_greedy_child_continues_exactly_like_its_parent(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY), spec(1)])
    run(engine, 23)
    engine.submit([spec(2, sampling=GREEDY, inherited=23, parent=TraceKey(1, 0))])
    tokens = tokens_of(finish(engine))
    assert tokens[2] == tokens[0] and len(tokens[0]) == 60
    assert tokens[1] != tokens[0]


def test_a_sampled_child_goes_its_own_way_from_the_shared_prefix(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(0)])
    run(engine, 20)
    engine.submit([spec(1, inherited=20, parent=TraceKey(1, 0)), spec(2, inherited=12, parent=TraceKey(1, 0))])
    tokens = tokens_of(finish(engine))
    assert tokens[1][:20] == tokens[0][:20] and tokens[1][20:] != tokens[0][20:]
    assert tokens[2][:12] == tokens[0][:12] and tokens[2][12:] != tokens[0][12:]


def test_a_child_without_a_living_parent_brings_its_prefix(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY)])
    tokens = tokens_of(finish(engine))[0]
    engine.submit([spec(1, sampling=GREEDY, inherited=30, prefix=tokens[:30])])
    steps = finish(engine)
    assert tokens_of(steps)[1] == tokens
    (admitted,) = (a for step in steps for a in step.admitted)
    assert admitted.reused + admitted.recomputed == 30
    if engine.info.name == "local":  # vLLM may still hold the blocks of an ended trace
        assert admitted.reused == 0


def test_a_stopped_trace_says_nothing_more_and_its_slot_is_reused(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(i) for i in range(3)])
    run(engine, 7)
    stopped = engine.stop([TraceKey(1, 1)])
    assert len(stopped[TraceKey(1, 1)]) == 7
    (after,) = run(engine, 1)
    assert after.num_generated == 2 and set(engine.progress(1)) == {0, 2}
    assert 1 not in tokens_of(finish(engine))


def test_what_else_is_in_the_batch_changes_no_trace(start):
    alone = {}
    for trace in (0, 1, 2):
        engine = start()
        open_search(engine)
        engine.submit([spec(trace)])
        alone |= tokens_of(finish(engine))
    engine = start()
    open_search(engine)
    other = (*PROMPT[:5], 7, 8)
    open_search(engine, 2, other)
    engine.submit([spec(0), *(spec(i, search=2) for i in range(3)), spec(1)])
    run(engine, 3)
    engine.submit([spec(2), spec(9, search=2)])
    engine.stop([TraceKey(2, 1)])
    together = {}
    while engine.progress(1) or engine.progress(2):
        together |= tokens_of(run(engine, 1))
    assert together == alone


def test_the_seed_and_the_trace_make_the_noise(start):
    def said(seed, trace):
        engine = start()
        open_search(engine, stops=())
        engine.submit([spec(trace, sampling=replace(SAMPLED, seed=seed), tokens=30)])
        return tokens_of(finish(engine))[trace]

    assert said(1, 0) == said(1, 0)
    assert said(1, 0) != said(2, 0) and said(1, 0) != said(1, 3)


def test_a_trace_ends_at_a_stop_token_or_at_its_length(start):
    engine = start()
    open_search(engine)
    engine.submit([spec(i, tokens=25) for i in range(24)])
    done = [d for step in finish(engine) for d in step.finished]
    by_stop = [d for d in done if d.reason is EndReason.STOP]
    by_length = [d for d in done if d.reason is EndReason.LENGTH]
    assert by_stop and by_length and len(done) == 24
    assert all(d.tokens[-1] == 0 and 0 not in d.tokens[:-1] for d in by_stop)
    assert all(len(d.tokens) == 25 for d in by_length)


def test_length_counts_the_inherited_part(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(0)])
    run(engine, 15)
    engine.submit([spec(1, inherited=15, tokens=20, parent=TraceKey(1, 0))])
    assert len(tokens_of(finish(engine))[1]) == 20


def test_the_context_ends_a_trace_too(start):
    engine = start()
    long_prompt = (5,) * 500
    open_search(engine, prompt=long_prompt, stops=())
    engine.submit([spec(0)])
    assert len(tokens_of(finish(engine))[0]) == 12  # 512 positions
    with pytest.raises(UserError, match="context is 512"):
        open_search(engine, 2, prompt=(5,) * 512)


# -- thoughts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "layers"),
    [(StatePosition.BOUNDARY, (-1,)), (StatePosition.BEFORE, (-1,)), (StatePosition.BOUNDARY, (-1, 1, 0, -2))],
)
def test_scores_come_from_the_states_at_the_scorers_position_and_layers(start, position, layers):
    engine = start(ProjectionScorer(position, layers))
    open_search(engine, stops=())
    engine.submit([spec(i) for i in range(6)])
    steps = run(engine, 20)
    engine.submit([spec(10 + parent, inherited=20, parent=TraceKey(1, parent)) for parent in range(3)])
    steps += finish(engine)
    tokens = tokens_of(steps)
    shift = 0 if position is StatePosition.BOUNDARY else -1
    checked = 0
    for thought in (t for step in steps for t in step.scored):
        states = reference_states(tokens[thought.trace], layers)
        at = len(PROMPT) + thought.num_tokens - 1 + shift
        scores = states @ projection(32 * len(layers))
        assert abs(float(scores[at]) - thought.score) < 1e-4
        assert abs(float(scores[at - 1]) - thought.score) > 1e-4
        assert abs(float(scores[at + 1]) - thought.score) > 1e-4
        checked += 1
    assert checked > 20


def test_a_layer_that_the_model_does_not_have_is_refused(start):
    with pytest.raises(UserError, match="layer 3: the model has 2; 0 is the embedding, -1 the last one"):
        start(ProjectionScorer(layers=(-1, 3)))


@pytest.mark.parametrize("position", StatePosition)
def test_every_thought_is_scored_once_also_across_a_branch(start, position):
    """Children leave at every step, also between the sampling and the feeding of a boundary token."""
    engine = start(ProjectionScorer(position))
    open_search(engine, stops=())
    engine.submit([spec(0, tokens=40)])
    seen = {0: []}
    for step in range(30):
        (result,) = run(engine, 1)
        for thought in result.scored:
            seen[thought.trace].append(thought.num_tokens)
        child = step + 1
        # A child takes over what its parent was scored for so far.
        seen[child] = list(seen[0])
        score = RunningScore(count=len(seen[0]))
        engine.submit([spec(child, inherited=step + 1, tokens=40, parent=TraceKey(1, 0), score=score)])
    steps = finish(engine)
    for thought in (t for step in steps for t in step.scored):
        seen[thought.trace].append(thought.num_tokens)
    for trace, tokens in tokens_of(steps).items():
        ends = [at + 1 for at in boundaries(RULE, tokens)[0]]
        if position is StatePosition.BOUNDARY and ends and ends[-1] == len(tokens):
            ends.pop()  # its last token was never fed
        assert seen[trace] == ends
    assert len(seen) == 31


def test_progress_knows_when_a_trace_stopped_thinking(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=50) for i in range(8)])
    while engine.progress(1):
        before = engine.progress(1)
        tokens = tokens_of(run(engine, 1))
        for trace, said in tokens.items():
            assert before[trace].is_thinking == (RULE.think_end not in said[:-1])


# -- memory ------------------------------------------------------------------------------------------------------


def test_a_branch_computes_nothing_again_but_less_than_a_block(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(0)])
    run(engine, 37)
    engine.submit([spec(i, inherited=37, parent=TraceKey(1, 0)) for i in (1, 2)])
    (step,) = run(engine, 1)
    assert [(a.trace, a.reused + a.recomputed) for a in step.admitted] == [(1, 37), (2, 37)]
    assert max(a.recomputed for a in step.admitted) <= most_recomputed(engine)


def test_shared_prefixes_are_counted_once_and_given_back(start):
    engine = start(block_tokens=8)
    block = engine.info.block_tokens
    open_search(engine, prompt=(5,) * (4 * block + 1), stops=())
    engine.submit([spec(i, tokens=100) for i in range(4)])
    used = engine.step().kv_used_tokens
    assert used == block * (4 + 4)  # four full blocks of the prompt once, one block of their own for each trace
    run(engine, 2 * block)
    engine.submit([spec(4, tokens=100, inherited=2 * block + 1, parent=TraceKey(1, 0))])
    before = engine.step().kv_used_tokens
    assert before == block * (4 + 4 * 3 + 1)  # the child shares two full blocks with its parent, one is its own
    engine.stop([TraceKey(1, i) for i in range(4)])
    assert engine.step().kv_used_tokens == block * (4 + 3)  # the child keeps the shared ones alive
    engine.close_search(1)
    assert engine.step().kv_used_tokens == 0


@pytest.mark.parametrize(
    ("rule", "aggregation"),
    [(OnPressure(PressureAction.GHOST), None), (PRUNE, None), (OnPressure(PressureAction.GHOST, True), None),
     (OnPressure(PressureAction.GHOST), Aggregation.LAST)],
)  # fmt: skip
def test_under_pressure_the_lowest_scoring_trace_goes_and_only_then(start, rule, aggregation):
    """The scorer's scores count by their mean, unless the search says otherwise."""
    engine = start(kv_budget_tokens=300, block_tokens=4)
    open_search(engine, stops=(), aggregation=aggregation)
    by_last = aggregation is Aggregation.LAST
    engine.submit([spec(i, on_pressure=rule) for i in range(12)])
    running, scores, victims, ended = set(), {}, [], set()
    for _ in range(80):
        if not engine.progress(1):
            break
        batch = engine.step()
        step = batch.searches[1]
        for lost in step.evicted:
            seen = {t: scores[t] for t in running if t in scores}
            standing = {t: each[-1] if by_last else sum(each) / len(each) for t, each in seen.items()}
            first = [t for t in running if (t not in standing) == rule.unscored_first] or list(running)
            expected = min(first, key=lambda t: (standing.get(t, 0.0), -t))
            assert lost.trace == expected and lost.action is rule.action
            assert len(lost.tokens) == lost.num_tokens
            victims.append(lost.trace)
            running.discard(lost.trace)
            ended.add(lost.trace)
        running |= {a.trace for a in step.admitted}
        assert len(running) - start.lag * len(step.admitted) <= step.num_generated <= len(running)
        assert batch.kv_used_tokens <= batch.kv_capacity_tokens <= 300
        for thought in step.scored:
            scores.setdefault(thought.trace, []).append(thought.score)
        assert not ended & {t.trace for t in step.scored}
        running -= {f.trace for f in step.finished}
    assert len(victims) >= 4


def test_under_pressure_a_verifiers_word_counts_and_not_the_engines_own(start):
    engine = start(kv_budget_tokens=300, block_tokens=4)
    open_search(engine, stops=(), has_verifier=True)
    engine.submit([spec(i, eviction_score=0.5) for i in range(12)])
    running, num_lost = {won.trace for step in run(engine, 4) for won in step.admitted}, 0
    scores = {i: (7 * i % 12) / 12 for i in engine.progress(1)}
    engine.set_scores({TraceKey(1, i): score for i, score in scores.items()})
    for step in finish(engine):
        for lost in step.evicted:
            assert lost.score == scores[lost.trace] == min(scores[i] for i in running)
            running.discard(lost.trace)
            num_lost += 1
        running = running | {won.trace for won in step.admitted} - {done.trace for done in step.finished}
    assert num_lost >= 4


@pytest.mark.parametrize("is_split", [False, True])
def test_under_pressure_the_islands_count_that_the_search_told_last(start, is_split):
    """On one island all but its last trace may go; each on an island of its own, they wait."""
    engine = start(kv_budget_tokens=300, block_tokens=4)
    open_search(engine, stops=())
    engine.submit([spec(i, on_pressure=OnPressure(PressureAction.GHOST, spares_islands=True)) for i in range(12)])
    run(engine, 4)
    if is_split:
        engine.regroup({TraceKey(1, i): i for i in engine.progress(1)})
    actions = {lost.action for step in run(engine, 40) for lost in step.evicted}
    assert actions == {PressureAction.QUEUE if is_split else PressureAction.GHOST}


def test_a_waiting_trace_never_costs_a_running_one_its_room(start):
    """Room is lost only to running traces that grow, and what they gave up is not handed on in the same step."""
    engine = start(kv_budget_tokens=96, block_tokens=8)
    open_search(engine, prompt=(5,) * 8, stops=())
    engine.submit([spec(i, tokens=40) for i in range(20)])
    waiting, running, evicted_while_waiting = set(range(20)), set(), 0
    while engine.progress(1):
        (step,) = run(engine, 1)
        if step.evicted:
            assert not step.admitted
            evicted_while_waiting += bool(waiting)
        waiting -= {a.trace for a in step.admitted}
        running |= {a.trace for a in step.admitted}
        running -= {e.trace for e in step.evicted}
        assert len(running) - start.lag * len(step.admitted) <= step.num_generated <= len(running)
        running -= {f.trace for f in step.finished}
    assert evicted_while_waiting >= 2 and not waiting


def test_plain_sampling_queues_recomputes_and_says_the_same(start):
    free = start()
    open_search(free)
    free.submit([spec(i, on_pressure=QUEUE) for i in range(10)])
    expected = tokens_of(finish(free))
    engine = start(kv_budget_tokens=160, block_tokens=8)
    open_search(engine)
    engine.submit([spec(i, on_pressure=QUEUE) for i in range(10)])
    steps = finish(engine, most=2000)
    assert tokens_of(steps) == expected
    queued = [e for step in steps for e in step.evicted]
    again = [a for step in steps for a in step.admitted if a.reused + a.recomputed]
    assert queued and all(e.action is PressureAction.QUEUE and e.tokens == () for e in queued)
    came_late = sum(a.reused + a.recomputed for a in again) - sum(e.num_tokens for e in queued)
    assert 0 <= came_late <= start.lag * len(queued)
    assert any(a.recomputed for a in again)


def test_a_lone_trace_without_room_ends_instead_of_queueing_forever(start):
    engine = start(kv_budget_tokens=96, block_tokens=8)
    open_search(engine, prompt=(5,) * 8, stops=())
    engine.submit([spec(0, tokens=200, on_pressure=QUEUE)])
    (done,) = (d for step in finish(engine) for d in step.finished)
    assert done.reason is EndReason.MEMORY and len(done.tokens) == 96 - 8 + 1 - start.lag


def test_a_child_whose_parent_goes_while_it_waits_still_recomputes_nothing(start):
    engine = start(kv_budget_tokens=64, block_tokens=4)
    open_search(engine, prompt=(5,) * 4, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=40), spec(1, tokens=40)])
    run(engine, 22)
    engine.submit([spec(2, sampling=GREEDY, tokens=40, inherited=22, parent=TraceKey(1, 0))])
    greedy = engine.stop([TraceKey(1, 0)])[TraceKey(1, 0)]
    steps = finish(engine)
    (admitted,) = (a for step in steps for a in step.admitted)
    assert admitted.reused + admitted.recomputed == 22
    assert admitted.recomputed <= most_recomputed(engine)
    reference = start()
    open_search(reference, prompt=(5,) * 4, stops=())
    reference.submit([spec(0, sampling=GREEDY, tokens=40)])
    whole = tokens_of(finish(reference))[0]
    assert whole[:22] == greedy
    assert tokens_of(steps).get(2, whole) == whole


def test_the_search_furthest_above_its_quota_gives_way(start):
    engine = start(kv_budget_tokens=400, block_tokens=4)
    open_search(engine, 1, stops=(), kv_quota_tokens=350)
    open_search(engine, 2, stops=(), kv_quota_tokens=50)
    engine.submit([spec(i, search=1) for i in range(4)] + [spec(i, search=2) for i in range(8)])
    victims = []
    for _ in range(45):
        batch = engine.step()
        victims += [(number, e.trace) for number, step in batch.searches.items() for e in step.evicted]
    assert victims and {number for number, _ in victims} == {2}


def test_a_prompt_without_room_is_refused(start):
    engine = start(kv_budget_tokens=32)
    with pytest.raises(UserError, match="cannot hold a prompt"):
        open_search(engine, prompt=(5,) * 40)


# -- whole searches ----------------------------------------------------------------------------------------------


def searching(engine, number, prompt, **options):
    settings = make_settings(capacity=8, swap_size=2, check_interval=6, warmup_tokens=8, max_new_tokens=60, **options)
    return make_search(engine, settings, number=number, prompt=prompt, rule=RULE, stop_ids=frozenset({0}))


def tree_of(watched):
    return [(t.parent, t.inherited, t.state, t.own_tokens, t.answer) for t in watched.search.record.tree.traces]


def test_two_searches_at_once_give_the_same_trees_as_one_after_the_other(start):
    prompts = {1: PROMPT, 2: (*PROMPT[:6], 9, 10, 3), 3: PROMPT[4:]}
    separate = {}
    for number, prompt in prompts.items():
        engine = start()
        watched = searching(engine, number, prompt)
        list(run_searches(engine, [watched.search]))
        separate[number] = tree_of(watched)
    engine = start()
    together = {number: searching(engine, number, prompt) for number, prompt in prompts.items()}
    ended = list(run_searches(engine, [w.search for w in together.values()], concurrency=2))
    assert len(ended) == 3
    assert {number: tree_of(watched) for number, watched in together.items()} == separate


def test_the_same_seed_gives_the_same_log(start):
    def log():
        watched = run_one(
            start(),
            make_settings(capacity=8, max_new_tokens=60),
            prompt=PROMPT,
            rule=RULE,
            stop_ids=frozenset({0}),
        )
        return [ev.to_json(e) for e in watched.events if not isinstance(e, ev.Sample)]

    assert log() == log()


def test_a_search_in_a_third_of_the_room_keeps_every_invariant(start):
    engine = start(kv_budget_tokens=240, block_tokens=8)
    settings = make_settings(capacity=12, swap_size=3, check_interval=5, warmup_tokens=8, max_new_tokens=60)
    watched = run_one(
        engine,
        settings,
        prompt=PROMPT,
        rule=RULE,
        stop_ids=frozenset({0}),
        check=lambda search, event: check_tree(search.record.tree),
    )
    tree = watched.search.record.tree
    check_ended(tree)
    assert watched.search.result.counts.evicted >= 3
    assert not [e for e in watched.events if isinstance(e, ev.Queued)]
    for trace in tree.traces:
        if trace.parent is not None and trace.num_tokens:
            assert tree.tokens_of(trace.id)[: trace.inherited] == tree.tokens_of(trace.parent)[: trace.inherited]


def test_islands_survive_a_third_of_the_kv_cache(start):
    """The last live trace of an island waits and is recomputed; ghosts come from islands that have more."""
    engine = start(kv_budget_tokens=240, block_tokens=8)
    settings = make_settings(capacity=12, swap_size=4, check_interval=5, warmup_tokens=8, max_new_tokens=60, islands=4)
    watched = run_one(
        engine,
        settings,
        prompt=PROMPT,
        rule=RULE,
        stop_ids=frozenset({0}),
        check=lambda search, event: check_tree(search.record.tree),
    )
    tree, result = watched.search.record.tree, watched.search.result
    check_ended(tree)
    assert result.stop_reason is StopReason.COMPLETED and result.counts.evicted >= 1
    completed = Counter(trace.island for trace in tree.in_state(TraceState.FINISHED))
    assert all(completed[island] >= 3 for island in range(4))
    if start.lag:  # a decision of the search reaches such an engine a step late
        return
    live = defaultdict(set)
    for event in watched.events:
        match event:
            case ev.Created(trace=trace) | ev.Branched(trace=trace):
                live[tree.traces[trace].island].add(trace)
            case ev.Evicted(trace=trace) | ev.Pruned(trace=trace) | ev.Finished(trace=trace):
                mine = live[tree.traces[trace].island]
                assert not isinstance(event, ev.Evicted) or len(mine) >= 2
                mine.discard(trace)


# -- confidence, stop rules, embeddings --------------------------------------------------------------------------------


def reference_confidences(tokens):
    """Minus the mean log-probability of the 20 likeliest tokens, for each token said, from transformers."""
    with torch.inference_mode():
        logits = tiny_model()(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0]
    top = torch.log_softmax(logits[len(PROMPT) - 1 : -1], -1).topk(20).values
    return (-top.mean(-1)).numpy()


def assert_alike(found, expected):
    assert found.num_tokens == expected.num_tokens
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_confidence_is_reported_at_the_end_where_it_was_asked_for(start):
    engine = start()
    open_search(engine, confidence_window=7)
    open_search(engine, 2)
    engine.submit([spec(i) for i in range(4)] + [spec(0, search=2)])
    steps = run(engine, 12)
    live = engine.progress(1)
    children = [
        spec(10 + parent, inherited=inherited, parent=TraceKey(1, parent))
        for parent, inherited in ((0, 12), (1, 9))
        if parent in live
    ]
    assert children
    engine.submit(children)
    while engine.progress(1):
        batch = engine.step()
        steps.append(batch.searches.get(1, SearchStep()))
        assert all(done.confidence is None for done in batch.searches.get(2, SearchStep()).finished)
    done = [d for step in steps for d in step.finished]
    assert len(done) == 4 + len(children)
    for trace in done:
        assert_alike(trace.confidence, summarise(reference_confidences(trace.tokens), 7))


def test_a_stop_rule_ends_a_trace_at_the_very_token(start):
    window = 6
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=50) for i in range(6)])
    whole = tokens_of(finish(engine))
    expected, rules = {}, {}
    for trace, tokens in whole.items():
        sums = np.convolve(reference_confidences(tokens), np.ones(window) / window, "valid")
        # A threshold between two window means, far enough from both that rounding cannot matter.
        threshold = next(t for t in np.linspace(sums.max(), sums.min(), 40)[5:] if np.abs(sums - t).min() > 1e-3)
        rules[trace] = StopRule(window, float(threshold))
        expected[trace] = window + int(np.flatnonzero(sums < threshold)[0])
    engine = start()
    open_search(engine, stops=(), confidence_window=window)
    free = spec(9, tokens=50)
    engine.submit([*(spec(i, tokens=50, stop_rule=rules[i]) for i in range(6)), free])
    done = {d.trace: d for step in finish(engine) for d in step.finished}
    assert {trace: len(done[trace].tokens) for trace in whole} == expected
    assert {done[trace].reason for trace in whole} == {EndReason.CONFIDENCE}
    assert all(done[trace].tokens == whole[trace][: expected[trace]] for trace in whole)
    assert done[9].reason is EndReason.LENGTH and len(done[9].tokens) == 50


def test_a_queued_trace_keeps_what_is_known_of_its_confidence(start):
    engine = start(kv_budget_tokens=160, block_tokens=8)
    open_search(engine, confidence_window=5)
    engine.submit([spec(i, on_pressure=QUEUE) for i in range(10)])
    steps = finish(engine, most=2000)
    assert [e for step in steps for e in step.evicted]
    for trace in (d for step in steps for d in step.finished):
        assert_alike(trace.confidence, summarise(reference_confidences(trace.tokens), 5))


@pytest.mark.parametrize("position", StatePosition)
def test_embeddings_are_the_projected_states_of_their_thoughts(start, position):
    engine = start(ProjectionScorer(position))
    open_search(engine, stops=(), embedding_size=16)
    open_search(engine, 2, stops=())
    engine.submit([*(spec(i) for i in range(3)), spec(0, search=2)])
    steps, others = [], []
    while engine.progress(1):
        batch = engine.step()
        steps.append(batch.searches[1])
        others += batch.searches.get(2, SearchStep()).scored
    tokens = tokens_of(steps)
    shift = 0 if position is StatePosition.BOUNDARY else -1
    thoughts = [t for step in steps for t in step.scored]
    assert len(thoughts) > 10 and all(t.embedding is None for t in others)
    for thought in thoughts:
        at = len(PROMPT) + thought.num_tokens - 1 + shift
        expected = embed(reference_states(tokens[thought.trace])[at][None], 16)[0]
        assert thought.embedding == pytest.approx(expected.tolist(), abs=1e-4)
        assert sum(x * x for x in thought.embedding) == pytest.approx(1.0, abs=1e-5)


def test_tokens_of_a_live_trace_can_be_read(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=30)])
    run(engine, 9)
    early, late = tuple(engine.tokens(TraceKey(1, 0))), tuple(engine.tokens(TraceKey(1, 0), 4))
    whole = tokens_of(finish(engine))[0]
    assert early == whole[:9] and late == whole[4:9]


# -- every policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "options"), [(name, way) for name, ways in POLICY_OPTIONS.items() for way in ways])
def test_every_policy_keeps_every_invariant_and_its_budget_in_little_room(start, policy, options):
    engine = start(kv_budget_tokens=240, block_tokens=8)
    settings = make_settings(
        policy,
        capacity=10,
        num_traces=12,
        max_new_tokens=50,
        budget_tokens=450,
        policy_options=options_model(load_policy(policy))(**options),
    )
    watched = run_one(
        engine,
        settings,
        prompt=PROMPT,
        rule=RULE,
        stop_ids=frozenset({0}),
        vote=load_policy(policy).default_vote.value,
        check=lambda search, event: check_tree(search.record.tree),
    )
    tree, result = watched.search.record.tree, watched.search.result
    check_ended(tree)
    assert result.tokens.generated <= 450 and result.error is None
    is_queueing = any(isinstance(e, ev.Queued) for e in watched.events)
    if policy in ("gambit", "step"):
        assert not is_queueing
    replayed = fold(map(ev.from_json, map(ev.to_json, watched.events)))
    assert replayed.vote(lambda a, b: a == b).answer == result.answer


def test_deepconf_and_slim_sc_prune_on_a_real_model(start):
    def pruned(policy, **options):
        settings = make_settings(policy, capacity=12, policy_options=options_model(load_policy(policy))(**options))
        watched = run_one(start(), settings, prompt=PROMPT, rule=RULE, stop_ids=frozenset({0}))
        return [e.reason for e in watched.events if isinstance(e, ev.Pruned)]

    assert set(pruned("deepconf", warmup_traces=4, window_tokens=5, percentile=50)) == {"confidence"}
    assert set(pruned("slim-sc", delay_tokens=5, threshold=0.5)) == {"similar"}


# -- given tokens ------------------------------------------------------------------------------------------------

GIVEN = (9, 10, 11, 12, 13)


@pytest.mark.parametrize("length", [1, 23, 32])
@pytest.mark.parametrize("keeps_parent", [True, False])
def test_a_child_goes_on_after_given_tokens_as_if_it_had_sampled_them(start, length, keeps_parent):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY), spec(1)])
    run(engine, length)
    engine.submit([spec(2, sampling=GREEDY, inherited=length, parent=TraceKey(1, 0), given=GIVEN)])
    stopped = () if keeps_parent else engine.stop([TraceKey(1, 0)])[TraceKey(1, 0)]
    (first,) = run(engine, 1)
    steps = [first]
    while not any(admitted.trace == 2 for step in steps for admitted in step.admitted):
        steps += run(engine, 1)
    progress = engine.progress(1)[2]
    assert not progress.is_thinking and progress.num_tokens >= length + len(GIVEN)
    steps += finish(engine)
    tokens = tokens_of(steps)[2]
    (admitted,) = (a for step in steps for a in step.admitted if a.trace == 2)
    assert admitted.reused + admitted.recomputed == length + len(GIVEN)
    assert admitted.recomputed <= len(GIVEN) + most_recomputed(engine)
    assert len(tokens) == 60 and tokens[length : length + len(GIVEN)] == GIVEN
    assert keeps_parent or tokens[:length] == stopped[:length]
    ids, model = [*PROMPT, *tokens[: length + len(GIVEN)]], tiny_model()
    with torch.inference_mode():
        for token in tokens[length + len(GIVEN) :]:
            assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
    assert not [thought for step in steps for thought in step.scored if thought.trace == 2]


def test_a_prefix_and_given_tokens_are_computed_together(start):
    engine = start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY)])
    known = tokens_of(finish(engine))[0][:30]
    engine.submit([spec(1, sampling=GREEDY, inherited=30, parent=None, prefix=known, given=GIVEN, tokens=40)])
    engine.submit([spec(2, sampling=GREEDY, inherited=35, parent=None, prefix=(*known, *GIVEN), tokens=40)])
    tokens = tokens_of(finish(engine))
    assert tokens[1] == tokens[2] and len(tokens[1]) == 40


@pytest.mark.parametrize("kv_tokens", [None, 640])
def test_forced_answers_keep_every_invariant_and_their_budget_and_replay(start, kv_tokens):
    engine = start(kv_budget_tokens=kv_tokens, block_tokens=4)
    forcing = Forcing((9, 10), (9,), answer_tokens=4, is_auto=True, thinking_tokens=24)
    for policy, reason in (("sc", "thinking"), ("gambit", "thinking"), ("sc", "budget_tokens")):
        budget = {"budget_tokens": 130} if reason == "budget_tokens" else {}
        settings = make_settings(policy, max_new_tokens=48, forcing=forcing, **budget)
        watched = run_one(
            engine,
            settings,
            prompt=PROMPT,
            rule=RULE,
            check=lambda search, event: check_tree(search.record.tree),
        )
        tree = watched.search.record.tree
        check_ended(tree)
        forced = [event for event in watched.events if isinstance(event, ev.Forced)]
        assert forced and {event.reason for event in forced} == {reason}
        assert all(tree.tokens_of(each.trace)[each.inherited :][: len(each.given)] == each.given for each in forced)
        if reason == "thinking":
            assert {event.inherited for event in forced} == {24}
        else:
            assert watched.search.result.tokens.generated <= 130
        assert fold([ev.from_json(ev.to_json(event)) for event in watched.events]).tree.traces == tree.traces
