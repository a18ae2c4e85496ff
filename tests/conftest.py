"""Fixtures shared by all tests."""

import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing may be downloaded
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: two threads waiting for each other are slower than one

import pytest
from tiny import save_tiny

warnings.filterwarnings("ignore", message="no scorer is known")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny random model that `--model` takes."""
    return save_tiny(tmp_path_factory.mktemp("model"))
