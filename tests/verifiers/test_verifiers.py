"""Verifiers of every family: what they are asked, what they say, and that each token is computed once."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from gambit.config.options import EngineConfig, MemoryPart
from gambit.errors import UserError
from gambit.types import Aggregation
from gambit.verifiers.families import FAMILIES, family_of
from gambit.verifiers.lora import LoraVerifier, Passage, info_for, merged_folder
from gambit.verifiers.names import parse_verifier
from gambit.verifiers.transformers import PrefixCache, start_local_verifier
from support.scripted import make_reading
from support.verifiers import (
    CLOSE,
    QUESTION,
    THOUGHTS,
    classifier,
    math_shepherd,
    own,
    qwen_prm,
    readings,
    rlhflow,
    save_qwen2,
    skywork,
)

MAKERS = {
    "qwen-prm": qwen_prm,
    "skywork": skywork,
    "math-shepherd": math_shepherd,
    "rlhflow": rlhflow,
    "classifier": lambda folder: classifier(folder, num_labels=1),
    "classifier of two": lambda folder: classifier(folder, num_labels=2),
    "gambit": own,
}
# A language model says nothing about what it was trained for, but its name does.
NAMES = {"math-shepherd": "math-shepherd-mistral-7b-prm", "rlhflow": "Llama3.1-8B-PRM-Deepseek-Data"}


@pytest.fixture(scope="module", params=MAKERS)
def family(request, tmp_path_factory):
    name = request.param.partition(" ")[0]
    folder = tmp_path_factory.mktemp("verifiers") / NAMES.get(name, "verifier")
    return name, MAKERS[request.param](folder)


def started(verifier, name=None, **options):
    named = f"{name}:" if name else ""
    return start_local_verifier(parse_verifier(f"verifier:{named}{verifier.folder}"), EngineConfig(**options), "cpu")


def test_scores_are_those_of_one_pass_over_everything(family):
    name, verifier = family
    reader = started(verifier, name)
    found = reader.read(readings())
    expected = verifier.scores(QUESTION, THOUGHTS)
    assert [each.score for each in found] == pytest.approx(expected, **CLOSE)
    assert max(expected) - min(expected) > 1e-3, "the model tells them apart"
    assert reader.info.format == name and reader.info.context_tokens == 1024


def test_every_token_is_computed_once(family):
    name, verifier = family
    reader = started(verifier, name)
    encoded = [reader._encode(reading) for reading in readings()]
    found = reader.read(readings())
    overlap = 0  # tokens at the end of a reading that the next one does not have: the end of a turn
    for before, after in pairwise(encoded):
        common = next((i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), len(before))
        overlap += len(before) - common
    assert overlap <= 2 * len(encoded) and sum(each.num_tokens for each in found) == len(encoded[-1]) + overlap
    again = reader.read(readings())
    assert [(each.score, each.num_tokens) for each in again] == [(each.score, 0) for each in found]
    branch = [*THOUGHTS[:2], "c=5.\n\n"]
    (other,) = reader.read(readings(branch)[-1:])
    assert other.num_tokens < 12 and other.score == pytest.approx(verifier.scores(QUESTION, branch)[-1], **CLOSE)


def test_a_verifier_is_recognised_by_its_files(family):
    name, verifier = family
    assert family_of(verifier.folder).name == name


def test_think_tags_and_empty_thoughts_are_no_steps(family):
    name, verifier = family
    if name == "gambit":
        return  # reads the generator's tokens as they are
    reader = started(verifier, name)
    dressed = ["<think>\n\n", f"<think>\n{THOUGHTS[0]}", THOUGHTS[1], f"</think>\n\n{THOUGHTS[2]}"]
    assert reader._encode(readings(dressed)[-1]) == reader._encode(readings()[-1])


def test_own_verifiers_say_how_their_scores_are_read(tmp_path):
    verifier = own(tmp_path / "own", offset=-2.0)
    reader = started(verifier)
    assert reader.info.aggregation is Aggregation.MEAN and reader.info.trust.halfway == 0.7
    assert [each.score for each in reader.read(readings())] == pytest.approx(
        verifier.scores(QUESTION, THOUGHTS), **CLOSE
    )
    assert started(verifier, verifier_aggregation="last").info.aggregation is Aggregation.LAST


def test_an_adapter_is_read_as_it_was_trained(tmp_path, monkeypatch):
    """Loaded on the generator's weights, and merged into a copy of them for engines that load whole models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(save_qwen2(tmp_path / "model"))
    info = info_for(model, rank=2, targets="q_proj,v_proj", calibration={"slope": 1.5, "offset": 0.3})
    made = LoraVerifier.fresh(model, info, torch.device("cpu"))
    torch.manual_seed(6)
    made.set_adapter({name: torch.randn_like(each) / 4 for name, each in made.adapter().items()})
    torch.nn.init.normal_(made.head.weight, std=2.0)
    made.save(tmp_path / "adapter")
    prompt, tokens = [7, 8, 9], [20, 21, 5, 22, 23, 24, 5]
    parts = [make_reading(prompt, tokens[:end], [end], ["x"]) for end in (3, 7)]
    passage = Passage(np.array([*prompt, *tokens]), np.array([5, 9]))
    expected = info.calibration.chances(made.logits([passage])[0]).tolist()
    name, config = parse_verifier(f"verifier:{tmp_path / 'adapter'}"), EngineConfig(model=model)
    assert [each.score for each in start_local_verifier(name, config, "cpu").read(parts)] == pytest.approx(expected)
    whole = merged_folder(tmp_path / "adapter", model)
    assert merged_folder(tmp_path / "adapter", "no/such/model") == whole, "made once"
    merged = start_local_verifier(parse_verifier(f"verifier:{whole}"), config, "cpu")
    assert [each.score for each in merged.read(parts)] == pytest.approx(expected) and merged.info.format == "gambit"


def test_a_reading_longer_than_the_context_has_no_score(tmp_path):
    verifier = own(tmp_path / "own")
    config = json.loads((verifier.folder / "config.json").read_text())
    (verifier.folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 50}))
    first, second, third = started(verifier).read(readings())
    assert first is not None and second is None and third is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            r"architecture Qwen2ForCausalLM is not known: name it, verifier:FO",
        ),
        ({"architectures": ["Qwen2ForProcessRewardModel"]}, r"its weights have no score\.0\.weight"),
    ],
)
def test_a_folder_that_is_no_verifier_is_refused(tmp_path, change, message):
    verifier = classifier(tmp_path / "one", num_labels=1)
    path = verifier.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        started(verifier)


def test_a_head_of_many_classes_is_refused(tmp_path):
    with pytest.raises(UserError, match="its head has 5 classes"):
        started(classifier(tmp_path / "five", num_labels=5))


def test_names_of_verifiers():
    assert parse_verifier("confidence") is None and parse_verifier("verifier:Qwen/Qwen2.5-Math-PRM-7B").family is None
    named = parse_verifier("verifier:math-shepherd:folder/model")
    assert (named.family, named.model, named.is_served) == ("math-shepherd", "folder/model", False)
    served = parse_verifier("verifier:qwen-prm:http://localhost:8000/pooling")
    assert (served.family, served.model, served.is_served) == ("qwen-prm", "http://localhost:8000/pooling", True)
    for wrong in ("verifier:", "verifier:shepard:folder"):
        with pytest.raises(UserError, match=f"formats are {', '.join(FAMILIES)}"):
            parse_verifier(wrong)


@pytest.mark.parametrize(
    ("text", "share", "size"),
    [("0.25", 0.25, None), ("8GB", None, 8 << 30), ("1.5 GiB", None, 3 << 29), ("700M", None, 700 << 20)],
)
def test_a_part_of_the_memory(text, share, size):
    part = MemoryPart.parse(text)
    assert (part.share, part.num_bytes) == (share, size)
    assert part.bytes_of(16 << 30) == (size or int(share * (16 << 30)))
    for wrong in ("0", "2", "lots", "-1GB"):
        with pytest.raises(UserError, match=f"verifier_memory = '{wrong}': a share between 0 and 1"):
            EngineConfig(verifier_memory=wrong)


# -- the cache -------------------------------------------------------------------------------------------------


def layer(tokens):
    """Keys and values that say which token they are of."""
    return [torch.tensor(tokens, dtype=torch.float32).view(1, 1, 1, -1, 1).expand(2, 1, 1, -1, 1).clone()]


def added(cache, tokens, score=0.5):
    segment, length = cache.find(tokens)
    if length < len(tokens):
        cache.add(segment, tokens[length:], layer(tokens[length:]), score)
    return length


def known(cache, tokens):
    segment, length = cache.find(tokens)
    held = torch.cat([each.layers[0] for each in segment.lineage()], dim=-2) if length else torch.zeros(0)
    assert held.flatten()[:length].tolist() == list(map(float, tokens[:length]))
    return length


def test_sequences_share_what_they_begin_with():
    cache = PrefixCache(1 << 20)
    assert added(cache, [1, 2, 3, 4, 5]) == 0
    assert added(cache, [1, 2, 3, 4, 5, 6, 7]) == 5
    assert added(cache, [1, 2, 3, 8]) == 3, "in the middle of what was one piece"
    assert added(cache, [1, 2, 3, 4, 5], 0.1) == 5, "score and all"
    assert known(cache, [1, 2, 3, 4, 5, 6, 9]) == 6 and known(cache, [1, 2, 3, 8, 9]) == 4 and known(cache, [2, 1]) == 0
    assert known(cache, [1, 2, 3]) == 2, "the score of the third is not known"
    assert added(cache, [1, 2, 3], 0.7) == 2 and known(cache, [1, 2, 3]) == 3


def test_what_was_not_used_for_longest_goes_first():
    cache = PrefixCache(8 * 12)  # two numbers a token
    added(cache, [1, 2, 3, 4])
    added(cache, [5, 6, 7, 8])
    known(cache, [1, 2, 3, 4, 0])
    added(cache, [9, 10, 11, 12, 13, 14])
    assert cache.used_bytes == 8 * 10 and known(cache, [5, 6, 7, 8]) == 0 and known(cache, [1, 2, 3, 4]) == 4
    added(cache, list(range(20, 60)))
    assert cache.used_bytes == 8 * 40, "what is being read stays, though it is too long"
    added(cache, [1, 2])
    assert cache.used_bytes == 8 * 2


def test_a_cache_without_room_changes_no_score(family):
    name, verifier = family
    reader = started(verifier, name, verifier_memory="1KB")
    found = reader.read(readings())
    assert [each.score for each in found] == pytest.approx(verifier.scores(QUESTION, THOUGHTS), **CLOSE)
    bytes_per_token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, their size, float32
    assert reader._cache.used_bytes <= bytes_per_token * len(reader._encode(readings()[-1]))
