"""Files that survive a kill or a full disk (lines, whole or absent files, JSON objects, records), and their hashes."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from gambit.errors import StorageError, UserError, reason_of

SomeRecord = TypeVar("SomeRecord")
PARTIAL = ".partial"  # the end of a name of what is not whole yet


def opened_to_append(path: Path) -> BinaryIO:
    """Opens a file for `append_synced`; raises StorageError if that fails."""
    try:
        return path.open("ab")
    except OSError as error:
        raise StorageError(f"cannot write to {path}: {reason_of(error)}") from error


def append_synced(file: BinaryIO, line: str) -> None:
    """Appends a line and waits until it is on the disk; on a full disk, removes the part that was written."""
    descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
    rest = line.encode() + b"\n"
    try:
        while rest:  # past Python's buffer, which would try again at its end what has failed here
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        if not os.path.samestat(os.stat(file.name), os.fstat(descriptor)):  # noqa: PTH116
            raise FileNotFoundError(0, "another file stands in its place")
    except OSError as error:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise StorageError(f"cannot write to {file.name}: {reason_of(error)}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is complete or absent under its name, also after a power cut."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)  # as the file that it takes the place of
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {reason_of(error)}") from error


def whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines that have their end, numbered from 1; none if there is no such file."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line.decode()
    except UnicodeDecodeError as error:
        damaged = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise UserError(f"{path}, line {number}: damaged ({damaged})") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason_of(error)}") from error


def drop_torn_line(path: Path) -> None:
    """Cuts off a last line without its end, so that the next one does not continue it."""
    if not path.exists():
        return
    try:
        with path.open("r+b") as file:
            content = file.read()
            keep = content.rfind(b"\n") + 1
            if keep < len(content):
                file.truncate(keep)
                os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(f"cannot write to {path}: {reason_of(error)}") from error


def check_text(text: str, where: str) -> None:
    """Raises UserError for half of a surrogate pair: no tokenizer, file or page takes one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):X} at character {error.start + 1:,}"
        raise UserError(f"{where} has half of a surrogate pair ({half}): write the text in UTF-8") from error


# -- JSON objects ----------------------------------------------------------------------------------------------


def read_object(path: Path, what: str, fix: str) -> dict[str, Any]:
    """Returns the JSON object in a file; `what` it should be and the `fix` are for the error message."""
    return object_in(_read(path, what, fix), str(path), what, fix)


def object_in(text: str, where: str, what: str, fix: str) -> dict[str, Any]:
    """Returns the JSON object in a text, such as a line of a file."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not {what}: {error}; {fix}") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} is not {what}: it must be an object, not {type(found).__name__}; {fix}")
    return found


def read_record(kind: type[SomeRecord], path: Path, what: str, fix: str) -> SomeRecord:
    """Returns the record in a file, checked by pydantic: a model, or a dataclass."""
    return record_in(kind, _read(path, what, fix), str(path), what, fix)


def record_in(kind: type[SomeRecord], text: str, where: str, what: str, fix: str) -> SomeRecord:
    """Returns the record in a text. An error names the first field that is wrong."""
    try:
        found: SomeRecord = _adapter(kind).validate_json(text)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        place = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        value = f", not {first['input']!r}" if first["type"] == "literal_error" else ""
        raise UserError(f"{where} is not {what}: {place}{first['msg']}{value}; {fix}") from error
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _read(path: Path, what: str, fix: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({reason_of(error)}): {fix}") from error
    except ValueError as error:
        raise UserError(f"{path} is not {what}: {reason_of(error)}; {fix}") from error


# -- identities -------------------------------------------------------------------------------------------------


# A larger file gives its header and samples, so that no start of a run waits for a hash.
WHOLE_FILE_BYTES = 64 << 20
SAMPLES_IN_ALL = 64
SAMPLE_BYTES = 32 << 10
HEADER_BYTES = 8 << 20


def files_hash(files: Sequence[Path]) -> str:
    """Returns one hash of several files in their order.

    One file of up to 64 MiB gives its plain SHA-256. Larger ones, or several, give `sampled:` and a hash of names,
    sizes, safetensors headers and 64 pieces from all over the files: other weights, another dtype or another
    quantisation change it, and it takes well under a second whatever the size.
    """
    if len(files) == 1 and files[0].stat().st_size <= WHOLE_FILE_BYTES:
        return hashlib.sha256(files[0].read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in files:
        for piece in _samples(file, max(1, SAMPLES_IN_ALL // len(files))):
            digest.update(piece)
    return f"sampled:{digest.hexdigest()}"


def _samples(file: Path, count: int) -> Iterator[bytes]:
    size = file.stat().st_size
    yield f"{file.name} {size}".encode()
    with file.open("rb") as content:
        head = content.read(8)
        yield head + content.read(min(int.from_bytes(head, "little"), HEADER_BYTES))  # names, shapes, dtypes
        for i in range(count):
            content.seek(i * max(0, size - SAMPLE_BYTES) // max(1, count - 1))
            yield content.read(SAMPLE_BYTES)


def package_version(name: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
