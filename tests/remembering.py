"""A sequence scorer for tests and what it must say: every score from one pass over the whole trace."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from engine_setups import PROMPT, RULE
from gambit import events as ev
from gambit.scorers.base import ScorerInfo
from gambit.scorers.sequence import SequenceNetwork, SequenceScorer, SequenceShape, sequence_info
from gambit.text.boundary import boundaries
from gambit.types import Aggregation, StatePosition
from tiny import tiny_model

EVERYWHERE = replace(RULE, think_end=None)  # thoughts are found to the end of a trace


def make_sequence(features=6, seed=0, **changes):
    shape = SequenceShape(features, **{"width": 16, "layers": 2, "heads": 2, **changes})
    torch.manual_seed(seed)
    return SequenceScorer(sequence_info(shape), SequenceNetwork(shape)).to(torch.device("cpu"))


@functools.cache
def sequence_scorer(position=StatePosition.BOUNDARY, max_steps=1024, aggregation=Aggregation.LAST):
    """Random, with attention that is sharp enough for the history to matter."""
    scorer = make_sequence(32, seed=4, max_steps=max_steps)
    with torch.no_grad():
        for parameter in scorer.network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
    info = ScorerInfo("sequence", state_position=position, hidden_size=32, aggregation=aggregation)
    return SequenceScorer(info, scorer.network)


@functools.cache
def expected_scores(scorer, tokens, rule=EVERYWHERE):
    """Length at each boundary -> the score, from one pass of transformers and one of the network."""
    with torch.inference_mode():
        states = tiny_model().model(input_ids=torch.tensor([[*PROMPT, *tokens]])).last_hidden_state[0]
        shift = 0 if scorer.info.state_position is StatePosition.BOUNDARY else -1
        ends = boundaries(rule, tokens)[0]
        at = [len(PROMPT) + end + shift for end in ends]
        scores = scorer.network(states[at][None])[0].sigmoid().tolist()
    return {end + 1: score for end, score in zip(ends, scores, strict=True)}


def check_scores(scorer, scored, tokens, rule=EVERYWHERE):
    """`scored`: trace -> {length: score}. Gives how far off a scorer without memory would be at most."""
    apart = []
    for trace, scores in scored.items():
        expected = expected_scores(scorer, tuple(tokens[trace]), rule)
        ends = list(expected)
        if ends and ends[-1] == len(tokens[trace]) and ends[-1] not in scores:
            assert scorer.info.state_position is StatePosition.BOUNDARY
            ends.pop()  # its last token was never fed
        assert list(scores) == ends, trace
        assert all(abs(expected[end] - scores[end]) < 1e-4 for end in ends), trace
        apart += [abs(expected[end] - expected[ends[0]]) for end in ends]
    return max(apart)


def check_search(scorer, watched, rule=EVERYWHERE):
    """`check_scores` for everything in the log of a search."""
    tree, scored = watched.search.record.tree, {}
    for event in watched.events:
        if isinstance(event, ev.Created):
            scored[event.trace] = {}
        elif isinstance(event, ev.Branched):
            scored[event.trace] = dict(scored[event.parent])
        elif isinstance(event, ev.Scored):
            for trace, score, length in zip(event.traces, event.scores, event.num_tokens, strict=True):
                scored[trace][length] = score
    return check_scores(scorer, scored, {trace.id: tree.tokens_of(trace.id) for trace in tree.traces}, rule)
