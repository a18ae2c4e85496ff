"""A verifier on a vLLM engine of its own: the same scores, each token computed once, and what its death does."""

import os
import signal
import warnings
from importlib.util import find_spec

import pytest

from gambit import events as ev
from gambit.config.options import EngineConfig, SearchConfig
from gambit.errors import EngineError, UserError
from gambit.pawn import MODEL_FOLDER, Level, Split, generate
from gambit.solver import Solver
from gambit.types import Aggregation, StopReason
from gambit.verifiers.families import read_config
from gambit.verifiers.names import parse_verifier
from gambit.verifiers.transformers import start_local_verifier
from gambit.verifiers.vllm import environment_for, memory_options, prepare_vllm_verifier
from support.verifiers import CLOSE, QUESTION, THOUGHTS, own, readings

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: scripts/install.sh brings it"),
]
PUZZLE = next(generate(Split.DEV, 0, Level.EASY))
QUICK = SearchConfig(capacity=4, swap_size=1, check_interval=12, warmup_tokens=12, islands=1)
BLOCK = 32  # tokens


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """With pawn's vocabulary, which has more ids than there are letters."""
    vocab_size = read_config(MODEL_FOLDER)["vocab_size"]
    return own(tmp_path_factory.mktemp("own"), vocab_size=vocab_size)


def solver_with(verifier, engine, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scorer = f"verifier:{verifier.folder}"
        return Solver("pawn", scorer=scorer, engine=engine, device="cpu", verifier_engine="vllm", **options)


def server_of(solver):
    return solver._parts.verifier.verifier


def test_a_search_on_vllm_with_a_verifier_on_vllm(verifier):
    """Then its process is killed, which ends the next search with a reason, and one that may do without goes on."""
    local = start_local_verifier(parse_verifier(f"verifier:{verifier.folder}"), EngineConfig(), "cpu")
    with solver_with(verifier, "vllm") as solver:
        reader = solver._parts.verifier.verifier
        found = reader.read(readings())
        assert [each.score for each in found] == pytest.approx(verifier.scores(QUESTION, THOUGHTS), **CLOSE)
        again = reader.read(readings())
        assert [each.score for each in again] == pytest.approx([each.score for each in found], **CLOSE)
        assert all(each.num_tokens <= BLOCK for each in again), "all but the last block is in the cache"
        assert reader.info.context_tokens == 1024 and reader.info.aggregation is Aggregation.MEAN
        seen, events = [], []
        read = reader.read
        reader.read = lambda batch: seen.append((batch, read(batch))) or seen[-1][1]
        result = solver.solve(PUZZLE.text, QUICK, on_event=events.append)
        assert result.stop_reason is StopReason.COMPLETED and result.verifier.thoughts > 8
        for batch, scores in seen:
            expected = [each.score for each in local.read(batch)]
            assert [each.score for each in scores] == pytest.approx(expected, **CLOSE)
        judged = [score for event in events if isinstance(event, ev.Verified) for score in event.scores]
        assert len(judged) == result.verifier.thoughts
        os.kill(server_of(solver).pid, signal.SIGKILL)
        with pytest.raises(
            EngineError, match=r"the verifier .* failed: its vLLM process \d+ has ended \(killed by signal 9"
        ):
            solver.solve(PUZZLE.text, QUICK)
        optional = solver.config.model_copy(update={"verifier_optional": True})
        object.__setattr__(solver._parts, "config", optional)  # a second solver would start vLLM twice more
        result = solver.solve(PUZZLE.text, QUICK)
        assert result.stop_reason is StopReason.COMPLETED and "killed by signal 9" in result.verifier.lost


def test_a_process_that_does_not_start_says_why(verifier):
    name = parse_verifier(f"verifier:qwen-prm:{verifier.folder}")
    with pytest.raises(
        EngineError, match=r"does not start on vLLM: .* have no score\.0\.weight, .*--verifier-memory 0\.3"
    ):
        prepare_vllm_verifier(name, EngineConfig(), "cpu")()


def test_memory_in_bytes_says_what_is_left_for_keys_and_values():
    gib = 1 << 30
    options = memory_options(EngineConfig(verifier_memory="20GB"), 140 * gib, 3 * gib)
    assert options["kv_cache_memory_bytes"] == 15 * gib and options["gpu_memory_utilization"] == pytest.approx(1 / 7)
    assert "kv_cache_memory_bytes" not in memory_options(EngineConfig(verifier_memory="0.2"), 140 * gib, 3 * gib)
    with pytest.raises(UserError, match=r"--verifier-memory 4GB: its weights take 3,072 MiB"):
        memory_options(EngineConfig(verifier_memory="4GB"), 140 * gib, 3 * gib)


def test_a_share_of_the_gpu_is_mps_to_give(verifier, tmp_path, monkeypatch):
    assert environment_for("cuda:1", 0.4)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environment_for("cuda:1")
    name, config = parse_verifier(f"verifier:{verifier.folder}"), EngineConfig(verifier_gpu_share=0.4)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with pytest.raises(UserError, match=r"--verifier-gpu-share needs NVIDIA's MPS, and none runs here"):
        prepare_vllm_verifier(name, config, "cuda")
    with pytest.raises(UserError, match=r"is of a GPU, and the verifier runs on cpu"):
        prepare_vllm_verifier(name, config, "cpu")
    (tmp_path / "control").touch()
    assert callable(prepare_vllm_verifier(name, config, "cuda"))
