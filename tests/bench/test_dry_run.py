"""`gambit bench --dry-run`: what would run and how large it is, also for every recipe of the paper."""

import json
import re
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gambit.bench.recipe import RATES, planned_searches, recipe_from
from gambit.cli.app import app
from gambit.cli.forecast import SLOWER
from gambit.config.yaml_file import read_mapping
from gambit.policies import slim_sc
from support import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAPER = ROOT / "benchmarks" / "paper"
CONTESTS = {"authors_aime_2025": 30, "aime_2026": 30, "authors_hmmt_2024": 30, "authors_hmmt_2025": 30,
            "authors_gpqa_diamond": 198}  # fmt: skip
# searches of each recipe and seed: problems × methods
SIZES = {
    "main_results_qwen3_4b": 318 * 7,
    "main_results_deepseek_8b": 318 * 7,
    "main_results_phi4_14b": 318 * 7,
    "lengths_qwen3_4b": 30 * 5,
    "lengths_deepseek_8b": 30 * 5,
    "lengths_phi4_14b": 30 * 5,
    "trace_throughput": 30 * 5,
    "utilization": 5,
    "latency_decomposition": 30,
    "sequence_scorer_qwen3_4b": 318 * 4,
    "sequence_scorer_deepseek_8b": 318 * 4,
    "hyperparameters": 30 * (1 + 3 + 2 + 2 + 1),
    "ablations": 30 * 5,
    "worked_example": 3,
    "prefix_value": 2,
}


def dry_run(*words: object) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "--dry-run", *map(str, words)])
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def _no_sentence_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slim-SC's own embedder needs it; a plan does not."""
    monkeypatch.setattr(slim_sc, "find_spec", lambda name: None)


def test_every_recipe_of_the_paper_is_listed_and_has_a_size() -> None:
    assert {path.stem for path in PAPER.glob("*.yaml")} == SIZES.keys()
    page = (PAPER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.yaml`" in page for name in SIZES)


@pytest.mark.usefixtures("_no_sentence_transformers")
@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_of_the_paper_would_run(name: str) -> None:
    code, out, err = dry_run("--recipe", PAPER / f"{name}.yaml")
    assert code == 0, err
    said = " ".join(out.split())
    limit = "32,000" if "phi4" in name else "60,000"
    assert f"{4 * SIZES[name]:,} searches, about " in said
    scorer = f"{name.replace('_scorer', '')}.safetensors" if "sequence" in name else "auto, the model's own"
    assert f"scorer: {scorer}; seeds: 0, 1, 2, 3; new tokens of a trace: {limit}" in said
    about, pace = "about", r"2,[35]\d0 a second, measured with 64 traces of 12,000 tokens"
    if "phi4" in name:
        about, pace = "at least", "12,600 a second, measured with 256 short traces; long ones are several times slower"
    assert re.search(rf"{about} [\d,.]+ hours on one H200, computed: [\d,]+ tokens at {pace}", said)
    recipe = recipe_from(read_mapping(PAPER / f"{name}.yaml", "recipe"))
    planned = list(planned_searches(recipe))
    num_traces = 64 if name == "prefix_value" else 256
    assert {part.num_traces for part in planned} - {512} == {num_traces} and {
        part.trace_tokens for part in planned
    } == {24_000}
    alone = {"utilization": 1, "worked_example": 1, "prefix_value": 2}
    assert all(part.num_problems == alone.get(name, CONTESTS[part.benchmark]) for part in planned)
    for variant in recipe.variants():
        config = recipe.search_config(variant, 0, {})
        assert None not in (config.temperature, config.top_p, config.top_k)
        assert config.system_prompt == r"Please reason step by step, and put your final answer within \boxed{}"


@pytest.mark.usefixtures("_no_sentence_transformers")
def test_the_papers_main_table_has_its_methods_with_their_settings() -> None:
    recipe = recipe_from(read_mapping(PAPER / "main_results_qwen3_4b.yaml", "recipe"))
    configs = {variant.label: recipe.search_config(variant, 0, {}) for variant in recipe.variants()}
    assert list(configs) == [
        "sc",
        "step",
        "slim-sc",
        "deepconf",
        "gambit",
        "gambit by score",
        "authors' rules",
    ]
    assert configs["gambit"].vote == "position" and configs["sc"].vote is None
    assert configs["slim-sc"].policy_options["threshold"] == 0.95
    assert recipe.engine["memory_ratio"] == 0.9


@pytest.mark.usefixtures("_no_sentence_transformers")
def test_what_the_run_itself_would_lack_is_said_once_and_refused_there(tmp_path: Path) -> None:
    recipe = PAPER / "main_results_qwen3_4b.yaml"
    code, _, err = dry_run("--recipe", recipe)
    assert code == 0 and err.count("sentence_transformers is not installed: pip install sentence-transformers") == 1
    assert "warning: the run itself would be refused here: policy 'slim-sc'" in err
    run = CliRunner().invoke(app, ["bench", "--recipe", str(recipe), "--out", str(tmp_path / "run")])
    assert run.exit_code == 2 and "sentence_transformers is not installed" in run.stderr
    assert not (tmp_path / "run").exists()
    assert dry_run("--recipe", PAPER / "hyperparameters.yaml")[2] == ""


def test_a_small_run_is_counted_out(tmp_path: Path) -> None:
    problems = tmp_path / "sums.jsonl"
    problems.write_text("".join(json.dumps({"question": f"a={i}", "answer": "7"}) + "\n" for i in range(5)))
    code, out, err = dry_run("--benchmark", problems, "--policies", "sc,single", "--seeds", "0,1", "--shard", "2/2",
                             "--capacity", 8, "--max-new-tokens", 100, "--out", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    # of five problems the second shard has two
    assert lines[1] == ["sc", "sums", "2", "4", "8", "100", "3.2", "k"]
    assert lines[2] == ["single", "sums", "2", "4", "1", "100", "400"]
    assert lines[3][:5] == ["8", "searches,", "about", "3.6", "k"]
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_could_not_run_is_refused() -> None:
    assert dry_run("--benchmark", "pawn", "--policies", "beam")[0] == 2
    assert dry_run("--policies", "sc")[0] == 2


def test_rates_are_those_of_the_results() -> None:
    files = {"qwen3-4b-thinking-2507": ("gpu_speed", "forest_speed_qwen3-4b"),
             "deepseek-r1-0528-qwen3-8b": ("gpu_speed_8b", "forest_speed_qwen3-8b"),
             "phi-4-reasoning-plus": ("gpu_speed_phi4", None)}  # fmt: skip
    for model, (short, long) in files.items():
        found = json.loads((RESULTS / f"{short}.json").read_text())["overhead"]["scoring"]["tokens_per_second"]
        assert RATES[model][0] == pytest.approx(statistics.median(found), rel=0.01)
        if long is None:
            assert RATES[model][1] is None
        else:
            case = json.loads((RESULTS / f"{long}.json").read_text())["small"]
            assert case["case"].startswith("64 x 12000")
            assert RATES[model][1] == pytest.approx(case["stock"]["tokens_per_second"], rel=0.01)


def test_short_traces_have_the_rate_of_short_traces(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    words = ("--benchmark", file, "--model", "Qwen/Qwen3-4B-Thinking-2507", "--max-new-tokens", "2000")
    said = " ".join(dry_run(*words)[1].split())
    assert "tokens at 23,800 a second, measured with 256 short traces" in said and "slower" not in said


def test_a_forecast_slows_down_as_measured() -> None:
    """Steps of 64 traces at a tenth of their warm-up, and half-way through 24,000 tokens."""
    found = json.loads((RESULTS / "forest_speed_qwen3-8b.json").read_text())
    first = found["search"]["warmup"]["ms_per_step"][0]
    middle = statistics.mean(found["small"]["stock"]["ms_per_step"])
    assert pytest.approx(middle / first, rel=0.1) == SLOWER
