"""The core of the engine contract on the local engine, for models of every kind of layer.

Each kind is one test, and each check of the contract a sub-test. What they find is in the table of docs/models.md:
after a change that is meant, python -m pytest tests/engines/test_model_kinds.py --all --renew.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scripts.result_tables import renewed, table

from gambit import events as ev
from gambit.config.options import BranchPoint
from gambit.engines.base import SearchSpec, check_prompt
from gambit.engines.local.caches import OwnCaches
from gambit.engines.local.engine import LocalEngine
from gambit.engines.local.model import PoolModel
from gambit.errors import GambitWarning, UserError
from gambit.text.boundary import boundaries
from gambit.types import Forcing, OnPressure, PressureAction, RunningScore, SearchStep, TraceKey
from support import ROOT
from support.engine_setups import (
    EVERYWHERE,
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
    tokens_of,
)
from support.kinds import KINDS, Kind
from support.searching import check_ended, make_settings, run_one
from support.tiny import tiny_tokenizer

PAGE = ROOT / "docs" / "models.md"
COLUMNS = "models | layers | contract core | states | again from the end | again from before | traces run"
TOLERANCE = 1e-4  # of the largest logit or state
VARIED = replace(SAMPLED, temperature=4.0)  # nearly all tokens are as likely: thoughts end often
QUEUE = OnPressure(PressureAction.QUEUE)
LAYERS = (-1, 1, 0)


class Bench:
    """A kind's model, which all checks share, with transformers' own model to compare with."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.reference = kind, kind.build()
        self.reference.get_output_embeddings().register_forward_pre_hook(self._keep)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GambitWarning)
            self._model = PoolModel(kind.build(), "tiny")
        self.sizes = self._model.cache_sizes
        self.is_batched = not isinstance(self._model._runner, OwnCaches)
        self.forgets = not self.sizes.can_cut  # a prefix that is not all of the parent is computed again
        self.has_caches = self.is_batched or self._model._runner.has_caches
        self.again: dict[str, str] = {}  # where a branch begins -> how many tokens were computed again

    def _keep(self, head, args) -> None:
        self.last_states = args[0]  # of the last pass of the reference, after its last norm

    def start(self, scorer=None, **options) -> LocalEngine:
        return LocalEngine(self._model, tiny_tokenizer(), scorer or ProjectionScorer(), **options)

    @property
    def state_tokens(self) -> int:
        return self.sizes.state_blocks(4) * 4

    def check_greedy(self, tokens, prompt=PROMPT) -> None:
        """Every token is transformers' best, or as good as its best."""
        with torch.inference_mode():
            logits = self.reference(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(tokens)), list(tokens)]
        assert (logits.max(-1).values - chosen).max() <= TOLERANCE * logits.abs().max()

    def check_score(self, tokens, num_tokens: int, score: float, layers) -> None:
        """The score of a thought is the product of transformers' states at its last token."""
        states = self._states(tuple(tokens), layers)[len(PROMPT) + num_tokens - 1]
        expected = float(states @ projection(32 * len(layers)))
        assert abs(score - expected) <= TOLERANCE * (1 + float(states.abs().max())) * len(states) ** 0.5

    @functools.cache  # noqa: B019 - a bench lives as long as its test
    def _states(self, tokens: tuple[int, ...], layers: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([[*PROMPT, *tokens]])
            hidden = self.reference(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        found = {**dict(enumerate(hidden)), -1: self.last_states}
        return torch.cat([found[layer][0] for layer in layers], dim=-1)


def greedy_trace(engine, tokens=40):
    """Opens a search and returns the tokens of a greedy trace."""
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=tokens)])
    return tokens_of(finish(engine))[0]


def admissions(steps) -> dict[int, tuple[int, int]]:
    return {won.trace: (won.reused, won.recomputed) for step in steps for won in step.admitted}


def is_free(engine) -> bool:
    pool = engine._pool
    return not pool.rows.traces and pool.blocks.used_tokens == 0 and not (pool.kv_rows.caches or pool.kv_prompts.caches)


# -- the checks ----------------------------------------------------------------------------------------------------


def check_greedy_traces_are_those_of_transformers(bench: Bench) -> None:
    bench.check_greedy(greedy_trace(bench.start()))


def check_searches_run_together_and_close_apart(bench: Bench) -> None:
    """The prompt of the third search moves into the place of the first."""
    engine, prompts = bench.start(), {1: PROMPT, 2: PROMPT[3:], 3: PROMPT[5:]}
    for number, prompt in prompts.items():
        open_search(engine, number, prompt, stops=())
        engine.submit([spec(0, search=number, sampling=GREEDY, tokens=30)])
    run(engine, 7)
    engine.close_search(1)
    engine.submit([spec(1, search=3, sampling=GREEDY, tokens=30)])
    found: dict[int, tuple[int, ...]] = {}
    while engine.progress(2) or engine.progress(3):
        for number, step in engine.step().searches.items():
            found |= {10 * number + trace: tokens for trace, tokens in tokens_of([step]).items()}
    assert found[30] == found[31]
    bench.check_greedy(found[20], prompts[2])
    bench.check_greedy(found[30], prompts[3])
    engine.close_search(2)
    engine.close_search(3)
    assert is_free(engine)


def check_a_prompt_of_one_token_has_no_past(bench: Bench) -> None:
    """It comes into the place of a longer prompt, of which it finds nothing."""
    engine = bench.start()
    greedy_trace(engine)
    engine.close_search(1)
    open_search(engine, 2, PROMPT[-1:], stops=())
    engine.submit([spec(0, search=2, sampling=GREEDY, tokens=20)])
    bench.check_greedy(tokens_of(finish(engine, 2))[0], PROMPT[-1:])


def check_a_child_continues_its_parent_exactly(bench: Bench) -> None:
    engine = bench.start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=40), spec(1, tokens=40)])
    run(engine, 15)
    engine.submit([spec(2, sampling=GREEDY, tokens=40, inherited=15, parent=TraceKey(1, 0))])
    steps = run(engine, 5)
    engine.submit([spec(3, sampling=GREEDY, tokens=40, inherited=20, parent=TraceKey(1, 2))])
    steps += finish(engine)
    tokens = tokens_of(steps)
    assert admissions(steps) == {2: (15, 0), 3: (20, 0)}
    bench.again["last token"] = "0 of 15"
    assert tokens[0] == tokens[2] == tokens[3] != tokens[1]


def check_a_child_of_an_earlier_token_continues_there(bench: Bench) -> None:
    engine = bench.start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=40)])
    run(engine, 20)
    engine.submit([spec(1, sampling=GREEDY, tokens=40, inherited=12, parent=TraceKey(1, 0))])
    steps = finish(engine)
    tokens = tokens_of(steps)
    assert admissions(steps) == {1: (0, 12) if bench.forgets else (12, 0)}
    bench.again["earlier"] = f"{admissions(steps)[1][1]} of 12"
    assert tokens[1][:12] == tokens[0][:12]
    bench.check_greedy(tokens[1])


def check_a_child_without_a_parent_brings_its_prefix(bench: Bench) -> None:
    engine = bench.start()
    tokens = greedy_trace(engine)
    engine.submit([spec(1, sampling=GREEDY, tokens=40, inherited=30, prefix=tokens[:30])])
    steps = finish(engine)
    assert admissions(steps) == {1: (0, 30)}
    bench.check_greedy(tokens_of(steps)[1])


def check_given_tokens_are_continued(bench: Bench) -> None:
    """As a forced answer: from the parent's end, from an earlier token, and without a parent."""
    engine = bench.start()
    whole = greedy_trace(engine)
    engine.submit([spec(1, sampling=GREEDY, tokens=40)])
    run(engine, 14)
    more = {"sampling": GREEDY, "tokens": 40, "inherited": 14}
    engine.submit([
        spec(2, parent=TraceKey(1, 1), given=whole[14:22], **more),
        spec(3, prefix=whole[:14], given=whole[14:22], **more),
        spec(4, parent=TraceKey(1, 1), given=whole[10:14], **{**more, "inherited": 10}),
    ])  # fmt: skip
    steps = finish(engine)
    tokens = tokens_of(steps)
    assert admissions(steps)[2] == (14, 8) and admissions(steps)[3] == (0, 22)
    for trace, start in ((2, 22), (3, 22), (4, 14)):
        assert tokens[trace][:start] == whole[:start]
        bench.check_greedy(tokens[trace])


def check_no_neighbour_changes_a_trace(bench: Bench) -> None:
    engine = bench.start()
    alone = []
    for trace in (0, 1):
        open_search(engine, stops=())
        engine.submit([spec(trace, tokens=30)])
        alone.append(tokens_of(finish(engine))[trace])
        engine.close_search(1)
    open_search(engine, stops=())
    engine.submit([spec(trace, tokens=30) for trace in (5, 0, 1, 6)])
    run(engine, 3)
    engine.stop([TraceKey(1, 5)])  # the last row moves into its place
    together = tokens_of(finish(engine))
    assert [together[0], together[1]] == alone


def check_states_are_those_of_transformers(bench: Bench) -> None:
    """Scores of thoughts are products of states: of the last layer and of inner ones, across branches too."""
    layers = LAYERS if bench.kind.has_inner_states else (-1,)
    engine = bench.start(ProjectionScorer(layers=layers))
    engine.open(SearchSpec(1, PROMPT, EVERYWHERE, frozenset()))
    engine.submit([spec(i, sampling=VARIED, tokens=30) for i in range(4)])
    steps = run(engine, 12)
    engine.submit([spec(4, sampling=VARIED, inherited=12, tokens=30, parent=TraceKey(1, 0)),
                   spec(5, sampling=VARIED, inherited=7, tokens=30, parent=TraceKey(1, 0))])  # fmt: skip
    steps += finish(engine)
    tokens, checked = tokens_of(steps), Counter[int]()
    for thought in (thought for step in steps for thought in step.scored):
        bench.check_score(tokens[thought.trace], thought.num_tokens, thought.score, layers)
        checked[thought.trace] += 1
    assert sum(checked.values()) > 5 and {4, 5} <= set(checked)


def check_thoughts_are_scored_once_across_branches(bench: Bench) -> None:
    engine = bench.start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=VARIED, tokens=20)])
    seen: dict[int, list[int]] = {0: []}
    for at in range(1, 15):
        (step,) = run(engine, 1)
        for thought in step.scored:
            seen[thought.trace].append(thought.num_tokens)
        seen[at] = list(seen[0])
        score = RunningScore(count=len(seen[0]))
        engine.submit([spec(at, sampling=VARIED, inherited=at, tokens=20, parent=TraceKey(1, 0), score=score)])
    steps = finish(engine)
    for thought in (thought for step in steps for thought in step.scored):
        seen[thought.trace].append(thought.num_tokens)
    for trace, tokens in tokens_of(steps).items():
        ends = [end + 1 for end in boundaries(RULE, tokens)[0]]
        assert seen[trace] == [end for end in ends if end < len(tokens)] or seen[trace] == ends


def check_traces_end_at_their_limits(bench: Bench) -> None:
    engine = bench.start()
    open_search(engine)
    engine.submit([spec(i, tokens=15) for i in range(12)])
    done = [end for step in finish(engine) for end in step.finished]
    assert len(done) == 12 and all(end.tokens[-1] == 0 or len(end.tokens) == 15 for end in done)
    assert engine._pool.blocks.used_tokens == engine._pool.blocks.block_tokens * len(
        [*engine._pool.searches[1].prompt_blocks, *engine._pool.searches[1].state_blocks]
    )


def check_ghosts_free_their_memory(bench: Bench) -> None:
    """Traces lose their memory when it is full, and the budget holds at every step."""
    budget = 100 + 6 * bench.state_tokens
    engine = bench.start(kv_budget_tokens=budget, block_tokens=4)
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=60) for i in range(8)])
    steps = []
    while engine.progress(1):
        batch = engine.step()
        assert batch.kv_used_tokens <= budget
        steps.append(batch.searches.get(1, SearchStep()))
    evicted = {loss.trace for step in steps for loss in step.evicted}
    assert evicted | set(tokens_of(steps)) == set(range(8))
    assert evicted or not bench.sizes.token_bytes, "states alone do not grow"
    engine.close_search(1)
    assert is_free(engine)


def check_queued_traces_come_back_as_they_were(bench: Bench) -> None:
    engine = bench.start(kv_budget_tokens=70 + 3 * bench.state_tokens, block_tokens=4)
    open_search(engine, stops=())
    engine.submit([spec(i, sampling=GREEDY, tokens=40, on_pressure=QUEUE) for i in range(4)])
    steps = finish(engine)
    tokens, losses = tokens_of(steps), [loss for step in steps for loss in step.evicted]
    assert set(tokens) == set(range(4)) and all(len(each) == 40 for each in tokens.values())
    again = [won for step in steps for won in step.admitted if won.recomputed]
    assert {loss.trace for loss in losses} == {won.trace for won in again}
    for each in set(tokens.values()):
        bench.check_greedy(each)


def check_whole_searches_score_the_states_of_transformers(bench: Bench) -> None:
    """Branches at the last token and at the last boundary, forced answers, ghosts, in a cache that is too small."""
    budget = 140 + 5 * bench.state_tokens
    for point in (BranchPoint.LAST_TOKEN, BranchPoint.LAST_BOUNDARY):
        engine = bench.start(kv_budget_tokens=budget, block_tokens=4)
        forcing = Forcing((9, 10, 11), answer_tokens=6, thinking_tokens=20)
        settings = make_settings(capacity=6, max_new_tokens=28, branch_point=point, check_interval=4, warmup_tokens=4,
                                 sampling=VARIED, forcing=forcing)  # fmt: skip
        watched = run_one(engine, settings, prompt=PROMPT, rule=EVERYWHERE, stop_ids=frozenset())
        tree = watched.search.record.tree
        check_ended(tree)
        kinds = Counter(type(event) for event in watched.events)
        assert kinds[ev.Branched] and kinds[ev.Forced]
        for event in watched.events:
            if isinstance(event, ev.Scored):
                for trace, score, length in zip(event.traces, event.scores, event.num_tokens, strict=True):
                    bench.check_score(tree.tokens_of(trace), length, score, (-1,))
        assert is_free(engine)


def with_waiting_child(bench: Bench, num_free: int):
    """Starts an engine with a child that waits for a block while its parent goes on; returns it with its hoard."""
    engine = bench.start(kv_budget_tokens=200 + 8 * bench.state_tokens, block_tokens=4)
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=40)])
    length = 16 - (len(PROMPT) - 1 + 3) % 4  # the next three steps of the parent need no block
    run(engine, length)
    blocks = engine._pool.blocks
    hoard = blocks.allocate(blocks.num_free - num_free, 1)
    engine.submit([spec(2, sampling=GREEDY, tokens=40, inherited=length, parent=TraceKey(1, 0))])
    (step,) = run(engine, 1)
    assert not step.admitted and not step.evicted and step.num_generated == 1
    return engine, hoard, length


def check_a_waiting_child_keeps_a_copy_of_its_parents_state(bench: Bench) -> None:
    """Where there is no room for the copy it is computed again."""
    state = bench.sizes.state_blocks(4)
    for num_free in {0, state} if bench.sizes.token_bytes else {0}:
        engine, hoard, length = with_waiting_child(bench, num_free)
        engine.stop([TraceKey(1, 0)] if num_free else [])  # its blocks are not enough for the child
        engine._pool.blocks.release(hoard)
        steps = finish(engine)
        is_kept = num_free == state
        assert admissions(steps) == {2: (length, 0) if is_kept else (0, length)}
        bench.check_greedy(tokens_of(steps)[2])


def check_a_waiting_child_costs_no_running_trace_its_blocks(bench: Bench) -> None:
    """It loses its copy before a running trace is evicted."""
    state = bench.sizes.state_blocks(4) if bench.sizes.token_bytes else 0
    engine, hoard, length = with_waiting_child(bench, state)
    if state:
        steps = run(engine, 4)
        assert not any(step.evicted or step.admitted for step in steps)
    engine._pool.blocks.release(hoard)
    steps = finish(engine)
    assert admissions(steps) == {2: (0, length) if bench.sizes.state_blocks(4) else (length, 0)}
    bench.check_greedy(tokens_of(steps)[2])


def check_a_parent_may_end_before_its_children_are_admitted(bench: Bench) -> None:
    engine = bench.start()
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=40), spec(1, tokens=40)])
    run(engine, 15)
    engine.submit([spec(i, sampling=GREEDY, tokens=40, inherited=15, parent=TraceKey(1, 0)) for i in (2, 3)])
    engine.stop([TraceKey(1, 0)])
    steps = finish(engine)
    tokens = tokens_of(steps)
    assert admissions(steps) == {2: (15, 0), 3: (15, 0)}
    assert tokens[2] == tokens[3]
    bench.check_greedy(tokens[2])


def check_the_smallest_budget_is_the_one_that_is_named(bench: Bench) -> None:
    engine = bench.start(kv_budget_tokens=16)
    with pytest.raises(UserError, match="raise --kv-budget-tokens to") as refused:
        check_prompt(engine.info, 30)
    least = int(str(refused.value).rsplit(maxsplit=1)[1])
    with pytest.raises(UserError):
        check_prompt(bench.start(kv_budget_tokens=least - 16).info, 30)
    enough = bench.start(kv_budget_tokens=least)
    open_search(enough, prompt=(5,) * 30, stops=())
    enough.submit([spec(0, sampling=GREEDY, tokens=5)])
    assert len(tokens_of(finish(enough))[0]) == 5


CHECKS: dict[str, Callable[[Bench], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_") and check.__module__ == __name__
}


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=() if kind.is_core else pytest.mark.weekly) for name, kind in KINDS.items()]
)
def test_the_contract_holds_for_models_of_each_kind(kind, subtests, request):
    bench, passed = Bench(KINDS[kind]), []
    for name, check in CHECKS.items():
        with subtests.test(name):
            check(bench)
            passed.append(name)
    states = f"within {TOLERANCE:g}" if "states_are_those_of_transformers" in passed else "differ"
    how = "together" if bench.is_batched else "in turn" if bench.has_caches else "in turn, without a cache"
    row = [KINDS[kind].models, KINDS[kind].layers, f"{len(passed)} of {len(CHECKS)}", states,
           bench.again.get("last token", "?"), bench.again.get("earlier", "?"), how]  # fmt: skip
    page = PAGE.read_text(encoding="utf-8")
    found = {line.split(" | ")[0].removeprefix("| "): line for line in table_of(page)}
    assert set(found) == {kind.models for kind in KINDS.values()} or request.config.getoption("--renew")
    line = f"| {' | '.join(row)} |"
    if request.config.getoption("--renew"):
        rows = {name: found.get(name, "") for name in (kind.models for kind in KINDS.values())} | {row[0]: line}
        PAGE.write_text(renewed(page, {"kinds": lambda: "\n".join((table(COLUMNS, []), *filter(None, rows.values())))}))
    else:
        assert found[row[0]] == line, "the table of docs/models.md differs: --all --renew writes it anew"


def table_of(page: str) -> list[str]:
    return page.partition("<!-- kinds: begin -->")[2].partition("<!-- kinds: end -->")[0].strip().splitlines()[2:]
