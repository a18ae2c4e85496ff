"""The engine on vLLM's second model runner, which GPUs use: a part of its contract, kernels interpreted on a CPU."""

import os
import subprocess
import sys

import pytest

from support import ROOT
from support.engine_setups import HAS_VLLM
from support.v2_on_cpu import FOLDER

TESTS = ROOT / "tests"
CONTRACT = [
    "test_a_greedy_trace_is_what_transformers_says[vllm-async]",
    "test_a_greedy_child_continues_exactly_like_its_parent[vllm-async]",
    "test_scores_come_from_the_states_at_the_scorers_position_and_layers[vllm-async-boundary-layers0]",
    "test_scores_come_from_the_states_at_the_scorers_position_and_layers[vllm-async-boundary-layers2]",
    "test_a_search_in_a_third_of_the_room_keeps_every_invariant[vllm-async]",
    "test_confidence_is_reported_at_the_end_where_it_was_asked_for[vllm-async]",
    "test_embeddings_are_the_projected_states_of_their_thoughts[vllm-async-boundary]",
]


@pytest.mark.system
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.skipif(not FOLDER.exists(), reason="Triton is not installed beside it: scripts/install.sh brings it")
def test_the_contract_holds_on_the_second_model_runner():
    chosen = [f"{TESTS / 'engines/test_engine_contract.py'}::{name}" for name in CONTRACT]
    chosen.append(f"{TESTS / 'engines/test_vllm_engine.py'}::test_the_self_check_passes")
    chosen.append(f"{TESTS / 'engines/test_vllm_schemas.py'}::test_answers_fit_from_the_end_of_thinking_on")
    chosen.append(f"{TESTS / 'engines/v2_only.py'}")
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "support.v2_on_cpu", "-p", "no:cacheprovider", *chosen],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-300:]
