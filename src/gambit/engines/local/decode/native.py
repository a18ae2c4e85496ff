"""Builds and calls `decode.c`, the decode step of a small model on a CPU.

Compiled once a machine, in about a second, and kept in the user's cache folder. Where it cannot be had torch decodes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gambit.errors import UserError
from gambit.storage.cache import cache_folder

_SOURCE = Path(__file__).with_name("decode.c")
# Sums may be reordered, which vector units need; infinities stay what they are (unlike under -ffast-math).
_FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-fassociative-math", "-fopenmp", "-shared", "-fPIC", "-lm",
)  # fmt: skip
_COMPILER_SECONDS = 60
SWITCH = "GAMBIT_NATIVE"  # 0: torch decodes

_Pointer, _Int, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class PoolArgs(ctypes.Structure):
    _fields_ = (("keys", _Pointer), ("values", _Pointer), ("positions", _Int))


class LayerArgs(ctypes.Structure):
    """`struct layer` in decode.c."""

    _fields_ = (
        *((name, _Pointer) for name in ("attention_norm", "qkv", "qkv_bias", "head_norms", "output", "output_bias")),
        *((name, _Pointer) for name in ("mlp_norm", "gates_ups", "gates_ups_bias", "down", "down_bias")),
        ("own", PoolArgs),
        ("prompt", PoolArgs),
        *((name, _Float) for name in ("attention_eps", "head_eps", "mlp_eps", "scaling")),
    )


class StepArgs(ctypes.Structure):
    """`struct step` in decode.c."""

    _fields_ = (
        *((name, _Int) for name in ("rows", "hidden", "inner", "vocabulary", "kv_heads", "group", "dim")),
        *((name, _Int) for name in ("threads", "first", "last")),
        *((name, _Pointer) for name in ("layers", "norm", "head", "head_bias", "cosines", "signed_sines")),
        *((name, _Pointer) for name in ("own_at", "slots", "prompt_lengths", "x", "states", "logits", "scratch")),
        ("scratch_floats", _Int),
        ("eps", _Float),
    )


class NativeDecode:
    """The compiled step."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._decode = library.decode
        self._decode.argtypes, self._decode.restype = [ctypes.POINTER(StepArgs)], None
        self.lanes = ctypes.c_int64.in_dll(library, "lanes").value  # floats of a vector on this processor

    def __call__(self, step: StepArgs) -> None:
        self._decode(ctypes.byref(step))


@dataclass(frozen=True, slots=True)
class NativeBuild:
    """The compiled step, or why there is none."""

    decode: NativeDecode | None
    reason: str = ""  # for a person; empty where there is one


def native_decode() -> NativeDecode | None:
    """The step, or None where it cannot be had: torch then does its work."""
    return native_build().decode


@functools.cache
def native_build() -> NativeBuild:
    """Built and loaded once a process."""
    if os.environ.get(SWITCH) == "0":
        return NativeBuild(None, f"switched off ({SWITCH}=0)")
    try:
        return NativeBuild(NativeDecode(ctypes.CDLL(str(_library(*_tools())))))
    except subprocess.CalledProcessError as error:
        return NativeBuild(None, f"gcc fails: {_last_line(error.stderr)}")
    except (OSError, subprocess.SubprocessError, _UnavailableError) as error:
        return NativeBuild(None, str(error))


class _UnavailableError(Exception):
    """Why there is no compiled step, in words for a person."""


def _tools() -> tuple[str, str]:
    """The compiler, and torch's own GNU OpenMP."""
    if sys.platform != "linux":
        raise _UnavailableError(f"it is written for Linux, not for {sys.platform}")
    compiler, openmp = shutil.which("gcc"), _loaded_openmp()
    if compiler is None:
        raise _UnavailableError("gcc is not installed")
    if openmp is None:
        raise _UnavailableError("torch has not loaded GNU OpenMP (libgomp), whose threads it would share")
    return compiler, openmp


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if "error" in line] or ["no reason given"]
    return lines[-1]


def _loaded_openmp() -> str | None:
    """A second one would bring its own threads, which fight with torch's for the cores."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    return min(paths, default=None)


def _library(compiler: str, openmp: str) -> Path:
    """Whatever is loaded runs as this user: it must be theirs, in a folder that nobody else can write to."""
    folder = _private_folder()
    library = folder / f"decode-{_fingerprint([compiler, openmp])}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as building:
            built = Path(building, library.name)
            # The runtime is named by its path, first: whatever else -fopenmp adds finds nothing left to provide.
            command = [compiler, str(_SOURCE), openmp, *_FLAGS, "-Wl,--as-needed", "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILER_SECONDS)
            built.chmod(0o700)
            built.replace(library)  # whole or not at all: another process may be waiting to load it
    _check_private(library)
    return library


def _private_folder() -> Path:
    """In the user's cache, or where there is no home directory among the temporary files."""
    try:
        folder = cache_folder("native")
    except UserError:
        folder = Path(tempfile.gettempdir(), f"gambit-{os.getuid()}", "native")
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder.parent)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    return folder


def _check_private(path: Path) -> None:
    status = path.lstat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _UnavailableError(f"{path} belongs to somebody else or others may write to it: remove it")
    if stat.S_ISLNK(status.st_mode):
        raise _UnavailableError(f"{path} is a link: remove it")


def _fingerprint(tools: Sequence[str]) -> str:
    """A folder may be shared by machines whose processors differ."""
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = {line for line in processors if line.startswith(("model name", "flags"))}
    parts = (_SOURCE.read_text(), *_FLAGS, *tools, *sorted(kinds))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
