"""Identities: hashes of files, of large ones by samples, and versions of installed packages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# A larger file gives its header and samples, so that no start of a run waits for a hash.
WHOLE_FILE_BYTES = 64 << 20
SAMPLES_IN_ALL = 64
SAMPLE_BYTES = 32 << 10
HEADER_BYTES = 8 << 20


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of a file; of one above 64 MiB `sampled:` and the hash of samples."""
    return files_hash([path])


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
