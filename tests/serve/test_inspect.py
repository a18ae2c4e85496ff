"""inspect_ai itself against a server, through benchmarks/inspect_provider.py; `make test-all` installs the package."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from support import ROOT
from support.serving import CHAIN, EASY, KEY, answer_of, serving

PYTHON = Path(os.environ.get("GAMBIT_INSPECT", ROOT / ".venv" / "inspect" / "bin" / "python"))
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not PYTHON.is_file(), reason="inspect_ai is not installed: `make test-all` does it"),
]
EVALUATE = """
import json, sys
import inspect_provider
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

url, folder, *pairs = sys.argv[1:]
samples = [Sample(input=question, target=answer) for question, answer in map(json.loads, pairs)]
task = Task(dataset=samples, solver=generate(), scorer=includes(), config=GenerateConfig(seed=3, max_tokens=300))
[log] = eval(task, model="gambit/pawn", model_base_url=url, log_dir=folder, display="none")
found = [
    {"right": each.scores["includes"].value, "text": each.output.completion, "gambit": each.output.metadata["gambit"],
     "tokens": each.output.usage.output_tokens}
    for each in log.samples or [] if each.error is None
]
print(json.dumps({"status": log.status, "error": str(log.error), "model": log.eval.model, "samples": found}))
"""


def evaluated(served, folder, *pairs, key=KEY):
    words = [str(PYTHON), "-c", EVALUATE, f"{served.url}/v1", str(folder), *map(json.dumps, pairs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks"), "GAMBIT_API_KEY": key,
                   "INSPECT_LOG_LEVEL": "error"}  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_search_is_a_model_of_inspect_with_its_votes_in_the_log(pawn_solver, tmp_path):
    pairs = [(question, answer_of(question)) for question in (EASY, CHAIN)]
    with serving(pawn_solver) as served:
        found = evaluated(served, tmp_path, *pairs)
    assert found["status"] == "success" and found["model"] == "gambit/pawn", found
    assert [sample["right"] for sample in found["samples"]] == ["C", "C"]
    for sample, (_, answer) in zip(found["samples"], pairs, strict=True):
        gambit = sample["gambit"]
        assert gambit["answer"] == answer and answer in sample["text"]
        assert gambit["votes"][0]["answer"] == answer and gambit["votes"][0]["weight"] > 0
        assert sample["tokens"] == gambit["tokens"]["generated"] > 0


def test_a_wrong_key_is_an_error_of_the_evaluation(pawn_solver, tmp_path):
    with serving(pawn_solver) as served:
        found = evaluated(served, tmp_path, (EASY, answer_of(EASY)), key="sk-wrong")
    assert found["status"] == "error" and "401" in found["error"]
