"""What is shared by everything that touches files: locks, appended lines, hashes, the cache folder, versions."""

import errno
import fcntl
import mmap
import multiprocessing
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from gambit.errors import GambitWarning, StorageError, UserError
from gambit.storage.files import (
    append_synced,
    drop_torn_line,
    files_hash,
    opened_to_append,
    package_version,
    read_object,
    read_record,
    whole_lines,
    write_whole,
)
from gambit.storage.folders import LOCK_FILE, cache_folder, locked
from gambit.storage.run_folder import check_writable, find_logs
from support.tables import table


def hold(folder: Path, has_it: multiprocessing.Event, may_end: multiprocessing.Event) -> None:
    with locked(folder):
        has_it.set()
        may_end.wait(30)


def test_a_lock_is_held_by_one_process_and_freed_with_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    has_it, may_end = context.Event(), context.Event()
    folder = tmp_path / "new" / "folder"
    other = context.Process(target=hold, args=(folder, has_it, may_end))
    other.start()
    assert has_it.wait(30)
    with pytest.raises(UserError, match=f"another run is writing to {folder}: wait until it has ended"), locked(folder):
        pass
    other.kill()
    other.join()
    assert [path.name for path in folder.iterdir()] == [LOCK_FILE], "a file without its lock"
    with locked(folder):
        pass
    assert list(folder.iterdir()) == []


def hold_and_fork(folder: Path, has_it: multiprocessing.Event, end: int) -> None:
    with locked(folder):
        child = os.fork()  # as vLLM starts its engine
        if child == 0:
            has_it.set()
            os.read(end, 1)
            os._exit(0)
        os.waitpid(child, 0)


def test_a_child_that_outlives_its_killed_parent_does_not_hold_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    has_it, (end, to_end) = context.Event(), os.pipe()
    parent = context.Process(target=hold_and_fork, args=(tmp_path, has_it, end))
    parent.start()
    assert has_it.wait(30)
    parent.kill()
    parent.join()
    try:
        with locked(tmp_path):
            pass
    finally:
        os.write(to_end, b".")


def test_a_lock_leaves_nothing_behind_but_what_was_written_under_it(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]
    with locked(tmp_path / "gone"):
        shutil.rmtree(tmp_path / "gone")


def test_a_lock_file_that_its_holder_has_removed_in_between_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last holder ends between our opening the file and our locking it, and the next run makes another one."""

    def late_flock(file: IO[bytes], how: int) -> None:
        (tmp_path / LOCK_FILE).unlink()
        (tmp_path / LOCK_FILE).touch()
        flock(file, how)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", late_flock)
    with pytest.raises(UserError, match="another run is writing"), locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: IO[bytes], how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    said = r"cannot be locked \(No locks available\): let no second run"
    with pytest.warns(GambitWarning, match=said), locked(tmp_path):
        (tmp_path / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@table("torn", ["", "x", "y" * 200_000])
def test_a_torn_line_is_dropped_and_the_next_one_stands_by_itself(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "lines"
    path.write_text("ä\n" + "long " * 60_000 + "\n" + torn)
    before = [line for _, line in whole_lines(path)]
    drop_torn_line(path)
    with path.open("ab") as file:
        append_synced(file, "next")
    assert [line for _, line in whole_lines(path)] == [*before, "next\n"] and len(before) == 2
    assert [number for number, _ in whole_lines(path)] == [1, 2, 3]


def test_a_folder_in_place_of_a_file_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"cannot write to {tmp_path}: Is a directory"):
        drop_torn_line(tmp_path)
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(UserError, match=r"no events\.jsonl in"):
        find_logs(tmp_path)


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write to .*: File name too long"):
        check_writable(tmp_path / ("a" * 300))


def test_lines_that_cannot_be_read_are_refused_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"one\nna\xefve\n")
    with pytest.raises(UserError, match=r"latin, line 2: damaged \(byte 0xef is not UTF-8\)"):
        list(whole_lines(tmp_path / "latin"))
    with pytest.raises(UserError, match=f"cannot read {tmp_path}: Is a directory"):
        list(whole_lines(tmp_path))


def test_lines_of_a_file_that_is_not_there_are_none(tmp_path: Path) -> None:
    drop_torn_line(tmp_path / "absent")
    assert list(whole_lines(tmp_path / "absent")) == [] and not (tmp_path / "absent").exists()


def test_a_large_file_is_sampled_and_a_small_one_hashed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 40)
    whole = files_hash([path])
    assert len(whole) == 64
    monkeypatch.setattr("gambit.storage.files.WHOLE_FILE_BYTES", 100)
    sampled = files_hash([path])
    assert sampled.startswith("sampled:")
    path.write_bytes(bytes(range(256)) * 39 + bytes(256))
    assert files_hash([path]) != sampled
    other = tmp_path / "other"
    other.write_bytes(b"x")
    assert files_hash([path, other]) != files_hash([other, path])


def test_names_and_sizes_of_files_are_in_their_hash(tmp_path: Path) -> None:
    for folder, names in (("a", ("x", "y")), ("b", ("x", "z")), ("c", ("x", "y"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_bytes(b"\0" * 9)
    same, renamed, again = ([*sorted((tmp_path / folder).iterdir())] for folder in "abc")
    assert files_hash(same) == files_hash(again) != files_hash(renamed)
    # Longer files whose samples are alike: nothing but their size tells them apart.
    (tmp_path / "a" / "y").write_bytes(b"\0" * (1 << 20))
    (tmp_path / "c" / "y").write_bytes(b"\0" * (2 << 20))
    assert files_hash(same) != files_hash(again)


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


def full_disk(*args: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_line_that_is_written_in_pieces_is_whole_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    with opened_to_append(tmp_path / "lines") as file:
        append_synced(file, "ä long line")
        append_synced(file, "next")
    assert (tmp_path / "lines").read_bytes() == "ä long line\nnext\n".encode()


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "lines", os.write
    with opened_to_append(path) as file:
        append_synced(file, "first")
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]) and full_disk())
        with pytest.raises(StorageError, match=f"^cannot write to {path}: No space left on device$"):
            append_synced(file, "second")
    assert path.read_bytes() == b"first\n"


def test_a_line_that_did_not_reach_the_disk_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(descriptor: int) -> None:
        raise OSError("odd")

    monkeypatch.setattr(os, "fsync", odd)
    with opened_to_append(tmp_path / "lines") as file, pytest.raises(StorageError, match=r"lines: odd$"):
        append_synced(file, "first")
    assert (tmp_path / "lines").read_bytes() == b""


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_line_is_not_written_into_a_file_that_is_no_longer_there(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "lines"
    with opened_to_append(path) as file:
        path.unlink()
        if is_replaced:
            path.write_text("other\n")
        why = "another file stands in its place" if is_replaced else "No such file or directory"
        with pytest.raises(StorageError, match=f"^cannot write to {path}: {why}$"):
            append_synced(file, "first")
    assert not is_replaced or path.read_text() == "other\n"


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"^cannot write to {tmp_path}: Is a directory$"):
        opened_to_append(tmp_path)


def test_a_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "file.json", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))
    write_whole(path, b"content")
    assert synced == [False, True], "the file first, then the folder that names it"
    assert path.read_bytes() == b"content" and [each.name for each in tmp_path.iterdir()] == ["file.json"]
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StorageError, match=f"^cannot write {path}: No space left on device$"):
        write_whole(path, b"other")
    assert path.read_bytes() == b"content" and [each.name for each in tmp_path.iterdir()] == ["file.json"]


def test_lines_without_an_end_are_found_from_behind(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for content, kept in [(b"", b""), (b"torn", b""), (b"\n", b"\n"), (b"a\nb", b"a\n"), (b"a\nb\n", b"a\nb\n")]:
        path.write_bytes(content)
        drop_torn_line(path)
        assert path.read_bytes() == kept
    for length in (mmap.PAGESIZE - 2, mmap.PAGESIZE - 1, mmap.PAGESIZE, 200_000):
        path.write_bytes(b"a\n" + b"x" * length)
        drop_torn_line(path)
        assert path.read_bytes() == b"a\n"
        path.write_bytes(b"x" * length)
        drop_torn_line(path)
        assert path.read_bytes() == b""


@dataclass(frozen=True)
class Figures:
    name: str
    sizes: tuple[int, ...] = ()


def test_a_record_and_an_object_are_read_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text('{"name": "ä", "sizes": [1, 2]}', encoding="utf-8")
    assert read_record(Figures, path, "figures", "write them again") == Figures("ä", (1, 2))
    assert read_object(path, "figures", "write them again") == {"name": "ä", "sizes": [1, 2]}


@table(
    ("content", "as_record", "as_object"),
    [
        (b'{"name": "a", "sizes": [1, "x"]}', r"is not figures: sizes\.1: .+", None),
        (b"[]", "is not figures: .+", "is not figures: it must be an object, not list"),
        (b"{", "is not figures: .+", "is not figures: .+"),
        (b'{"name": "\xff"}', "is not figures: .+", "is not figures: .+"),
    ],
)
def test_a_file_that_holds_something_else_is_named_with_the_fix(
    tmp_path: Path, content: bytes, as_record: str, as_object: str | None
) -> None:
    path = tmp_path / "figures.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path} {as_record}; write them again$"):
        read_record(Figures, path, "figures", "write them again")
    if as_object is not None:
        with pytest.raises(UserError, match=f"^{path} {as_object}; write them again$"):
            read_object(path, "figures", "write them again")


def test_a_record_without_its_file_is_named_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    with pytest.raises(UserError, match=rf"^{path} cannot be read \(No such file or directory\): write them again$"):
        read_record(Figures, path, "figures", "write them again")
