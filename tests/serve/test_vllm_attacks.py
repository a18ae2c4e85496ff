"""A server with vLLM behind it under the attacks that one with the local engine stands."""

import pytest

from gambit.solver import Solver
from support.attacks import attack_everything
from support.engine_setups import HAS_VLLM
from support.serving import serving

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: scripts/install.sh brings its CPU build"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
FAST = {"kv_cache_memory_bytes": 64 << 20, "own_process": False, "self_check": False}


def test_a_server_on_vllm_stands_all_attacks():
    with (
        Solver("pawn", engine="vllm", engine_options=FAST) as solver,
        serving(solver, max_connections=30, header_timeout=600, idle_timeout=600) as served,
    ):
        attack_everything(served)
