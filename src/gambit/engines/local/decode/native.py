"""Builds and calls `decode.c`, a small model's decode step on a CPU; without a compiler there is none of it.

Compiled once a machine, in about a second, and kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gambit.core.errors import UserError
from gambit.storage.cache import cache_folder

_SOURCE = Path(__file__).with_name("decode.c")
# Sums may be reordered, which vector units need; infinities stay what they are (unlike under -ffast-math).
_FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-fassociative-math", "-fopenmp", "-shared", "-fPIC", "-lm",
)  # fmt: skip
_COMPILER_SECONDS = 60

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


@functools.cache
def native_decode() -> NativeDecode | None:
    """The step, or None where it cannot be built: no Linux, no GCC, no x86, no OpenMP of torch's to share."""
    compiler, openmp = shutil.which("gcc"), _loaded_openmp()
    if compiler is None or openmp is None:
        return None
    try:
        return NativeDecode(ctypes.CDLL(str(_library(compiler, openmp))))
    except (OSError, subprocess.SubprocessError, UserError):  # the last: there is no folder for a cache
        return None


def _loaded_openmp() -> str | None:
    """torch's own GNU OpenMP: a second one would bring its own threads, which fight with torch's for the cores."""
    if sys.platform != "linux":
        return None
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    return min(paths, default=None)


def _library(compiler: str, openmp: str) -> Path:
    folder = cache_folder()
    library = folder / f"decode-{_fingerprint([compiler, openmp])}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as building:
            built = Path(building, library.name)
            # The runtime is named by its path, first: whatever else -fopenmp adds finds nothing left to provide.
            command = [compiler, str(_SOURCE), openmp, *_FLAGS, "-Wl,--as-needed", "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILER_SECONDS)
            built.replace(library)  # whole or not at all: another process may be waiting to load it
    return library


def _fingerprint(tools: Sequence[str]) -> str:
    """A folder may be shared by machines whose processors differ."""
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = {line for line in processors if line.startswith(("model name", "flags"))}
    parts = (_SOURCE.read_text(), *_FLAGS, *tools, *sorted(kinds))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
