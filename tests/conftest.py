"""Fixtures over the material next to the repository (../shared); never needed for coverage of a form or rule."""

import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# ../shared next to the repository, or further up where this is a git worktree of it
SHARED = next((folder / "shared" for folder in ROOT.parents if (folder / "shared").is_dir()), ROOT.parent / "shared")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    return _existing(SHARED / "data")


@pytest.fixture(scope="session")
def shared_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = _existing(SHARED / "tokenizers" / "tokenizers.tar.xz")
    folder = tmp_path_factory.mktemp("tokenizers")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder


def _existing(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path} is not there: the problems and tokenizers next to the repository are not shipped with it")
    return path
