"""Collections on disk: what a kill leaves behind, what is damaged, what does not belong together."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

from gambit.errors import UserError
from gambit.training.dataset import load_dataset
from gambit.training.storage import INDEX_FILE, merge, read_header, read_index, read_shards
from gambit.types import StatePosition
from support.collected import blank_tensors, header, make_collection, problem_record, trace_record, writing

NUM_PROBLEMS = 60


def number_of(name):
    return int(name[1:])


def write_all(folder):
    """A writer as `collect` is one: whatever is done already is left out, shards have one to three problems."""
    with writing(folder, header()) as writer:
        rng = random.Random(len(writer.done))
        todo = [f"p{i}" for i in range(NUM_PROBLEMS) if f"p{i}" not in writer.done]
        while todo:
            names, todo = todo[: (size := rng.randint(1, 3))], todo[size:]
            values = torch.tensor([float(number_of(name)) for name in names])
            problems = [problem_record(name, [trace_record(1, True)]) for name in names]
            writer.add(problems, {**blank_tensors(problems), "value": values})
            time.sleep(0.002)


@pytest.mark.system
def test_kills_at_random_moments_lose_and_double_nothing(tmp_path):
    context, rng = multiprocessing.get_context("fork"), random.Random(7)
    num_kills, seen = 0, set()
    while len(seen) < NUM_PROBLEMS:
        child = context.Process(target=write_all, args=(tmp_path,))
        child.start()
        child.join(rng.uniform(0.005, 0.06))
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            num_kills += 1
        child.join()
        found = [problem.id for entry in read_index(tmp_path) for problem in entry.problems]
        assert seen <= set(found), "a finished problem was lost"
        assert len(found) == len(set(found)), "a problem was written twice"
        seen = set(found)
    assert num_kills >= 3
    for shard in read_shards(tmp_path):
        assert shard.tensors["value"].tolist() == [number_of(problem.id) for problem in shard.entry.problems]


def test_a_line_cut_short_never_was(tmp_path):
    make_collection(tmp_path, num_problems=10)
    index = tmp_path / INDEX_FILE
    whole = index.read_bytes()
    index.write_bytes(whole[:-20])
    (tmp_path / "shard-00001.safetensors.partial").write_bytes(b"half")
    assert [p.id for e in read_index(tmp_path) for p in e.problems] == ["p0", "p1", "p2", "p3", "p4"]
    with writing(tmp_path, header()) as writer:
        assert "p5" not in writer.done
        writer.add([problem_record("p5", [trace_record(1, True)])], {"value": torch.ones(1)})
    assert [entry.file for entry in read_index(tmp_path)] == ["shard-00000.safetensors", "shard-00001.safetensors"]
    assert not list(tmp_path.glob("*.partial"))


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-10] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip_a_byte, lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_corrupted_shard_is_named_and_skipped_only_when_asked(tmp_path, damage):
    make_collection(tmp_path, num_problems=15)
    damage(tmp_path / "shard-00001.safetensors")
    with pytest.raises(UserError, match=r"shard-00001.safetensors is corrupted.*--skip-corrupted"):
        load_dataset(tmp_path, StatePosition.BEFORE)
    skipped = []
    data = load_dataset(tmp_path, StatePosition.BEFORE, skipped=skipped)
    assert [problem.id for problem in data.problems] == [f"p{i}" for i in (*range(5), *range(10, 15))]
    assert len(skipped) == 1 and "shard-00001" in skipped[0] and "5 problems" in skipped[0]
    assert len(data.states) == data.traces.num_thoughts.sum() == len(data.traces.thought_ends)


def changed_trace(name, by):
    def change(entry):
        entry["problems"][0]["traces"][0][name] += by

    return change


CONTRADICTIONS = [
    (
        changed_trace("num_thoughts", 3),
        r"shard-00001.safetensors contradicts its line in index.jsonl: states.-1.before",
    ),
    (changed_trace("num_thoughts", -1), r"states.-1.before must be \d+ × 8, and is \d+ × 8; --skip-corrupted"),
    (changed_trace("num_tokens", 5), r"shard-00001.safetensors contradicts .*: tokens must be \d+, and is \d+"),
    (
        changed_trace("num_thoughts", -99),
        r"index.jsonl, line 2 is not a shard.s entry: problems.0.traces.0.num_thoughts",
    ),
    (lambda entry: entry["problems"].pop(), "shard-00001.safetensors contradicts its line"),
    (lambda entry: entry.update(file="../other/shard-00001.safetensors"), "line 2 is not a shard's entry: file"),
    (lambda entry: entry["problems"][1].update(id="p0"), r"index.jsonl, line 2: the problem 'p0' is there twice"),
]


@pytest.mark.parametrize(("change", "said"), CONTRADICTIONS)
def test_an_index_that_contradicts_its_shard_is_refused(tmp_path, change, said):
    make_collection(tmp_path, num_problems=10)
    first, second = map(json.loads, (tmp_path / INDEX_FILE).read_text().splitlines())
    change(second)
    (tmp_path / INDEX_FILE).write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    with pytest.raises(UserError, match=said):
        load_dataset(tmp_path, StatePosition.BEFORE)


def test_a_header_that_promises_other_states_is_refused(tmp_path):
    make_collection(tmp_path, num_problems=5)
    raw = json.loads((tmp_path / "collection.json").read_text())
    for change, said in [({"hidden_size": 7}, "must be .* × 7, and is .* × 8"), ({"layers": [-1, 3]}, "is missing")]:
        (tmp_path / "collection.json").write_text(json.dumps({**raw, **change}))
        with pytest.raises(UserError, match=f"shard-00000.safetensors contradicts its line .*{said}"):
            load_dataset(tmp_path, StatePosition.BEFORE)


def test_a_deleted_line_is_collected_again_beside_the_shards_that_are_there(tmp_path):
    make_collection(tmp_path, num_problems=10)
    kept = (tmp_path / INDEX_FILE).read_text().splitlines()[1]
    (tmp_path / INDEX_FILE).write_text(f"{kept}\n")
    problems = [problem_record("p0", [trace_record(1, True)])]
    with writing(tmp_path, header()) as writer:
        writer.add(problems, blank_tensors(problems))
    assert [problem.id for problem in load_dataset(tmp_path, StatePosition.BEFORE).problems][-2:] == ["p9", "p0"]


def test_a_collection_is_gone_on_with_under_the_same_settings_only(tmp_path):
    make_collection(tmp_path, num_problems=5)
    with (
        pytest.raises(UserError, match=r"begun with traces_per_problem = 6, this run has 8"),
        writing(tmp_path, header(traces_per_problem=8)),
    ):
        pass
    with writing(tmp_path, header(id="other", source="more.jsonl")) as writer:
        assert read_header(tmp_path).id == "abc" and len(writer.done) == 5


def test_what_is_no_collection_is_said_so(tmp_path):
    with pytest.raises(UserError, match=r"no collection.json"):
        read_header(tmp_path)
    make_collection(tmp_path, num_problems=5)
    raw = json.loads((tmp_path / "collection.json").read_text())
    (tmp_path / "collection.json").write_text(json.dumps({**raw, "format": 9}))
    with pytest.raises(UserError, match="format: Input should be 1, not 9"):
        read_header(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{}\n")
    with pytest.raises(UserError, match=r"index.jsonl, line 1 is not a shard"):
        list(read_index(tmp_path))


def test_a_position_or_layer_that_is_not_there_is_refused_with_both(tmp_path):
    make_collection(tmp_path, num_problems=5, positions=("before",))
    with pytest.raises(UserError, match=r"'boundary' are wanted, .* holds before"):
        load_dataset(tmp_path, StatePosition.BOUNDARY)
    with pytest.raises(UserError, match=r"layers \[-9\] are wanted, .* holds \[-1\]"):
        load_dataset(tmp_path, StatePosition.BEFORE, (-1, -9))


# -- several as one ----------------------------------------------------------------------------------------------


def ids_in(folder):
    return [problem.id for entry in read_index(folder) for problem in entry.problems]


def write_part(folder, numbers, **changes):
    with writing(folder, header().model_copy(update=changes)) as writer:
        for number in numbers:
            problem = problem_record(f"p{number}", [trace_record(1, True)])
            writer.add([problem], {**blank_tensors([problem]), "value": torch.tensor([number])})


def test_parts_become_one_and_a_second_merge_adds_only_what_is_new(tmp_path):
    parts, whole = [tmp_path / "a", tmp_path / "b"], tmp_path / "whole"
    write_part(parts[0], [0, 2, 4], id="first")
    write_part(parts[1], [1, 3], id="second")
    assert merge(parts, whole) == 5
    write_part(parts[1], [5], id="second")
    assert merge(parts, whole) == 6
    assert ids_in(whole) == ["p0", "p2", "p4", "p1", "p3", "p5"]
    shards = list(read_shards(whole))
    assert [shard.tensors["value"].tolist() for shard in shards] == [[0], [2], [4], [1], [3], [5]]
    assert read_header(whole).id not in ("first", "second")


def test_damaged_and_missing_shards_stay_known_by_name(tmp_path):
    part, whole = tmp_path / "a", tmp_path / "whole"
    write_part(part, [0, 1, 2])
    (part / "shard-00001.safetensors").write_bytes(b"?")
    (part / "shard-00002.safetensors").unlink()
    merge([part], whole)
    skipped = []
    assert len(list(read_shards(whole, skipped=skipped))) == 1
    assert ["shard-00001" in skipped[0], "shard-00002" in skipped[1]] == [True, True]


def test_what_was_made_in_another_way_is_not_merged(tmp_path):
    write_part(tmp_path / "a", [0])
    write_part(tmp_path / "b", [1], traces_per_problem=7)
    with pytest.raises(UserError, match=r"b has traces_per_problem = 7, .*a has"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "whole")
    with pytest.raises(UserError, match="choose a new folder"):
        merge([tmp_path / "a"], tmp_path / "a")
