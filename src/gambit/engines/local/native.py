"""Builds and calls `decode.c`, the small operations of a decode step on a CPU; without a compiler there is none of it.

Compiled once a machine, in about a second, and kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from gambit.engines.local.attention import DecodePlan, LayerCall

_SOURCE = Path(__file__).with_name("decode.c")
# Sums may be reordered, which vector units need; infinities stay what they are (unlike under -ffast-math).
_FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-fassociative-math", "-fopenmp", "-shared", "-fPIC", "-lm",
)  # fmt: skip
_HEAD_DIM = 32  # wider heads gain little over short rows, and over long ones torch is a third faster
_COMPILER_SECONDS = 60

_Pointer, _Int, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _PoolArgs(ctypes.Structure):
    _fields_ = (("keys", _Pointer), ("values", _Pointer), ("positions", _Int))


class _StepArgs(ctypes.Structure):
    """`struct step` in decode.c."""

    _fields_ = (
        *((name, _Int) for name in ("rows", "kv_heads", "group", "dim", "threads")),
        *((name, _Pointer) for name in ("qkv", "norm", "cosines", "signed_sines")),
        ("own", _PoolArgs),
        ("prompt", _PoolArgs),
        *((name, _Pointer) for name in ("own_at", "slots", "prompt_lengths", "out", "scratch")),
        ("scratch_floats", _Int),
        ("eps", _Float),
        ("scaling", _Float),
    )


class NativeOps:
    """The compiled operations; all tensors are float32 and contiguous on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend, self._rms_norm, self._gated_silu = library.attend, library.rms_norm, library.gated_silu
        self._attend.argtypes = [ctypes.POINTER(_StepArgs)]
        self._rms_norm.argtypes = [_Int, _Int, _Pointer, _Pointer, _Float, _Pointer]
        self._gated_silu.argtypes = [_Int, _Int, _Pointer, _Pointer]
        for function in (self._attend, self._rms_norm, self._gated_silu):
            function.restype = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [n, dim]"""
        out = torch.empty_like(x)
        self._rms_norm(*x.shape, x.data_ptr(), weight.data_ptr(), eps, out.data_ptr())
        return out

    def gated_silu(self, gates_ups: torch.Tensor) -> torch.Tensor:
        """silu(gates) × ups of [n, gates then ups]."""
        n, width = gates_ups.shape
        out = gates_ups.new_empty(n, width // 2)
        self._gated_silu(n, width // 2, gates_ups.data_ptr(), out.data_ptr())
        return out

    def attend(
        self,
        index: int,
        qkv: torch.Tensor,
        head_norms: tuple[torch.Tensor, float] | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        plan: DecodePlan,
        call: LayerCall,
        kv_heads: int,
    ) -> torch.Tensor:
        """Head norms, rotary positions, new keys and values, attention: qkv [n, heads, dim] to [n, queries × dim]."""
        n, heads, dim = qkv.shape
        queries = heads - 2 * kv_heads
        group = queries // kv_heads
        layer = plan.store.layer(index, qkv[:, queries:-kv_heads], qkv[:, -kv_heads:])
        out = qkv.new_empty(n, queries * dim)
        pairs = (group + 1) // 2 * 2
        scratch_floats = dim * (1 + 2 * pairs) + 2 * (plan.prompt_length + plan.own_length)
        threads = torch.get_num_threads()
        scratch = qkv.new_empty(threads, scratch_floats)
        weight, eps = head_norms or (None, 0.0)
        step = _StepArgs(
            n, kv_heads, group, dim, threads,
            qkv.data_ptr(), None if weight is None else weight.data_ptr(), *(part.data_ptr() for part in rotation),
            _PoolArgs(layer.row_keys.data_ptr(), layer.row_values.data_ptr(), layer.row_keys.shape[3]),
            _PoolArgs(layer.prompt_keys.data_ptr(), layer.prompt_values.data_ptr(), layer.prompt_keys.shape[3]),
            plan.own.data_ptr(), plan.row_slots.data_ptr(), plan.prompt_lengths.data_ptr(),
            out.data_ptr(), scratch.data_ptr(), scratch_floats, eps, call.scaling,
        )  # fmt: skip
        self._attend(ctypes.byref(step))
        return out


def serves(call: LayerCall, dim: int) -> bool:
    """Whether `NativeOps.attend` computes what this layer asks for, and no slower than torch."""
    return call.sliding_window is None and call.softcap is None and call.sinks is None and dim == _HEAD_DIM


@functools.cache
def native_ops() -> NativeOps | None:
    """The operations, or None where they cannot be built: no Linux, no GCC, no x86, no OpenMP of torch's to share."""
    compiler, openmp = shutil.which("gcc"), _loaded_openmp()
    if compiler is None or openmp is None:
        return None
    try:
        return NativeOps(ctypes.CDLL(str(_library(compiler, openmp))))
    except (OSError, subprocess.SubprocessError):
        return None


def _loaded_openmp() -> str | None:
    """torch's own GNU OpenMP: a second one would bring its own threads, which fight with torch's for the cores."""
    if sys.platform != "linux":
        return None
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    return min(paths, default=None)


def _library(compiler: str, openmp: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gambit"
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
