"""What commands do before a model is loaded."""

import os

import pytest

from gambit.cli import session
from gambit.cli.session import prepare_libraries

NAME = "VLLM_ENABLE_V1_MULTIPROCESSING"


@pytest.mark.parametrize(
    ("build", "said", "expected"),
    [
        (("0.25.1", "cuda"), None, "1"),
        (("0.25.1", "cuda"), "0", "0"),
        (("0.32.0", "cpu"), None, None),
        (None, None, None),
    ],
    ids=["gpu", "gpu, but the user said no", "cpu", "no vllm"],
)
def test_vllm_gets_a_process_of_its_own_on_a_gpu(monkeypatch, build, said, expected):
    monkeypatch.setattr(session, "installed", lambda: build)
    monkeypatch.delenv(NAME, raising=False)
    if said is not None:
        monkeypatch.setenv(NAME, said)
    prepare_libraries()
    assert os.environ.get(NAME) == expected
