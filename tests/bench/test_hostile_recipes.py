"""Recipes that a hostile hand has written: exit code 2 and a sentence, before a model is loaded or a folder is made."""

import pytest
from typer.testing import CliRunner

from gambit.cli.app import app
from support.tables import table

pytestmark = pytest.mark.contract
DEEP = "[" * 3000 + "]" * 3000
BOMB = "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *(
    f"{after}: &{after} [{', '.join(['*' + before] * 9)}]" for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)])  # fmt: skip
RECIPES = [
    "", "[]", "5", "null", "'x'", "[a, b]", "{", "a: b: c", "\x00", "\t- x", "%YAML 9.9\n---\nx: 1", "? [a]\n: b",
    "!!python/object/apply:os.system ['touch PWNED']", "x: !!python/name:os.system", "benchmarks: !!binary aGVsbG8=",
    "!!python/object/new:os.system [touch PWNED]", "model: !!python/object/apply:os.getcwd []", DEEP, BOMB,
    "benchmarks: [pawn]\nbenchmarks: [gsm8k]", "<<: {benchmarks: [pawn]}\nx: 1", "model: [pawn]", "model: {a: b}",
    "benchmarks: {pawn: 1}", "benchmarks: pawn", "benchmarks: [[pawn]]", "benchmarks: [5]", "benchmarks: [nothing]",
    "benchmarks: [../../etc/passwd]", "benchmarks: [/etc/passwd]", "benchmarks: [/dev/zero]", "benchmarks: ['']",
    "benchmarks: [pawn, pawn]", "benchmarks: ['hf:../x']", "benchmarks: ['hf:a/b/c/d']", "benchmarks: ['chains:0']",
    "benchmarks: ['chains:99999']", "benchmarks: ['moves:x']", "policies: sc", "policies: [nothing]", "policies: [5]",
    "policies: []\nvariants: {}", "policies: [sc, sc]", "policies: [os.system]", "seeds: []", "seeds: [x]",
    "seeds: [1.5]", "seeds: [1, 1]", "seeds: 1", "limit: 0", "limit: -1", "limit: x", "limit: 1.5", "limit: 1e99",
    "problems: [0]", "problems: [-1]", "problems: [301]", "problems: 12", "problems: [1]\nlimit: 2", "shard: 0/1",
    "shard: 2/1", "shard: x", "shard: 1/0", "concurrency: 0", "concurrency: 99999", "block: 0", "capacity: 0",
    "capacity: x", "capacity: .nan", "capacity: .inf", "temperature: .nan", "temperature: -1", "top_p: 2", "top_k: -2",
    "kv_budget_tokens: -5", "kv_budget_tokens: lots", "memory_ratio: 2", "memory_ratio: .nan",
    "engine: [local]", "engine_options: 5", "device: [cpu]", "dtype: float99", "scorer: [x]", "vote: nothing",
    "sweep: {capacity: []}", "sweep: {nothing: [1]}", "sweep: {engine: [local]}", "sweep: {seed: [1]}", "sweep: [1]",
    "sweep: {'x:capacity': [1]}", "sweep: {capacity: 5}", "sweep: {policy_options: [1]}", "sweep_mode: nothing",
    "variants: [1]", "variants: {a: 5}", "variants: {'': {policy: sc}}", "variants: {a: {policy: nothing}}",
    "variants: {a: {seed: 1}}", "variants: {a: {capacity: 0}}", "variants: {a: {policy_options: {x: 1}}}",
    "variants: {a: {policy_options.nothing: 1}}", "variants: {sc: {policy: sc}}", "variants: {a: {model: pawn}}",
    "policy: sc", "seed: 5", "policy_options: {nothing: 1}", "columns: {nothing: x}", "columns: {question: x}",
    "preset: auto", "preset: nothing", "islands: 0", "swap_size: 5\ncapacity: 2", "budget_seconds: -1", "logs: 7",
    "boundary: nothing", "boundary: 'stride:0'", "compat: nothing", "consensus_stop: 7", "nothing: 1", "__class__: x",
    "model_config: {}", "answer: nothing", "system_prompt: [x]", "max_new_tokens: 0",
]  # fmt: skip


def test_there_are_more_than_a_hundred():
    assert len(RECIPES) == len(set(RECIPES)) > 120


@table("text", RECIPES)
def test_a_recipe_is_refused_with_a_sentence(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    names = text.partition(":")[0]
    whole = text if names in ("benchmarks", "problems") or not text[:1].isalpha() else f"benchmarks: [pawn]\n{text}"
    whole = f"{whole}\nbenchmarks: [pawn]" if names == "problems" else whole
    recipe.write_text(whole, encoding="utf-8")
    done = CliRunner().invoke(app, ["bench", "--recipe", str(recipe), "--dry-run"])
    said = " ".join(done.stderr.split())
    assert done.exit_code == 2, (done.exit_code, done.output)
    assert said.startswith("error: ") and "Traceback" not in said and "pydantic" not in said and len(said) < 1500, said
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
