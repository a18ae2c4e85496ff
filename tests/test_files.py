"""What is shared by everything that touches files: locks, appended lines, hashes, the cache folder, versions."""

import multiprocessing
from pathlib import Path

import pytest

from gambit.core.errors import UserError
from gambit.storage.cache import cache_folder
from gambit.storage.hashing import file_hash, files_hash
from gambit.storage.lines import CHUNK_BYTES, append_synced, drop_torn_line, whole_lines
from gambit.storage.locks import locked
from gambit.storage.versions import package_version


def hold(path: Path, has_it: multiprocessing.Event, may_end: multiprocessing.Event) -> None:
    with locked(path, "taken"):
        has_it.set()
        may_end.wait(30)


def test_a_lock_is_held_by_one_process_and_freed_with_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    has_it, may_end = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "new" / "lock", has_it, may_end))
    other.start()
    assert has_it.wait(30)
    with pytest.raises(UserError, match="wait for it"), locked(tmp_path / "new" / "lock", "wait for it"):
        pass
    other.kill()
    other.join()
    with locked(tmp_path / "new" / "lock", "wait for it"):
        pass


@pytest.mark.parametrize("torn", ["", "x", "y" * (2 * CHUNK_BYTES + 5)])
def test_a_torn_line_is_dropped_and_the_next_one_stands_by_itself(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "lines"
    path.write_text("ä\n" + "long " * CHUNK_BYTES + "\n" + torn)
    before = [line for _, line in whole_lines(path)]
    drop_torn_line(path)
    with path.open("ab") as file:
        append_synced(file, "next")
    assert [line for _, line in whole_lines(path)] == [*before, "next\n"] and len(before) == 2
    assert [number for number, _ in whole_lines(path)] == [1, 2, 3]


def test_lines_of_a_file_that_is_not_there_are_none(tmp_path: Path) -> None:
    drop_torn_line(tmp_path / "absent")
    assert list(whole_lines(tmp_path / "absent")) == [] and not (tmp_path / "absent").exists()


def test_a_large_file_is_sampled_and_a_small_one_hashed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 40)
    whole = file_hash(path)
    assert len(whole) == 64
    monkeypatch.setattr("gambit.storage.hashing.WHOLE_FILE_BYTES", 100)
    sampled = file_hash(path)
    assert sampled.startswith("sampled:")
    path.write_bytes(bytes(range(256)) * 39 + bytes(256))
    assert file_hash(path) != sampled
    other = tmp_path / "other"
    other.write_bytes(b"x")
    assert files_hash([path, other]) != files_hash([other, path])


def test_the_cache_folder_is_xdgs_or_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder("benchmarks") == Path("/somewhere/gambit/benchmarks")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/gambit")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        cache_folder()


def test_versions_of_what_is_installed_and_what_is_not() -> None:
    assert package_version("torch") and package_version("no-such-package") is None
