"""A verifier of one's own: it learns what the text tells, gives the same numbers anywhere, is served as a model."""

import dataclasses
import json
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from gambit.config.options import SearchConfig
from gambit.errors import GambitWarning, UserError
from gambit.pawn import Level, Split, generate
from gambit.solver import Solver
from gambit.training.dataset import Division, Part
from gambit.training.networks import ranking_loss
from gambit.training.verifier import kernels
from gambit.training.verifier.batches import (
    PackedRow,
    ProblemOrder,
    TrainingPass,
    labels_of,
    lengths_of,
    load_passages,
    made_ahead,
    passage_of,
    read_traces,
)
from gambit.training.verifier.kernels import use_fused_layers, use_packing
from gambit.training.verifier.recipe import VerifierPlan, VerifierRecipe, continued
from gambit.training.verifier.train import best_look, drawn_problems, passages_of, share_of_rate, train_verifier
from gambit.types import Aggregation, StopReason
from gambit.verifiers.families import own_info
from gambit.verifiers.lora import LoraVerifier, Passage, by_length, export, info_for
from gambit.verifiers.lora_folder import Platt, read_info
from support.verifiers import BAD, BREAK, EOS, GOOD, HIDDEN, NUM_THOUGHTS, save_qwen2, scorer, told_traces

pytestmark = pytest.mark.contract
CPU = torch.device("cpu")
RECIPE = VerifierRecipe(rank=4, rate=1e-2, head_rate=1e-1, epochs=6, update_tokens=800)
DIVISION = Division(0.2, 0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_qwen2(tmp_path_factory.mktemp("qwen2") / "qwen2-tiny")


@pytest.fixture(scope="module")
def collection(tmp_path_factory, model):
    return told_traces(tmp_path_factory.mktemp("told"), model, 60)


@pytest.fixture(scope="module")
def trained(collection, model):
    told = []
    found = train_verifier(VerifierPlan(collection, str(model), RECIPE, DIVISION, device="cpu"), say=told.append)
    return found, told


@pytest.fixture(scope="module")
def checkpoint(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifier")
    trained[0].save(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(checkpoint, model):
    return LoraVerifier.load(checkpoint, CPU, str(model))


def some_passages(seed=0, count=7):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 30, size=count)
    return [Passage(rng.integers(0, 30, size=n), np.array([1, n // 2, n - 1])) for n in lengths]


# -- what it learns --------------------------------------------------------------------------------------------


def test_it_learns_what_a_thought_tells_and_when(trained, collection, loaded):
    """Judged on problems that it was neither trained nor chosen on."""
    data = load_passages(collection)
    judged = data.of_part(DIVISION, Part.TEST)
    read = read_traces(loaded, data, judged)
    aucs = [np.nanmean(each) for each in read.quarter_aucs(judged, Aggregation.LAST)]
    assert aucs[2] > 0.95 and aucs[3] > 0.9, "the third thought tells"
    assert 0.25 < aucs[0] < 0.75 and 0.25 < aucs[1] < 0.75, "what comes before it tells nothing"
    metrics = trained[0].info.metrics
    trust = trained[0].info.trust
    as_searched = read.quarter_aucs(judged, loaded.info.aggregation)
    assert trust.auc == pytest.approx([np.nanmean(each) for each in as_searched]), "by problems it was not chosen by"
    assert trust.num_problems == np.isfinite(as_searched[0]).sum() > 0
    assert trust.median_tokens == np.median(data.traces.num_tokens[judged])
    assert metrics["auc"]["0.75"] > 0.95 and metrics["held_out_auc"] == max(metrics["by_aggregation"].values())


def test_its_probabilities_are_calibrated(collection, loaded):
    data = load_passages(collection)
    judged = data.of_part(DIVISION, Part.TEST)
    read = read_traces(loaded, data, judged)
    early, late = (read.chances(judged, share, Aggregation.LAST, loaded.info.calibration) for share in (0.25, 1.0))
    right = data.traces.is_correct[judged]
    assert late[right].mean() > 0.75 and late[~right].mean() < 0.25
    assert abs(early.mean() - right.mean()) < 0.2, "without knowledge: the share of right traces"


def test_its_labels_may_come_from_a_file(tmp_path, model):
    folder = told_traces(tmp_path / "c", model, 20)
    labels = tmp_path / "labels.jsonl"
    recipe = dataclasses.replace(RECIPE, epochs=1)
    plan = VerifierPlan(folder, str(model), recipe, DIVISION, str(labels), "cpu")
    labels.write_text(json.dumps({"problem": "0-0", "trace": 0, "labels": [0.5] * (NUM_THOUGHTS - 1) + [0]}) + "\n")
    assert train_verifier(plan).info.training["labels"] == "labels.jsonl"
    data = passages_of(plan)
    assert labels_of(data, 0).tolist() == [0.5] * (NUM_THOUGHTS - 1) + [0, 1], "the outcome at the end"
    assert labels_of(data, 1).tolist() == [0.0] * (NUM_THOUGHTS + 1), "a trace without labels has its outcome"


def test_labels_rank_traces_with_the_same_outcome(tmp_path, model):
    """Of two wrong traces the one that was nearer to being right is to be above the other."""
    folder = told_traces(tmp_path / "c", model, 6)
    labels = tmp_path / "labels.jsonl"
    lines = [
        {"problem": "0-0", "trace": trace, "labels": [label] * NUM_THOUGHTS} for trace, label in ((1, 0.75), (3, 0))
    ]
    labels.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = passages_of(VerifierPlan(folder, str(model), labels=str(labels)))
    verifier = LoraVerifier.fresh(str(model), info_for(str(model), rank=2), CPU)
    use_packing(verifier)
    batch = TrainingPass.of([np.array([1, 3])], data).batch(verifier)
    logits = torch.zeros_like(batch.logits).requires_grad_()
    ranking_loss(dataclasses.replace(batch, logits=logits)).backward()
    assert (logits.grad[0] <= 0).all() and (logits.grad[1] >= 0).all() and logits.grad[0].min() < 0


# -- going on from an adapter ----------------------------------------------------------------------------------


def test_a_training_goes_on_from_an_adapter(checkpoint, loaded, collection, model):
    """It begins with what was learnt, and keeps it where more training does not help."""
    told = []
    recipe = dataclasses.replace(RECIPE, epochs=1, rate=0.0, head_rate=0.0)
    plan = VerifierPlan(collection, str(model), recipe, DIVISION, device="cpu", start=checkpoint)
    plan = dataclasses.replace(plan, recipe=continued(recipe, checkpoint, frozenset()))
    again = train_verifier(plan, say=told.append)
    for one, other in zip(again.logits(some_passages()), loaded.logits(some_passages()), strict=True):
        assert np.allclose(one, other, atol=1e-3)
    made = again.info.training
    assert "AUC within" in told[2] and len(made["watched_auc"]) > 2, "ranked before the first step"
    read = made["watched_after_problems"]
    assert read[0] == 0 and read == sorted(read) and len(read) == len(made["watched_auc"])
    assert read[-1] == int(told[1].split()[0]), "one epoch reads every problem once"
    assert made["start"]["updates"] == read_info(checkpoint).training["updates"]


@pytest.mark.parametrize(
    ("changes", "division", "message"),
    [
        ({"rank": 2}, DIVISION, "has rank 4, this training has 2"),
        ({"rank": 4}, Division(0.3, 0.2), "judged by problems that it was trained on"),
        ({"rank": 4}, Division(0.2, 0.2, seed=1), "judged by problems that it was trained on"),
    ],
)
def test_what_does_not_fit_the_adapter_is_refused(checkpoint, collection, model, changes, division, message):
    recipe = dataclasses.replace(RECIPE, epochs=1, **changes)
    with pytest.raises(UserError, match=message):
        train_verifier(VerifierPlan(collection, str(model), recipe, division, device="cpu", start=checkpoint))


def test_an_adapter_of_another_model_is_refused(checkpoint, model, tmp_path):
    other = save_qwen2(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="an adapter fits its own model only"):
        folder = told_traces(tmp_path / "c", other, 6)
        train_verifier(VerifierPlan(folder, str(other), RECIPE, DIVISION, device="cpu", start=checkpoint))


def test_fewer_problems_may_be_held_out_than_before(checkpoint, collection, model, tmp_path):
    code, said, error = scorer(
        "train", "--architecture", "verifier", "--data", collection, "--model", model, "--out", tmp_path / "v",
        "--start", f"verifier:{checkpoint}", "--epochs", "1", "--batch-tokens", "800", "--test", "0.1",
        "--device", "cpu", "--json",
    )  # fmt: skip
    assert code == 0, error
    made = json.loads(said)
    assert made["rank"] == 4 and made["training"]["division"] == {"validation": 0.2, "test": 0.1, "seed": 0}
    code, _, error = scorer("train", "--data", collection, "--out", tmp_path / "s.safetensors", "--start", checkpoint)
    assert code == 2 and "--start is for verifiers" in error


def test_other_weights_than_those_that_wrote_the_traces_are_refused(collection, tiny_folder):
    with pytest.raises(UserError, match="give the model that wrote the traces"):
        train_verifier(VerifierPlan(collection, str(tiny_folder), RECIPE, DIVISION, device="cpu"))


def test_a_time_limit_ends_it_with_a_rate_of_zero(collection, model, monkeypatch):
    """Every look at the clock takes a second."""
    now = iter(range(10**9))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    told = []
    recipe = dataclasses.replace(RECIPE, epochs=1000, seconds=60.0)
    found = train_verifier(VerifierPlan(collection, str(model), recipe, DIVISION, device="cpu"), say=told.append)
    assert 60 <= found.info.training["seconds"] < 90 and found.info.training["updates"] < 30
    assert any("tokens/s" in line and "s left" in line for line in told)


def test_a_learning_curve_is_of_one_drawing(collection):
    data = load_passages(collection)
    train = data.of_part(DIVISION, Part.TRAIN)
    few, more = (
        set(drawn_problems(train, data, dataclasses.replace(RECIPE, num_problems=count)).tolist()) for count in (5, 10)
    )
    assert len(few) == 30 and few < more and len(more) == 60
    assert drawn_problems(train, data, RECIPE).tolist() == train.tolist()


def test_the_rate_rises_and_falls():
    assert share_of_rate(0.05, 0.1) == 0.5 and share_of_rate(0.1, 0.1) == 1 and share_of_rate(1.0, 0.1) == 0
    assert share_of_rate(0.0, 0.0) == 1


def test_an_earlier_look_is_taken_only_if_it_is_clearly_better():
    last = np.array([0.5, 0.6, 0.7, np.nan])
    assert best_look([last + 0.2, last]) == 0
    assert best_look([last + np.array([0.3, -0.2, 0, 0]), last]) == 1
    assert best_look([]) is None


def test_activations_can_be_computed_again_instead_of_kept(collection, model):
    recipe = dataclasses.replace(RECIPE, epochs=1, recomputes=True)
    plain = dataclasses.replace(recipe, recomputes=False)
    losses = []
    for each in (recipe, plain):
        found = train_verifier(VerifierPlan(collection, str(model), each, DIVISION, device="cpu"))
        losses.append(found.info.metrics["held_out_auc"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


# -- what it reads ---------------------------------------------------------------------------------------------


def test_a_passage_is_prompt_and_trace_read_at_thoughts_and_before_the_stop_token(collection):
    data = load_passages(collection)
    for trace in (0, 3, 8):
        passage = passage_of(data, trace)
        assert len(passage.tokens) == lengths_of(data)[trace] and len(passage.places) == NUM_THOUGHTS + 1
        assert set(passage.tokens[passage.places[:-1]].tolist()) == {BREAK}
        assert passage.tokens[passage.places[-1] + 1 :].tolist() == [EOS]
        mark = passage.tokens[passage.places[1] + 1]
        assert mark == (GOOD if data.traces.is_correct[trace] else BAD)
        labels = labels_of(data, trace)
        assert labels.tolist() == [float(data.traces.is_correct[trace])] * (NUM_THOUGHTS + 1)


def test_batches_hold_right_and_wrong_traces_of_whole_problems(collection):
    data = load_passages(collection)
    known, sizes = data.traces, {"update_tokens": 400, "pass_tokens": 250, "traces_per_problem": 4}
    order = ProblemOrder(data, data.all_traces(), np.random.default_rng(0), **sizes)
    seen = []
    for step in order.epoch():
        for problems in step:
            assert sum(lengths_of(data)[each].sum() for each in problems) <= 250
            for traces in problems:
                assert len(set(known.problem_of[traces])) == 1
                seen.append(known.problem_of[traces[0]])
                is_mixed = seen[-1] % 6 != 5
                assert known.is_correct[traces].sum() == (2 if is_mixed else 0)
                assert len(traces) == (4 if is_mixed else 2)
    assert sorted(seen) == list(range(60))


def test_a_problem_too_long_for_a_pass_keeps_a_right_and_a_wrong_trace(collection):
    data = load_passages(collection)
    sizes = {"update_tokens": 1, "pass_tokens": 10, "traces_per_problem": 6}
    order = ProblemOrder(data, np.arange(6), np.random.default_rng(0), **sizes)
    ((traces,),) = next(order.epoch())
    assert len(traces) == 2 and data.traces.is_correct[traces].sum() == 1


def test_groups_are_of_like_length():
    assert list(by_length([5, 1, 4, 2, 9], 8)) == [[1, 3], [2], [0], [4]]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_packed_pass_is_what_each_sequence_gives_by_itself(model, tiny_folder, family):
    """Logits and gradients, with sequences of one token up to thirty."""
    name = str(model if family == "qwen2" else tiny_folder)
    passages = [*some_passages(3), Passage(np.array([7]), np.array([0]))]
    gradients = []
    for is_packed in (False, True):
        torch.manual_seed(0)
        verifier = LoraVerifier.fresh(name, info_for(name, rank=2), CPU)
        torch.nn.init.normal_(verifier.head.weight)
        for kind, each in verifier.network.named_parameters():
            if "lora_B" in kind:  # zeros in a new adapter: what the other half gets would be zero too
                torch.nn.init.normal_(each, std=0.1)
        if is_packed:
            use_packing(verifier)
            use_fused_layers(verifier.network)
            found = PackedRow.of(passages).logits(verifier)
        else:
            found = torch.cat([verifier.picked_logits([each]) for each in passages])
        found.square().sum().backward()
        trained = [each.grad for each in verifier.network.parameters() if each.requires_grad]
        gradients.append((found.detach(), torch.cat([each.flatten() for each in trained])))
        if is_packed:
            assert np.allclose(np.concatenate(verifier.logits(passages)), gradients[0][0], atol=1e-4), "rows as before"
    for plain, packed in zip(*gradients, strict=True):
        assert torch.allclose(plain, packed, atol=1e-4, rtol=1e-3) and plain.abs().max() > 0.1


def test_passes_are_made_on_a_thread_that_ends_with_them():
    assert list(made_ahead(iter(range(10)), depth=2)) == list(range(10))
    endless = made_ahead(iter(int, 1), depth=2)
    assert next(endless) == 0
    endless.close()
    assert not any(thread.name.startswith("gambit-passes") for thread in threading.enumerate())

    def failing():
        yield 1
        raise UserError("no more")

    with pytest.raises(UserError, match="no more"):
        list(made_ahead(failing()))


def test_a_pass_holds_each_logit_and_label_at_its_thought(collection, model):
    data = load_passages(collection)
    verifier = LoraVerifier.fresh(str(model), info_for(str(model), rank=2), CPU)
    torch.nn.init.normal_(verifier.head.weight)
    use_packing(verifier)
    made = TrainingPass.of([np.array([0, 1]), np.array([6, 7, 8])], data)
    batch = made.batch(verifier)
    assert made.num_tokens == lengths_of(data)[[0, 1, 6, 7, 8]].sum()
    assert batch.problem.tolist() == [0, 0, 1, 1, 1] and batch.num_thoughts.tolist() == [NUM_THOUGHTS + 1] * 5
    assert batch.labels[:, 0].tolist() == batch.labels[:, -1].tolist() == [1, 0, 1, 0, 1]
    plain = verifier.logits([passage_of(data, trace) for trace in (0, 1, 6, 7, 8)])
    assert np.allclose(batch.logits.detach().numpy(), np.stack(plain), atol=1e-4)


@pytest.mark.parametrize(("free_tokens", "pass_tokens", "recomputes"), [(40_000, 32_768, False), (9_000, 32_768, True),
                                                                       (14_000, 11_264, False)])  # fmt: skip
def test_how_much_a_pass_holds_follows_from_the_memory(monkeypatch, free_tokens, pass_tokens, recomputes):
    """2 MiB a token, a sixteenth of it where activations are computed again."""
    recomputing: list[object] = []
    fixed = {"synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "memory_allocated": 0,
             "mem_get_info": (free_tokens << 21, 0)}  # fmt: skip
    for name, value in fixed.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 4_096 << (17 if recomputing else 21))
    monkeypatch.setattr(kernels, "recompute", recomputing.append)
    said: list[str] = []
    fitted = kernels.fit_to_memory(SimpleNamespace(device=CPU), lambda: None, 4_096, 32_768, None, said.append)
    assert fitted == pass_tokens and len(recomputing) == recomputes
    assert said[0].endswith(f"{pass_tokens:,} tokens a pass, activations are "
                            f"{'computed again on the way back' if recomputes else 'kept'}")  # fmt: skip


# -- its numbers -----------------------------------------------------------------------------------------------


def test_a_logit_depends_on_what_was_read_by_then_alone(loaded):
    passages = some_passages()
    together = loaded.logits(passages)
    for passage, found in zip(passages, together, strict=True):
        assert np.allclose(loaded.logits([passage])[0], found, atol=1e-4)
        cut = Passage(passage.tokens[: passage.places[1] + 1], passage.places[:2])
        assert np.allclose(loaded.logits([cut])[0], found[:2], atol=1e-4)
    assert np.ptp(np.concatenate(together)) > 0.1


def test_what_is_loaded_is_what_was_trained(trained, loaded):
    passages = some_passages(1)
    for one, other in zip(trained[0].logits(passages), loaded.logits(passages), strict=True):
        assert np.allclose(one, other, atol=1e-3)


def test_an_export_is_a_sequence_classifier_of_one_label(loaded, model, tmp_path):
    out = export(loaded, tmp_path / "merged", str(model))
    served = AutoModelForSequenceClassification.from_pretrained(out)
    assert type(served).__name__ == "Qwen2ForSequenceClassification" and served.config.num_labels == 1
    offset, calibration = read_info(out).calibration.offset, loaded.info.calibration
    for passage, logits in zip(some_passages(2), loaded.logits(some_passages(2)), strict=True):
        with torch.inference_mode():
            found = float(served(torch.from_numpy(passage.tokens)[None]).logits)
        assert found + offset == pytest.approx(calibration.slope * logits[-1] + calibration.offset, abs=2e-3)
    assert (out / "tokenizer.json").is_file()


def test_platt_is_a_probability():
    assert Platt().chances(np.zeros(1)) == 0.5 and Platt(slope=2, offset=-2).chances(np.ones(1)) == 0.5
    low, high = Platt(slope=1e6).chances(np.array([-1e6, 1e6]))
    assert 0 <= low < high <= 1


# -- its folder ------------------------------------------------------------------------------------------------


def test_weights_in_several_files_are_read_as_one(loaded, trained, model, tmp_path):
    whole = trained[0].save(tmp_path / "v")
    tensors = list(load_file(whole).items())
    whole.unlink()
    halves = dict(tensors[::2]), dict(tensors[1::2])
    paths = [tmp_path / "v" / f"weights-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for path, half in zip(paths, halves, strict=True):
        save_file(half, path)
    again = LoraVerifier.load(tmp_path / "v", CPU, str(model))
    assert np.allclose(again.logits(some_passages())[0], loaded.logits(some_passages())[0], atol=1e-5)
    paths[0].unlink()
    with pytest.raises(UserError, match="not as many as their names say"):
        LoraVerifier.load(tmp_path / "v", CPU, str(model))


def test_a_verifier_says_what_it_needs(checkpoint, model, tiny_folder, tmp_path):
    with pytest.raises(UserError, match=r"trained on qwen2-tiny: name its folder with --model"):
        LoraVerifier.load(checkpoint, CPU)
    with (
        pytest.warns(GambitWarning, match="was made for qwen2-tiny with weights"),
        pytest.raises(UserError, match="does not fit the model"),
    ):
        LoraVerifier.load(checkpoint, CPU, str(tiny_folder))
    with pytest.raises(UserError, match=r"verifier.json cannot be read"):
        LoraVerifier.load(tmp_path, CPU, str(model))
    (tmp_path / "verifier.json").write_text('{"rank": "many"}')
    with pytest.raises(UserError, match="not a verifier"):
        read_info(tmp_path)
    info = info_for(str(model), targets="nothing_proj")
    with pytest.raises(UserError, match="no layers of"):
        LoraVerifier.fresh(str(model), info, CPU)


def test_a_new_verifier_says_nothing(model):
    found = LoraVerifier.fresh(str(model), info_for(str(model), rank=2), CPU)
    assert found.head.weight.shape == (1, HIDDEN) and not np.concatenate(found.logits(some_passages())).any()


# -- the commands ----------------------------------------------------------------------------------------------


def test_from_a_collection_to_a_served_model_by_commands(collection, model, tmp_path):
    out = tmp_path / "v"
    code, said, error = scorer(
        "train", "--architecture", "verifier", "--data", collection, "--model", model, "--out", out, "--epochs", "2",
        "--seconds", "60", "--rank", "2", "--rate", "0.01", "--batch-tokens", "800", "--device", "cpu",
    )  # fmt: skip
    assert code == 0 and "held-out AUC within problems" in said and "problems to train on" in error
    code, said, error = scorer("eval", out, "confidence", "--data", collection, "--model", model, "--device", "cpu",
                               "--json")  # fmt: skip
    report = json.loads(said)
    names = [each["name"] for each in report["rankings"]]
    assert code == 0 and names[:2] == ["v", "confidence"] and report["num_problems"] < 20, "its test part"
    assert set(report["rankings"][0]["auc"]) >= {"0.25", "0.5", "0.75", "1"}
    code, _, error = scorer(
        "eval", f"verifier:{out}", "--data", collection, "--model", model, "--device", "cpu", "--write"
    )
    trust = read_info(out).trust
    assert code == 0 and trust.halfway == report["rankings"][0]["auc"]["0.5"]["value"], error
    code, said, _ = scorer("show", f"verifier:{out}")
    assert (
        code == 0
        and "base model" in said
        and "qwen2-tiny" in said
        and "trusted" in said
        and len(said.splitlines()) <= 10
    )
    code, said, error = scorer(
        "export", f"verifier:{out}", "--out", tmp_path / "merged", "--model", model, "--device", "cpu"
    )
    assert code == 0 and (tmp_path / "merged" / "model.safetensors").is_file(), error
    assert own_info(tmp_path / "merged").trust == trust


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "name it with --model"),
        (("--model", "MODEL", "--out", "v.safetensors"), "a verifier is a folder"),
        (("--model", "MODEL", "--labels", "guesses"), "unknown labels 'guesses'"),
        (("--model", "MODEL", "--targets", "nothing"), "no layers of"),
    ],
)
def test_a_mistake_is_one_sentence(collection, model, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    given = [str(model) if flag == "MODEL" else flag for flag in flags]
    out = () if "--out" in given else ("--out", "v")
    code, _, error = scorer(
        "train", "--architecture", "verifier", "--data", collection, "--device", "cpu", *out, *given
    )
    assert code == 2 and message in error, error


@pytest.mark.system
def test_pawn_from_puzzles_to_a_verifier(tmp_path):
    flags = ("--engine", "local", "--device", "cpu", "--traces", "4")
    code, said, error = scorer("collect", "--problems", "pawn:scorer", "--limit", "5", "--out", tmp_path / "c", *flags)
    assert code == 0, error
    recipe = ("--rank", "2", "--rate", "1e-3", "--epochs", "1", "--batch-tokens", "800", "--targets", "q_proj,v_proj")
    code, said, error = scorer("train", "--architecture", "verifier", "--model", "pawn", "--data", tmp_path / "c",
                               "--out", tmp_path / "v", "--validation", "0.4", "--test", "0", "--device", "cpu",
                               *recipe)  # fmt: skip
    assert code == 0, error
    code, said, error = scorer("eval", tmp_path / "v", "--data", tmp_path / "c", "--part", "all", "--device", "cpu")
    assert code == 0 and "token confidence" in said, error
    puzzle = next(generate(Split.TEST, 0, Level.EASY)).text
    for engine in ("local", *(["vllm"] if find_spec("vllm") else ())):
        name = str(tmp_path / "v") if engine == "local" else f"verifier:{tmp_path / 'v'}"  # the folder alone is enough
        with Solver("pawn", scorer=name, engine=engine, device="cpu") as solver:
            result = solver.solve(puzzle, SearchConfig(capacity=4, swap_size=1, check_interval=12, warmup_tokens=12))
        assert result.verifier.thoughts > 4 and result.stop_reason is StopReason.COMPLETED
