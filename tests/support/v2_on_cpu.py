"""A pytest plugin: vLLM's second model runner, which GPUs use, on a CPU. Its Triton kernels are interpreted.

    PYTHONPATH=tests python -m pytest -p support.v2_on_cpu tests/engines/test_engine_contract.py -k vllm  # 10 minutes

Triton knows no CPU and vLLM looks for one that does, so that it is shown a stand-in; `scripts/install.sh` puts Triton
where nothing else finds it.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(sys.prefix) / "triton-interpreted"


def pytest_configure() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    sys.path.insert(0, str(FOLDER))
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def pytest_sessionfinish() -> None:
    assert "vllm.v1.worker.cpu.model_runner" in sys.modules, "no test has used the second model runner"
