"""What a bench run is made of: benchmarks by name and file, recipes, sweeps, variants; and what is refused."""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from gambit.answers import AnswerKind, Grader, extractor_for
from gambit.bench import datasets
from gambit.bench.datasets import Benchmark, Item, benchmark_for, digest, local_file
from gambit.bench.folder import make_plan
from gambit.bench.recipe import BenchRecipe, recipe_from, with_methods
from gambit.chains import HOW_TO_WRITE, generate
from gambit.cli.app import app
from gambit.config import registry
from gambit.config.yaml_file import read_mapping
from gambit.errors import UserError
from gambit.pawn.puzzles import parse_puzzle
from support.tables import table


def write_lines(path: Path, *records: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# -- benchmarks ------------------------------------------------------------------------------------------------


def test_every_built_in_benchmark_is_there() -> None:
    assert registry.names("gambit.benchmarks") == [
        "aime_2024", "aime_2025", "aime_2026", "authors_aime_2025", "authors_gpqa_diamond", "authors_hmmt_2024",
        "authors_hmmt_2025", "beyond_aime", "gpqa_diamond", "gsm8k", "hmmt_2012_2023",
        "hmmt_feb_2024", "hmmt_feb_2025", "hmmt_feb_2026", "hmmt_nov_2025", "math_500", "pawn",
    ]  # fmt: skip
    for name in registry.names("gambit.benchmarks"):
        assert benchmark_for(name).name == name


def test_pawn_is_its_test_split() -> None:
    items = list(benchmark_for("pawn").first(20))
    assert len(items) == 20 and len({item.id for item in items}) == 20
    for item in items:
        puzzle = parse_puzzle(item.question)
        assert puzzle.split.name == "TEST" and str(puzzle.answer) == item.answer
    assert items == list(benchmark_for("pawn").first(20))  # the same at every call


def test_long_chains_are_benchmarks_of_any_size() -> None:
    benchmark = benchmark_for("chains:9,shuffled,idle=2")
    assert (benchmark.name, benchmark.num_items) == ("chains-9-shuffled-idle-2-test", 600)
    items, rows = list(benchmark.first(5)), generate("chains:9,shuffled,idle=2", "test", 5)
    assert items == list(benchmark.first(5))
    assert [(item.id, item.answer) for item in items] == [(row["id"], row["answer"]) for row in rows]
    assert all(item.question == f"{row['question']}\n\n{HOW_TO_WRITE}" for item, row in zip(items, rows, strict=True))
    assert next(iter(benchmark_for("moves:5,split=dev").items())).id == "moves-5-dev-0-00000"


@pytest.mark.parametrize("answer", ["marbles", "Kelton", "desert"])
def test_one_word_is_graded_as_models_write_it(answer: str) -> None:
    extract, grader = extractor_for(AnswerKind.BOXED), Grader()
    for written in (answer, answer.capitalize(), rf"\text{{{answer}}}", rf"\mathbf{{{answer}}}", f"{answer}."):
        assert grader.grade(extract(rf"So it is \boxed{{{written}}}"), answer), written
    assert not grader.grade(extract(r"So it is \boxed{attic}"), answer)
    grader.close()


def test_a_file_of_questions_and_answers_is_a_benchmark(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mine.jsonl", {"question": "1+1?", "answer": 2}, {"id": "x", "question": "?", "answer": "3"}
    )
    benchmark = benchmark_for(str(path))
    assert benchmark.name == "mine"
    assert [(item.id, item.question, item.answer) for item in benchmark.items()] == [
        ("1", "1+1?", "2"),
        ("x", "?", "3"),
    ]


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([{"question": "?"}], 'line 1: needs an "answer"'),
        ([{"answer": "2"}], 'line 1: needs a "question"'),
        ([{"id": "a", "question": "?", "answer": 1}] * 2, "line 2: the id 'a' is there twice"),
        ([], "holds no problem"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, records: list, complaint: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", *records)
    with pytest.raises(UserError, match=complaint):
        list(benchmark_for(str(path)).items())


@pytest.mark.parametrize(
    ("spelt", "name"),
    [("aime25", "aime_2025"), ("AIME2024", "aime_2024"), ("math500", "math_500"), ("gpqa", "gpqa_diamond")],
)
def test_usual_spellings_name_a_benchmark_too(spelt: str, name: str) -> None:
    assert benchmark_for(spelt) is benchmark_for(name)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown benchmark 'aime_2023': did you mean 'aime_202\d'.*hf:DATASET"):
        benchmark_for("aime_2023")


def test_without_the_dataset_the_message_names_the_file_to_put_where(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GAMBIT_BENCHMARKS", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as caught:
        list(benchmark_for("aime_2026").items())
    for part in ("MathArena/aime_2026", str(tmp_path / "aime_2026.jsonl"), '"question"', ".[bench]"):
        assert part in str(caught.value)
    write_lines(tmp_path / "aime_2026.jsonl", {"question": "?", "answer": "70"})
    assert [item.answer for item in benchmark_for("aime_2026").items()] == ["70"]


def test_by_default_files_go_into_the_users_cache(monkeypatch) -> None:
    monkeypatch.delenv("GAMBIT_BENCHMARKS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert local_file("gsm8k") == Path("/some/cache/gambit/benchmarks/gsm8k.jsonl")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch):
    """A `datasets` library with one dataset, which notes what it is asked for."""
    monkeypatch.setenv("GAMBIT_BENCHMARKS", str(tmp_path))
    library = ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", library)

    def serve(*rows: dict[str, object]) -> list[tuple]:
        asked: list[tuple] = []

        def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, object]]:
            asked.append((name, config, split))
            return list(rows)

        library.load_dataset = load_dataset
        return asked

    return serve


def test_contest_problems_come_from_their_public_datasets(hub) -> None:
    asked = hub({"problem_idx": 1, "problem": "P?", "answer": 70})
    [item] = benchmark_for("hmmt_feb_2024").items()
    assert (item.id, item.question, item.answer) == ("hmmt_feb_2024-1", "P?", "70")
    list(benchmark_for("math_500").items())
    list(benchmark_for("aime_2024").items())
    list(benchmark_for("beyond_aime").items())
    assert asked == [
        ("MathArena/hmmt_feb_2024", None, "train"), ("HuggingFaceH4/MATH-500", None, "test"),
        ("HuggingFaceH4/aime_2024", None, "train"), ("ByteDance-Seed/BeyondAIME", None, "test"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "label", "asked_for"),
    [
        ("hf:ORG/SET", "ORG-SET-test", ("ORG/SET", None, "test")),
        ("hf:ORG/SET:train", "ORG-SET-train", ("ORG/SET", None, "train")),
        ("hf:ORG/SET/main:train[:10]", "ORG-SET-main-train_10_", ("ORG/SET", "main", "train[:10]")),
    ],
)
def test_any_dataset_of_the_hub_is_a_benchmark(hub, name, label, asked_for) -> None:
    asked = hub({"id": 0.5, "problem": "P?", "answer": 7}, {"id": "b", "problem": "Q?", "answer": "8"})
    benchmark = benchmark_for(name)
    items = [(item.id, item.question, item.answer) for item in benchmark.items()]
    assert (benchmark.name, asked) == (label, [asked_for])
    assert items == [(f"{label}-1", "P?", "7"), ("b", "Q?", "8")]


def test_columns_of_a_dataset_may_have_other_names(hub) -> None:
    hub({"Problem": "P?", "Answer": 7, "id": "no folder/name"})
    named = {"question": "Problem", "answer": "Answer"}
    assert [(item.id, item.question, item.answer) for item in benchmark_for("hf:O/S", named).items()] == [
        ("O-S-test-1", "P?", "7")
    ]
    with pytest.raises(UserError, match=r"O/S, row 1: .*question.*"):
        list(benchmark_for("hf:O/S").items())
    with pytest.raises(UserError, match=r"'Solution'; it has Answer, Problem"):
        list(benchmark_for("hf:O/S", {"answer": "Solution"}).items())


@pytest.mark.parametrize("name", ["hf:", "hf:set", "hf:a/b/c/d", "hf:a/b:", "hf:a b/c"])
def test_a_malformed_name_of_a_dataset_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="is not of the form hf:ORG/NAME"):
        benchmark_for(name)


LINES = b'{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?", "answer": "4"}\n'


@pytest.fixture
def git_host() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A server in the place of the host of public repositories: its address, and the bytes of its paths."""
    files: dict[str, bytes] = {}

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Files)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", files
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_authors_problems_are_fetched_once_and_recognised_by_their_hash(
    git_host, tmp_path: Path, monkeypatch
) -> None:
    address, files = git_host
    blob = hashlib.sha1(b"blob %d\0%b" % (len(LINES), LINES)).hexdigest()
    source = {"repository": "org/repo", "commit": "c" * 40, "address": address}
    monkeypatch.setenv("GAMBIT_BENCHMARKS", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    benchmark = datasets.by_authors("theirs", blob, 2, folder="a", source=source)
    place = tmp_path / "theirs.jsonl"
    with pytest.raises(UserError, match=f"HF_HUB_OFFLINE is set.*put the file at {place}"):
        list(benchmark.items())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match="404"):
        list(benchmark.items())
    path = "/org/repo/" + "c" * 40 + "/a/theirs.jsonl"
    files[path] = LINES.replace(b"4", b"5")
    with pytest.raises(UserError, match=f"the hash of its .* is .*, not {blob[:12]}…"):
        list(benchmark.items())
    assert not place.exists()
    files[path] = LINES
    assert [item.answer for item in benchmark.items()] == ["2", "4"]
    files.clear()
    assert len(list(benchmark.items())) == 2 and place.read_bytes() == LINES


AUTHORS = "Dao-AILab/gambit-parallel-reasoning"
TRAINING = Benchmark("used", lambda: iter([Item("1", "a = 1; b = 2; c = a + b; c?", "3")]), caution="seen in training")


def test_the_authors_files_are_named_with_their_blobs_at_one_commit(tmp_path: Path, monkeypatch) -> None:
    """The blobs are those of `git ls-tree -r 7d4d42f` in their repository."""
    found: dict[str, dict[str, str]] = {}
    monkeypatch.setenv("GAMBIT_BENCHMARKS", str(tmp_path))
    monkeypatch.setattr(
        datasets, "fetch_to", lambda place, blob, **source: found.update({place.stem: {**source, "blob": blob}})
    )
    for name in registry.names("gambit.benchmarks"):
        if name.startswith("authors_") or name == "hmmt_2012_2023":
            with pytest.raises(UserError, match="cannot read"):
                list(benchmark_for(name).items())
    assert {name: (file["path"].removeprefix("gambit/"), file["blob"][:8]) for name, file in found.items()} == {
        "authors_aime_2025": ("datasets/aime_2025.jsonl", "96d61015"),
        "authors_gpqa_diamond": ("datasets/gpqa_diamond.jsonl", "5967c4ec"),
        "authors_hmmt_2024": ("datasets/hmmt_2024.jsonl", "10588cfd"),
        "authors_hmmt_2025": ("datasets/hmmt_2025.jsonl", "59f2e80e"),
        "hmmt_2012_2023": ("train_scorer/train_problems/hmmt_2012_2023.jsonl", "2713dd9a"),
    }
    assert {(file["repository"], file["commit"][:7]) for file in found.values()} == {(AUTHORS, "7d4d42f")}
    assert "trained on these problems" in (benchmark_for("hmmt_2012_2023").caution or "")


@pytest.mark.system
@table("words", [
    ("bench", "--benchmark", "used", "--dry-run"),
    ("bench", "--benchmark", "used", "--policies", "single", "--engine", "local", "--no-report", "--out", "{}"),
    ("compare", "pawn", "used", "--engine", "local", "--capacity", "2", "--out", "{}"),
    ("prefix-value", "--benchmark", "used", "--traces", "2", "--keep", "1", "--engine", "local", "--out", "{}"),
    ("scorer", "collect", "--problems", "used", "--traces", "1", "--engine", "local", "--out", "{}"),
])  # fmt: skip
def test_every_command_warns_of_problems_that_a_scorer_was_trained_on(words, tmp_path: Path, monkeypatch) -> None:
    knows, load = registry.knows, registry.load
    monkeypatch.setattr(registry, "knows", lambda group, name: name == "used" or knows(group, name))
    monkeypatch.setattr(registry, "load", lambda group, name: TRAINING if name == "used" else load(group, name))
    done = CliRunner().invoke(app, [word.format(tmp_path / "run") for word in words])
    assert "used: seen in training" in done.stderr, done.output


def test_gsm8k_answers_stand_behind_the_hashes(hub) -> None:
    asked = hub({"question": "Q?", "answer": "5 + 6 = <<5+6=11>>11\n#### 1,011"})
    [item] = benchmark_for("gsm8k").items()
    assert item.answer == "1,011" and asked == [("openai/gsm8k", "main", "test")]
    assert benchmark_for("gsm8k").answer is AnswerKind.NUMBER


def test_gpqa_choices_are_shuffled_always_alike_and_not_all_to_one_letter(hub) -> None:
    rows = [
        {"Question": f"Q{i}?", "Correct Answer": "right", **{f"Incorrect Answer {k}": f"wrong {k}" for k in (1, 2, 3)}}
        for i in range(40)
    ]
    hub(*rows)
    items = list(benchmark_for("gpqa_diamond").items())
    assert items == list(benchmark_for("gpqa_diamond").items())
    assert {item.answer for item in items} == set("ABCD")
    for item in items:
        assert f"{item.answer}) right" in item.question
        assert all(f"wrong {k}" in item.question for k in (1, 2, 3))
    assert extractor_for(AnswerKind.CHOICE)("The answer is \\boxed{C}.") == "C"


def test_a_dataset_with_other_columns_is_refused_with_those_it_has(hub) -> None:
    hub({"Question": "Q?", "Correct": "x"})
    with pytest.raises(UserError, match=r"Idavidrein/gpqa, row 1.*'Correct Answer'.*Correct, Question"):
        list(benchmark_for("gpqa_diamond").items())


def test_the_digest_sees_every_change(tmp_path: Path) -> None:
    seen = {digest(benchmark_for("pawn").first(n)) for n in (3, 4)}
    path = write_lines(tmp_path / "a.jsonl", {"question": "?", "answer": "1"})
    seen.add(digest(benchmark_for(str(path)).items()))
    write_lines(path, {"question": "?", "answer": "2"})
    seen.add(digest(benchmark_for(str(path)).items()))
    assert len(seen) == 4


# -- recipes ---------------------------------------------------------------------------------------------------


def labels(**options: object) -> list[str]:
    return [variant.label for variant in recipe(**options).variants()]


def recipe(**options: object) -> BenchRecipe:
    return recipe_from({"benchmarks": ["pawn"], **options})


def test_a_sweep_multiplies_gambit_and_leaves_the_others_alone() -> None:
    assert labels(policies=["sc", "gambit"], sweep={"swap_size": [4, 8], "check_interval": [10]}) == [
        "sc", "gambit swap_size=4, check_interval=10", "gambit swap_size=8, check_interval=10",
    ]  # fmt: skip


def test_each_varies_one_option_at_a_time_beside_the_unchanged_one() -> None:
    assert labels(policies=["gambit"], sweep={"swap_size": [4, 8], "capacity": [16]}, sweep_mode="each") == [
        "gambit", "gambit swap_size=4", "gambit swap_size=8", "gambit capacity=16",
    ]  # fmt: skip


def test_a_sweep_can_be_of_one_policy_or_of_all() -> None:
    assert labels(policies=["sc", "gambit"], sweep={"all:capacity": [4, 8]}) == [
        "sc capacity=4", "sc capacity=8", "gambit capacity=4", "gambit capacity=8",
    ]  # fmt: skip
    assert labels(policies=["sc", "gambit"], sweep={"sc:temperature": [0.5]}) == ["sc temperature=0.5", "gambit"]


def test_options_of_a_variant_reach_its_search() -> None:
    made = recipe(policies=["sc"], capacity=32, variants={"patient": {"policy": "gambit", "check_interval": 50}})
    patient = made.variants()[1]
    config = made.search_config(patient, 7, {"answer": "number"})
    assert (config.policy, config.capacity, config.check_interval, config.seed) == ("gambit", 32, 50, 7)
    assert config.answer is AnswerKind.NUMBER
    own = recipe(answer="text").search_config(patient, 0, {"answer": "number"})
    assert own.answer is AnswerKind.TEXT  # the user's word is the last


def test_methods_by_name_are_policies_or_variants_of_the_recipe() -> None:
    variants = {"late": {"warmup_tokens": 60}, "early": {"warmup_tokens": 6}}
    values = {"benchmarks": ["pawn"], "variants": variants, "sweep": {"swap_size": [1, 2]}}

    def chosen(*methods: str) -> list[str]:
        return [variant.label for variant in recipe_from(with_methods(values, methods)).variants()]

    assert chosen("late") == ["late"]
    assert chosen("early", "gambit") == ["gambit swap_size=1", "gambit swap_size=2", "early"]


def test_options_of_a_policy_go_to_those_that_know_them() -> None:
    made = recipe(
        policies=["sc", "deepconf"],
        policy_options={"window_tokens": 64},
        sweep={"deepconf:policy_options.warmup_traces": [4]},
    )
    made.check()
    plain, swept = (made.search_config(variant, 0, {}) for variant in made.variants())
    assert plain.policy_options == {} and swept.policy_options == {"window_tokens": 64, "warmup_traces": 4}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"swap": 3}, "unknown option 'swap'"),
        ({"seed": 3}, "use --seeds"),
        ({"policy": "sc"}, "use --policies"),
        ({"policies": ["scc"]}, "unknown policy 'scc'"),
        ({"policies": ["sc", "sc"]}, "twice"),
        ({"policies": ["sc", "deepconf"], "policy_options": {"window": 8}}, "did you mean 'window_tokens'"),
        ({"variants": {"dc": {"policy": "deepconf", "policy_options.window": 8}}}, "did you mean 'window_tokens'"),
        ({"sweep": {"swapsize": [4]}}, "did you mean 'swap_size'"),
        ({"sweep": {"memory_ratio": [0.5]}}, "one engine"),
        ({"sweep": {"seed": [1]}}, "--seeds"),
        ({"sweep": {"step:capacity": [1]}}, "not among those compared"),
        ({"sweep": {"swap_size": []}}, "no value"),
        ({"sweep": {"capacity": [0, 2]}}, "capacity = 0"),
        ({"sweep_mode": "some"}, "sweep_mode"),
        ({"variants": {"fast": {"capcity": 3}}}, "did you mean 'capacity'"),
        ({"policies": []}, "no method is named"),
        ({"capacity": 4, "sweep": {"swap_size": [8]}}, "larger than the capacity"),
        ({"variants": {"sc": {"policy": "sc"}}}, "two variants are called 'sc'"),
        ({"shard": "3/2"}, "shards, from 1 to 2"),
        ({"shard": "x"}, "shard"),
        ({"preset": "auto"}, "depend on their order"),
        ({"benchmarks": []}, "no benchmark is named"),
        ({"capacity": 0}, "capacity = 0"),
    ],
)
def test_what_cannot_run_is_refused_before_a_model_is_loaded(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        recipe(**options).check()


def test_a_yaml_recipe_is_one_run(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("benchmarks: [pawn]\nseeds: [0, 1]\nsweep: {swap_size: [4, 8]}\ncapacity: 16\nmodel: pawn\n")
    made = recipe_from(read_mapping(path, "recipe"))
    assert made.bench.seeds == (0, 1) and made.search == {"capacity": 16} and made.engine == {"model": "pawn"}
    path.write_text("- a\n")
    with pytest.raises(UserError, match="mapping of options"):
        read_mapping(path, "recipe")


def test_shards_share_the_problems_out() -> None:
    plans = [make_plan(recipe(limit=7, seeds=[0, 1], shard=f"{i}/3"), {})[0] for i in (1, 2, 3)]
    assert [plan.num_tasks for plan in plans] == [12, 8, 8]  # 3 + 2 + 2 problems, two methods, two seeds


# -- columns ---------------------------------------------------------------------------------------------------


def test_a_files_columns_may_have_names_of_their_own(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "sums.jsonl", {"prompt": "a=1", "target": 1, "answer": "no"}, {"prompt": "b", "target": 2}
    )
    columns = {"question": "prompt", "answer": "target"}
    plan, [benchmark] = make_plan(recipe_from({"benchmarks": [str(file)], "columns": columns}), {})
    assert [(item.question, item.answer) for item in benchmark.items()] == [("a=1", "1"), ("b", "2")]
    assert plan.to_json()["recipe"]["columns"] == columns  # so that --resume reads the same


def test_columns_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'prompt' is none of id, question, answer"):
        recipe_from({"benchmarks": ["x.jsonl"], "columns": {"prompt": "question"}})
    with pytest.raises(UserError, match="--map names the columns of a file, and pawn is none"):
        recipe_from({"benchmarks": ["pawn"], "columns": {"question": "prompt"}}).check()
