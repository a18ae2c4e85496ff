"""Continuing from a prefix: the rest of a trace is what the trace would have said, on every engine."""

import itertools
import warnings

import pytest
import torch

from gambit import SearchConfig, Solver
from gambit import events as ev
from gambit.engines.base import SearchSpec
from gambit.errors import UserError
from gambit.text.boundary import THINKING, boundaries, continued
from gambit.types import Problem, TraceKey
from support.engine_setups import ENGINES, GREEDY, PROMPT, RULE, finish, spec, starting, tokens_of
from support.tiny import SPECIAL, tiny_model, tiny_tokenizer

BLANK, NEWLINE, LETTER, THINK_END = (
    tiny_tokenizer().convert_tokens_to_ids(token) for token in ("\n\n", "\n", "a", "</think>")
)
WHOLE = SearchConfig(policy="single", temperature=0, max_new_tokens=60)


@pytest.mark.parametrize(
    ("prefix", "first"),
    [
        ([LETTER, NEWLINE], NEWLINE),  # the second half of a blank line
        ([LETTER, BLANK], BLANK),  # more of the same blank line
        ([LETTER, THINK_END], BLANK),  # the think block is closed
    ],
)
def test_the_detector_goes_on_where_the_prefix_ends(prefix, first):
    rest = [first, LETTER, BLANK]
    ends, _ = boundaries(RULE, [*prefix, *rest])
    found, _ = boundaries(continued(RULE, prefix), rest)
    assert found == [end - len(prefix) for end in ends if end >= len(prefix)]
    assert continued(RULE, ()).start == THINKING


@pytest.fixture(params=ENGINES)
def start(request):
    with starting(request.param) as (begin, _):
        yield begin


def doubly_blank():
    """A prefix that ends with a blank line, which the model continues with another: no thought of its own."""
    pieces = range(len(SPECIAL), len(tiny_tokenizer()))
    prefixes = [(*pair, BLANK) for pair in itertools.product(pieces, repeat=2)]
    with torch.inference_mode():
        logits = tiny_model()(input_ids=torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])).logits
    following = logits[:, -1].argmax(-1).tolist()
    return next(prefix for prefix, token in zip(prefixes, following, strict=True) if token in RULE.blank_line)


def test_an_engine_ends_thoughts_as_in_the_whole_trace(start):
    engine, prefix = start(), doubly_blank()
    engine.open(SearchSpec(1, (*PROMPT, *prefix), continued(RULE, prefix), frozenset()))
    engine.submit([spec(0, sampling=GREEDY, tokens=40)])
    steps = [engine.step().searches[1] for _ in range(2)]
    engine.submit([spec(1, sampling=GREEDY, tokens=40, inherited=1, parent=TraceKey(1, 0))])
    steps += finish(engine)
    tokens = tokens_of(steps)
    ends, _ = boundaries(RULE, [*prefix, *tokens[0]])
    lengths = [end + 1 - len(prefix) for end in ends if len(prefix) <= end < 40]
    assert tokens[1] == tokens[0] and lengths and 1 not in lengths
    for trace in (0, 1):
        scored = [score.num_tokens for step in steps for score in step.scored if score.trace == trace]
        assert [length for length in scored if length < 39] == lengths


def test_a_closed_think_block_stays_closed(start):
    engine = start()
    engine.open(SearchSpec(1, (*PROMPT, THINK_END), continued(RULE, (THINK_END,)), frozenset()))
    engine.submit([spec(0, sampling=GREEDY, tokens=30)])
    first = engine.step()
    assert not any(progress.is_thinking for progress in engine.progress(1).values())
    assert not any(step.scored for step in [first.searches[1], *finish(engine)])


@pytest.fixture(scope="module")
def solver(tiny_folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Solver(str(tiny_folder), device="cpu") as made:
            yield made


def finished(solver, problem, config=WHOLE, texts=None):
    """The traces of a search, and its header."""
    events = []
    keep = None if texts is None else lambda text: texts.append(text)
    solver.solve(problem, config, on_event=events.append, extractor=keep)
    return [event.tokens for event in events if isinstance(event, ev.Finished)], events[0]


def test_a_greedy_continuation_is_the_rest_of_the_trace(solver):
    [[whole]] = [finished(solver, "a=1+2")[0]]
    whole_texts, texts = [], []
    finished(solver, "a=1+2", texts=whole_texts)
    tokens, started = finished(solver, Problem("a=1+2", prefix_tokens=whole[:20]), texts=texts)
    assert tokens == [whole[20:]] and len(whole) == 60, "what is left of the longest answer"
    assert started.prompt_tokens[-20:] == whole[:20]
    assert texts == whole_texts, "an answer is read in the whole text"


def test_continuations_are_drawn_anew_for_every_problem_and_the_same_each_time(solver):
    config = SearchConfig(policy="sc", capacity=3, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=40)
    prefix = finished(solver, "a=1+2", config)[0][0][:8]
    first, again, other = (
        finished(solver, Problem("a=1+2", id=name, prefix_tokens=prefix), config)[0] for name in ("p.0", "p.0", "p.1")
    )
    assert first == again and set(first).isdisjoint(other) and len(set(first)) == 3


@pytest.mark.parametrize("own_noise", [False, True])
def test_problems_share_their_random_numbers_unless_each_has_its_own(solver, own_noise):
    config = SearchConfig(policy="sc", capacity=3, temperature=1.0, max_new_tokens=20, own_noise=own_noise)
    first, again, other = (finished(solver, Problem("a=1+2", id=name), config)[0] for name in ("p", "p", "q"))
    assert first == again and (first == other) is not own_noise


def test_a_prefix_that_leaves_nothing_is_refused(solver):
    with pytest.raises(UserError, match="a prefix of 60 tokens leaves nothing of an answer of at most 60"):
        solver.solve(Problem("a=1+2", prefix_tokens=(LETTER,) * 60), WHOLE)
