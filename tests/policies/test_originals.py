"""Decisions of DeepConf, Slim-SC and STEP against what their authors' public code decided on the same inputs."""

import json
import re

import numpy as np
import pytest
import torch

from gambit import events as ev
from gambit.engines.confidence import ConfidenceTracks, summarise
from gambit.engines.eviction import eviction_order, standing
from gambit.engines.sampling import token_confidence
from gambit.policies.base import (
    Discard,
    PoolView,
    Prune,
    ThoughtNeed,
    ThoughtSplit,
    ThoughtView,
    TraceView,
)
from gambit.policies.baselines import StepPruning
from gambit.policies.deepconf import DeepConf, DeepConfOptions, DeepConfState
from gambit.policies.slim_sc import SlimSc, SlimScOptions, SlimScState, ThoughtReader, redundancy
from gambit.results.vote import VoteKind, ballots_of, count_votes
from gambit.scorers.base import ScorerInfo
from gambit.scorers.mlp import TENSORS, MlpScorer
from gambit.text.boundary import boundary_rule
from gambit.training.networks import Batch, bce, recipe_for
from gambit.tree import TraceState, TraceTree
from gambit.types import Aggregation, EndReason, OnPressure, PressureAction, StopRule
from support import GOLDEN
from support.searching import finished_view
from support.tables import table

FOLDER = GOLDEN / "originals"
DEEPCONF, SLIM_SC, STEP = (
    json.loads((FOLDER / f"{name}.json").read_text()) for name in ("deepconf", "slim_sc", "step")
)


def cases(original, part):
    return table("case", original[part])


def voted(kind, answers, *, scores=None, lengths=None, confidences=None):
    """Finished traces, and the answer that wins."""
    tree = TraceTree(99, Aggregation.MEAN)
    for i, answer in enumerate(answers):
        tree.apply(ev.Created(0, i))
        tree.apply(ev.Admitted(0, i, 0, 0, 0))
        if scores:
            tree.apply(ev.Scored(0, (i,), (scores[i],), (1,)))
        length, confidence = lengths[i] if lengths else 1, confidences[i] if confidences else None
        tree.apply(ev.Finished(0, i, EndReason.STOP, answer, (0,) * length, confidence))
    return count_votes(ballots_of(tree, kind), kind, lambda a, b: a == b).answer


# -- DeepConf --------------------------------------------------------------------------------------------------


@cases(DEEPCONF, "logits")
def test_deepconf_confidence_of_a_token(case):
    assert token_confidence(torch.tensor([case["logits"]])).item() == pytest.approx(case["confidence"], rel=1e-5)


@cases(DEEPCONF, "stops")
def test_deepconf_stops_after_the_same_token(case):
    tracks = ConfidenceTracks()
    tracks.add(0, case["window"], StopRule(case["window"], case["threshold"]))
    stops = (n for n, value in enumerate(case["confidences"], 1) if tracks.fold([0], np.array([value], np.float32)))
    assert next(stops, None) == case["stops_after"]


@cases(DEEPCONF, "measures")
def test_deepconf_measures_of_a_trace(case):
    found = summarise(np.array(case["confidences"], np.float32), case["window"])
    for name in ("mean", "tail", "bottom", "lowest"):
        assert getattr(found, name) == pytest.approx(case[name], rel=1e-6), name


@cases(DEEPCONF, "online")
def test_deepconf_threshold_voters_weights_and_answer(case):
    measured = [summarise(np.array(each, np.float32), case["window"]) for each in case["confidences"]]
    finished = tuple(finished_view(i, a, confidence=measured[i]) for i, a in enumerate(case["answers"]))
    # Their option is the share that is kept, ours the percentile that must be reached.
    options = DeepConfOptions(
        warmup_traces=case["warmup_traces"], window_tokens=5, percentile=100 - case["confidence_percentile"]
    )
    policy = DeepConf(len(finished), 99, options)
    state, first = policy.decide(DeepConfState(), PoolView(0, (), 0, finished[: case["warmup_traces"]]))
    _, later = policy.decide(state, PoolView(1, (), len(finished), finished))
    assert state.threshold == pytest.approx(case["threshold"], rel=1e-4)
    dropped = {each.trace for each in first + later if isinstance(each, Discard)}
    voters = [trace for trace in finished if trace.id not in dropped and trace.answer is not None]
    assert [trace.id for trace in voters] == case["voters"]
    assert [measured[trace.id].lowest for trace in voters] == pytest.approx(case["weights"], rel=1e-6)
    kept = [measured[trace.id] for trace in voters]
    assert voted(VoteKind.LOWEST_CONFIDENCE, [v.answer for v in voters], confidences=kept) == case["winner"]


@cases(DEEPCONF, "votes")
def test_deepconf_offline_votes(case):
    measured = [summarise(np.array(each, np.float32), case["window"]) for each in case["confidences"]]
    won = {kind: voted(VoteKind(kind), case["answers"], confidences=measured) for kind in case["winners"]}
    assert won == case["winners"]


# -- Slim-SC ---------------------------------------------------------------------------------------------------


def words(text):
    """Tokens for theirs and ours: a word, or one sign, with the blanks before it."""
    return re.findall(r"\s*(?:[^\W_]+|[^\w\s]|_)", text)


class Embedded:
    """Remembers the texts that it was to embed."""

    def __init__(self):
        self.texts = []

    def __call__(self, texts):
        self.texts += texts
        return [(1.0,)] * len(texts)


def slim_reader(tokens):
    """Their thoughts of at least 6 tokens."""
    embed = Embedded()
    return ThoughtReader(
        ThoughtNeed(ThoughtSplit.MARKERS, 6, "any"), lambda _, start: tokens[start:], "".join, embed
    ), embed


@cases(SLIM_SC, "thoughts")
def test_slim_sc_thoughts_of_a_text(case):
    reader, embed = slim_reader(words(case["text"]))
    reader.collect([0])
    assert embed.texts == case["thoughts"]


@cases(SLIM_SC, "streamed")
def test_slim_sc_thoughts_of_a_text_that_comes_in_two_pieces(case):
    tokens = words(case["pieces"][0])
    reader, embed = slim_reader(tokens)
    reader.collect([0])
    assert embed.texts == case["thoughts"][0]
    tokens += words(case["pieces"][1])
    reader.collect([0])
    assert embed.texts == case["thoughts"][0] + case["thoughts"][1]


def unit(vector):
    return np.array(vector) / np.linalg.norm(vector)


@cases(SLIM_SC, "redundancy")
def test_slim_sc_redundancy_of_a_trace(case):
    assert redundancy(np.array([unit(v) for v in case["thoughts"]])) == pytest.approx(case["redundancy"], abs=1e-6)


@cases(SLIM_SC, "rounds")
def test_slim_sc_prunes_the_same_trace(case):
    """Theirs tests a trace from its 22nd thought on: a thought stands for a token here, and the delay is 21."""
    traces = tuple(TraceView(i, TraceState.RUNNING, None, 0, 9, 9, 0, True) for i in range(len(case["before"])))
    policy = SlimSc(len(traces), len(traces), 0, SlimScOptions(threshold=case["threshold"], delay_tokens=21))
    state, gone = SlimScState(threshold=case["threshold"]), []
    for new, said in ((case["before"], [0] * 9), (case["new"], [len(each) for each in case["before"]])):
        thoughts = (ThoughtView(t, said[t] + n, tuple(unit(v))) for t in range(len(new)) for n, v in enumerate(new[t]))
        state, decisions = policy.decide(state, PoolView(0, traces, len(traces), (), tuple(thoughts)))
        gone += [each.trace for each in decisions if isinstance(each, Prune)]
    assert gone == case["pruned"]


@cases(SLIM_SC, "votes")
def test_slim_sc_majority_and_its_tie_break(case):
    assert voted(VoteKind.CONCISE, case["answers"], lengths=case["tokens"]) == case["winner"]


# -- STEP ------------------------------------------------------------------------------------------------------


class Pieces:
    """A tokenizer whose ids stand for given texts."""

    def __init__(self, pieces):
        self.pieces = pieces

    def get_vocab(self):
        return {f"piece {i}": i for i in range(len(self.pieces))}

    def batch_decode(self, rows, **_):
        return [self.pieces[i] for (i,) in rows]

    def convert_tokens_to_ids(self, token):
        return None

    unk_token_id = None


@cases(STEP, "boundary")
def test_step_boundary_tokens(case):
    assert sorted(boundary_rule(Pieces(case["pieces"])).blank_line) == case["ids"]


@cases(STEP, "scorer")
def test_step_scores_and_loss(case):
    weights = tuple(torch.tensor(case["weights_in_64ths"][name], dtype=torch.float32) / 64 for name in TENSORS)
    info = ScorerInfo("mlp", hidden_size=4)
    logits = MlpScorer(info, weights).logits(torch.tensor(case["states"]))
    assert logits.sigmoid().tolist() == pytest.approx(case["scores"], rel=1e-5)
    assert recipe_for("bce", "mlp").is_balanced
    for each in STEP["losses"]:
        labels = torch.tensor(each["labels"], dtype=torch.bool)
        ones = torch.ones(len(labels), dtype=torch.long)
        balance = (~labels).sum() / labels.sum()
        batch = Batch(logits[:, None], ones, labels[:, None].float(), ones, Aggregation.MEAN, balance)
        assert bce(batch).item() == pytest.approx(each["loss"], rel=1e-5)


@cases(STEP, "victims")
def test_step_gives_up_traces_in_the_same_order(case):
    [start] = StepPruning(9, 9).decide(None, PoolView(0, (), 0))[1]
    assert start.on_pressure == OnPressure(PressureAction.PRUNE, unscored_first=True)
    standings = [standing(start.on_pressure, 0, score, i, i) for i, score in enumerate(case["scores"])]
    assert eviction_order(range(len(standings)), standings.__getitem__, {0: len(standings)}) == case["order"]


@cases(STEP, "votes")
def test_step_vote_by_score(case):
    assert voted(VoteKind.SCORE, case["answers"], scores=case["scores"]) == case["winner"]
