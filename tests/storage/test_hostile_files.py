"""Files that a hostile user brings: problems, checkpoints, logs. A sentence names the file, nothing is written."""

import json
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from gambit import events as ev
from gambit.errors import UserError
from gambit.results.record import fold
from gambit.scorers.authors import load_torch_scorer
from gambit.scorers.base import ScorerInfo
from gambit.scorers.checkpoint import METADATA_KEY, load_checkpoint, read_metadata, save_checkpoint
from gambit.scorers.mlp import TENSORS, MlpScorer
from gambit.storage.problems import read_problem_file
from gambit.types import Aggregation, StatePosition
from support.scripted import ScriptedEngine
from support.searching import make_settings, run_one
from support.tables import table


def refused(act, folder):
    """The sentence of a refusal; what was in the folder is all that is there."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as caught:
        act()
    sentence = str(caught.value)
    assert sorted(folder.rglob("*")) == before, "nothing is written"
    assert "Traceback" not in sentence and sentence.encode() and len(sentence) < 1000
    return sentence


# -- problems --------------------------------------------------------------------------------------------------------


WRONG_RECORDS = [
    "null", "5", "[]", '"x"', "true", "1.5", "[[]]", "[null]", "{", "}", "[", "]", '{"question"}', '{"question":}',
    '{"question": "x",}', "{'question': 'x'}", '{"question": "x"} {"question": "y"}', "{}", '{"id": "a"}',
    '{"answer": "1"}', '{"question": null}', '{"question": ""}', '{"question": "  "}', '{"question": 5}',
    '{"question": true}', '{"question": []}', '{"question": {}}', '{"question": ["x"]}', '{"question": {"a": 1}}',
    '{"question": "x", "answer": []}', '{"question": "x", "answer": {}}', '{"question": "x", "answer": [1]}',
    '{"question": "x", "answer": NaN}', '{"question": "x", "id": []}', '{"question": "x", "id": {}}',
    '{"question": "x", "id": ".."}', '{"question": "x", "id": "../a"}', '{"question": "x", "id": "a/b"}',
    '{"question": "x", "id": "/etc"}', '{"question": "x", "id": "a\\\\b"}', '{"question": "x", "id": "a\\u0000"}',
    '{"question": "x", "id": "."}', '{"question": "x", "id": ""}', '{"question": "x", "id": "' + "a" * 300 + '"}',
    '{"question": "x", "id": "<img src=x>"}', '{"question": "x", "id": "a b"}', '{"question": "\\ud800"}',
    '{"question": "x", "answer": "\\udfff"}', '{"question": "x", "id": "\\ud800"}', '{"question": "x", "id": "a\\nb"}',
    "[" * 100_000, '{"a":' * 100_000, '{"question": ' + "9" * 5000 + "}", "﻿﻿{}", "\x00", "{\x00}",
    '{"question": "x", "id": 1.5}', '{"question": "x", "id": true}', '{"question": "x", "id": -1e999}',
    '{"question": Infinity}', '{"question": "x", "answer": Infinity}', '{"question": "x", "answer": -Infinity}',
]  # fmt: skip


@table("record", WRONG_RECORDS)
def test_a_record_that_is_no_problem_is_refused_with_its_line(tmp_path, record):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"question": "a?"}\n' + record.encode("utf-8", "surrogatepass") + b"\n")
    assert "p.jsonl" in refused(lambda: read_problem_file(path, {}), tmp_path)


WRONG_FILES = [
    ("p.jsonl", b""), ("p.jsonl", b"\n\n"), ("p.jsonl", b"\xff\xfe\xfd"), ("p.jsonl", b"\x80{}"), ("p.json", b""),
    ("p.json", b"[]"), ("p.json", b"{}"), ("p.json", b"null"), ("p.json", b"5"), ("p.json", b"[" * 100_000),
    ("p.json", b'[{"question": "x"}, 5]'), ("p.json", b'[{"question": "x"}'), ("p.json", b'{"question": "x"}}'),
    ("p.csv", b""), ("p.csv", b"question\n"), ("p.csv", b"a,b\n1,2\n"), ("p.csv", b"question,answer\nx\n"),
    ("p.csv", b"question,answer\nx,1,2\n"), ("p.csv", b'question\n"x\n'), ("p.csv", b'question\n"x"y\n'),
    ("p.csv", b"question\n\xff\n"), ("p.csv", b"question,question\nx,y\n"), ("p.tsv", b"question,answer\nx,1\n"),
    ("p.tsv", b"question\tanswer\nx\n"), ("p.txt", b""), ("p.txt", b"  \n "), ("p.txt", b"\xff\xff"), ("p", b""),
    ("p.md", b"\n"), ("p.tex", b""), ("p.xml", b"<a/>"), ("p.yaml", b"question: x"), ("p.parquet", b"PAR1"),
    ("p.jsonl.gz", b"\x1f\x8b"), ("p.zip", b"PK\x03\x04"), ("p.pkl", b"\x80\x04."), ("p.jsonl", b"\x1f\x8b\x08"),
    ("p.jsonl", b'{"question": "x", "id": "a"}\n{"question": "y", "id": "a"}\n'),
    ("p.jsonl", b'{"question": "x", "id": "2"}\n{"question": "y"}\n'),
    ("p.csv", b"question,id\nx,a\ny,a\n"), ("p.csv", b"question,id\nx,../a\n"), ("p.csv", b"id,question\na,\n"),
]  # fmt: skip


@table(("name", "content"), WRONG_FILES)
def test_a_file_that_holds_no_problems_is_refused_by_name(tmp_path, name, content):
    for old in tmp_path.iterdir():
        old.unlink()
    (tmp_path / name).write_bytes(content)
    assert name in refused(lambda: read_problem_file(tmp_path / name, {}), tmp_path)


# -- checkpoints -----------------------------------------------------------------------------------------------------


INFO = ScorerInfo("mlp", StatePosition.BOUNDARY, Aggregation.MEAN, hidden_size=4)


def scorer(width=3, takes=4):
    w1, b1, w2, b2 = torch.ones(width, takes), torch.ones(width), torch.ones(1, width), torch.ones(1)
    return MlpScorer(INFO, (w1, b1, w2, b2))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "good.safetensors"
    save_checkpoint(scorer(), path)
    return path


NO_OBJECTS = ["[]", "null", "5", '"x"', "true", "", "{", "nan", "[" * 100_000, '{"a":' * 100_000, "\x00", "{}", "[{}]"]
ODD = [None, [], {}, 5, -1, 1.5, "x", "", True, 10**40, [[]], {"a": 1}, "\0", "x" * 10_000]
FIELDS = ("format", "architecture", "hidden_size", "state_position", "boundary_rule", "aggregation", "layers",
          "is_probability", "needs_confidence", "trust", "base_model", "base_model_hash")  # fmt: skip
# What a field may well be, so that the checkpoint is taken.
TAKEN = [("boundary_rule", "x"), ("boundary_rule", ""), ("boundary_rule", "\0"), ("boundary_rule", "x" * 10_000),
         ("is_probability", True), ("needs_confidence", True), ("trust", None), ("base_model", None),
         ("base_model", "x"), ("base_model", ""), ("base_model", "\0"), ("base_model", "x" * 10_000),
         ("base_model_hash", None), ("base_model_hash", "x"), ("base_model_hash", ""), ("base_model_hash", "\0"),
         ("base_model_hash", "x" * 10_000)]  # fmt: skip


def written(folder, text, tensors=None):
    path = folder / "s.safetensors"
    path.write_bytes(save(scorer().tensors() if tensors is None else tensors, metadata={METADATA_KEY: text}))
    return path


@table("text", NO_OBJECTS)
def test_metadata_that_are_no_object_are_refused(tmp_path, text):
    path = written(tmp_path, text)
    assert "s.safetensors" in refused(lambda: load_checkpoint(path), tmp_path)


@table(("name", "value"), [(name, value) for name in FIELDS for value in ODD])
def test_a_field_of_a_wrong_type_is_refused_with_a_remedy_or_taken_as_it_is(tmp_path, checkpoint, name, value):
    path = written(tmp_path, json.dumps({**read_metadata(checkpoint), name: value}))
    if any(name == each and value == taken and type(value) is type(taken) for each, taken in TAKEN):
        load_checkpoint(path)
        return
    sentence = refused(lambda: load_checkpoint(path), tmp_path)
    assert "s.safetensors" in sentence and "scorer train" in sentence


SHAPES = [
    {"net.0.weight": (3,)}, {"net.0.weight": (3, 4, 1)}, {"net.0.weight": (4, 4)}, {"net.0.weight": (3, 5)},
    {"net.0.weight": (0, 4)}, {"net.0.weight": ()}, {"net.0.bias": ()}, {"net.0.bias": (2,)}, {"net.0.bias": (3, 1)},
    {"net.2.weight": (3,)}, {"net.2.weight": (2, 3)}, {"net.2.weight": (1, 2)}, {"net.2.weight": ()},
    {"net.2.bias": ()}, {"net.2.bias": (2,)}, {"net.2.bias": (1, 1)}, {"net.2.bias": (0,)}, {"net.0.bias": (0,)},
]  # fmt: skip


@table("shapes", SHAPES)
def test_tensors_of_other_shapes_are_refused(tmp_path, checkpoint, shapes):
    tensors = scorer().tensors() | {name: torch.ones(shape) for name, shape in shapes.items()}
    path = written(tmp_path, json.dumps(read_metadata(checkpoint)), tensors)
    assert "s.safetensors" in refused(lambda: load_checkpoint(path), tmp_path)


def header(text, size=None):
    content = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(content) if size is None else size) + content


HEADERS = [
    b"", b"x", b"\0" * 7, header("", 2**64 - 1), header("", 2**31), header("{"), header("[]"), header("null"),
    header("{}"), header("5"), header(b"\xff\xff"), header("[" * 10_000), header('{"__metadata__": []}'),
    header('{"__metadata__": {"gambit": 5}}'), header('{"__metadata__": {"gambit": null}}'),
    header('{"__metadata__": null}'), header('{"a": 5}'), header('{"a": {"dtype": "F32", "shape": [1]}}'),
    header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
    header('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}') + b"1234",
    header('{"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}') + b"1234",
    header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}') + b"1234",
    header('{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}') + b"1234",
    b"PK\x03\x04", b"\x80\x04.", b"GGUF", b"<html>", b"\x89PNG",
]  # fmt: skip


@table("content", HEADERS)
def test_a_file_with_a_forged_header_is_refused(tmp_path, content):
    path = tmp_path / "s.safetensors"
    path.write_bytes(content)
    assert "s.safetensors" in refused(lambda: load_checkpoint(path), tmp_path)


class Opener:
    """A pickle that makes a file, were it read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def pickled_as_torch(path, content):
    """A torch file around a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


def bomb(path):
    """A zip of 64 kB whose pickle is 64 MB of zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
        archive.writestr("archive/version", "3\n")


def deep_pickle():
    return b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


TORCH_FILES = [
    lambda path, _: path.write_bytes(b""),
    lambda path, _: path.write_bytes(b"x" * 100),
    lambda path, _: path.write_bytes(b"PK\x03\x04"),
    lambda path, mark: path.write_bytes(pickle.dumps(Opener(mark))),
    lambda path, mark: path.write_bytes(pickle.dumps({"model_state_dict": Opener(mark)})),
    lambda path, mark: pickled_as_torch(path, pickle.dumps(Opener(mark))),
    lambda path, mark: pickled_as_torch(path, pickle.dumps({"net.0.weight": Opener(mark)})),
    lambda path, mark: torch.save({"net.0.weight": Opener(mark)}, path),
    lambda path, _: pickled_as_torch(path, b"cos\nsystem\n(S'true'\ntR."),
    lambda path, _: pickled_as_torch(path, b"cbuiltins\neval\n(S'1'\ntR."),
    lambda path, _: pickled_as_torch(path, deep_pickle()),
    lambda path, _: pickled_as_torch(path, b""),
    lambda path, _: pickled_as_torch(path, b"\x80\x02}."),
    lambda path, _: bomb(path),
    lambda path, _: torch.save(None, path),
    lambda path, _: torch.save([], path),
    lambda path, _: torch.save(torch.ones(3), path),
    lambda path, _: torch.save({"model_state_dict": None}, path),
    lambda path, _: torch.save({"model_state_dict": []}, path),
    lambda path, _: torch.save(dict.fromkeys(TENSORS, 5), path),
    lambda path, _: torch.save(dict.fromkeys(TENSORS), path),
    lambda path, _: torch.save({name: torch.ones(2) for name in TENSORS}, path),
    lambda path, _: torch.save({**scorer().tensors(), TENSORS[0]: torch.full((3, 4), float("nan"))}, path),
    lambda path, _: torch.save({1: torch.ones(2)}, path),
]  # fmt: skip


@table("make", TORCH_FILES)
def test_a_published_checkpoint_that_is_more_than_tensors_is_refused_and_nothing_of_it_runs(tmp_path, make):
    path, mark = tmp_path / "s.pt", tmp_path / "executed"
    make(path, mark)
    assert "s.pt" in refused(lambda: load_torch_scorer(path, INFO), tmp_path)
    assert not mark.exists()
    path.unlink()


# -- fuzz: more of it in `make test-all` -----------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), json_values, max_size=4))
def test_any_metadata_make_a_scorer_or_a_sentence(tmp_path_factory, checkpoint, fields):
    path = written(checkpoint.parent, json.dumps({**read_metadata(checkpoint), **fields}))
    try:
        assert load_checkpoint(path).info.architecture == "mlp"
    except UserError as error:
        assert "s.safetensors" in str(error)


@given(data=st.data())
def test_any_damage_to_a_checkpoint_leaves_a_scorer_or_a_sentence(checkpoint, data):
    content = bytearray(checkpoint.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = checkpoint.parent / "damaged.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        load_checkpoint(path)
    except UserError as error:
        assert "damaged.safetensors" in str(error)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with ev.LogWriter(path) as writer:
        for event in run_one(ScriptedEngine(seed=3, kv_tokens=150), make_settings(capacity=4, islands=2)).events:
            writer.write(event)
    return path


@given(data=st.data())
def test_any_damage_to_a_log_leaves_a_log_or_a_sentence(log, data):
    lines = log.read_bytes().split(b"\n")
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = data.draw(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
    path = log.parent / "damaged.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        fold(ev.read_log(path), path)
    except UserError as error:
        assert "damaged.jsonl" in str(error)


@given(record=json_values, suffix=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".txt"]))
def test_any_file_holds_problems_or_is_refused_by_name(tmp_path_factory, record, suffix):
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_text(json.dumps(record), encoding="utf-8")
    try:
        assert read_problem_file(path, {}).problems
    except UserError as error:
        assert path.name in str(error)
