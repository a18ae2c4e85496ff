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
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from gambit.engines.local.attention import ForwardOutput
from gambit.errors import EngineError, UserError
from gambit.storage.folders import cache_folder

if TYPE_CHECKING:
    from gambit.engines.local.attention import DecodePlan
    from gambit.engines.local.fused import FusedDecoder, Layer, Rotation


_SOURCE = Path(__file__).with_name("decode.c")
# Sums may be reordered, which vector units need; infinities stay what they are (unlike under -ffast-math).
_FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-fassociative-math", "-fopenmp", "-shared", "-fPIC", "-lm",
)  # fmt: skip
_COMPILER_SECONDS = 60
SWITCH = "GAMBIT_NATIVE"  # 0: torch decodes

_Pointer, _Int, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class LayerArgs(ctypes.Structure):
    """`struct layer` in decode.c."""

    _fields_ = (
        *((name, _Pointer) for name in ("attention_norm", "qkv", "qkv_bias", "head_norms", "output", "output_bias")),
        *((name, _Pointer) for name in ("mlp_norm", "gates_ups", "gates_ups_bias", "down", "down_bias")),
        *(("own_keys", _Pointer), ("own_values", _Pointer), ("own_positions", _Int)),
        *(("prompt_keys", _Pointer), ("prompt_values", _Pointer), ("prompt_positions", _Int)),
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


@dataclass(frozen=True, slots=True)
class NativeBuild:
    """The library with the compiled step, or why there is none."""

    library: ctypes.CDLL | None
    reason: str = ""  # for a person; empty where there is one


@functools.cache
def native_build() -> NativeBuild:
    """Builds and loads the step, once a process."""
    if os.environ.get(SWITCH) == "0":
        return NativeBuild(None, f"switched off ({SWITCH}=0)")
    try:
        return NativeBuild(ctypes.CDLL(str(_library(*_tools()))))
    except subprocess.CalledProcessError as error:
        return NativeBuild(None, f"gcc fails: {_last_line(error.stderr)}")
    except (OSError, subprocess.SubprocessError, EngineError) as error:
        return NativeBuild(None, str(error))


def _tools() -> tuple[str, str]:
    """Finds the compiler and torch's own GNU OpenMP."""
    if sys.platform != "linux":
        raise EngineError(f"it is written for Linux, not for {sys.platform}")
    compiler, openmp = shutil.which("gcc"), _loaded_openmp()
    if compiler is None:
        raise EngineError("gcc is not installed")
    if openmp is None:
        raise EngineError("torch has not loaded GNU OpenMP (libgomp), whose threads it would share")
    return compiler, openmp


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if "error" in line] or ["no reason given"]
    return lines[-1]


def _loaded_openmp() -> str | None:
    """Returns torch's OpenMP: the threads of a second one would fight with torch's for the cores."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    return min(paths, default=None)


def _library(compiler: str, openmp: str) -> Path:
    """Returns the library. It runs as this user, so it must be theirs, in a folder that others cannot write to."""
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
    """Returns a folder in the user's cache, or among the temporary files where there is no home directory."""
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
        raise EngineError(f"{path} belongs to somebody else or others may write to it: remove it")
    if stat.S_ISLNK(status.st_mode):
        raise EngineError(f"{path} is a link: remove it")


def _fingerprint(tools: Sequence[str]) -> str:
    """Hashes source, tools and processor: a folder may be shared by machines whose processors differ."""
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = {line for line in processors if line.startswith(("model name", "flags"))}
    parts = (_SOURCE.read_text(), *_FLAGS, *tools, *sorted(kinds))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


BLOCK, FEW, TOGETHER = 32, 4, 32  # as in decode.c
MOST_BYTES = 2 << 30  # of weights: they are in memory twice, as transformers' modules need them and as read here
CACHED_BYTES = 32 << 20  # of weights that even one thread alone goes through faster than torch does with all of them


class CompiledStep:
    """All layers and the output layer, with the weights a second time, in the order in which they are read."""

    def __init__(self, decoder: FusedDecoder, library: ctypes.CDLL) -> None:
        self._decode = library.decode
        self._decode.argtypes, self._decode.restype = [ctypes.POINTER(StepArgs)], None
        self._lanes = ctypes.c_int64.in_dll(library, "lanes").value  # floats of a vector on this processor
        self._is_cached = decoder.nbytes <= CACHED_BYTES
        self._kept: list[torch.Tensor] = []  # what the structures below point into
        layer = decoder.layers[0]
        self._kv_heads, self._heads, self._dim = layer.kv_heads, layer.heads, layer.head_dim
        self._hidden, self._vocabulary = decoder.head.weight.shape
        self._inner = -(-layer.down.weight.shape[0] // self._lanes) * self._lanes
        self._layers = (LayerArgs * len(decoder.layers))(*map(self._layer, decoder.layers))
        self._norm, self._eps = self._keep(decoder.norm.weight), decoder.norm.eps
        self._head, self._head_bias = self._panels(decoder.head.weight), self._bias(decoder.head.bias)
        self._scratch = torch.zeros(0)
        self._pools: tuple[object, ...] = ()  # whose addresses `_layers` has, with their versions

    def _layer(self, layer: Layer) -> LayerArgs:
        missing = self._inner - layer.down.weight.shape[0]
        return LayerArgs(
            attention_norm=self._keep(layer.before_attention.weight), attention_eps=layer.before_attention.eps,
            qkv=self._panels(layer.qkv.weight), qkv_bias=self._bias(layer.qkv.bias),
            head_norms=None if layer.head_norms is None else self._keep(layer.head_norms.weight),
            head_eps=0.0 if layer.head_norms is None else layer.head_norms.eps,
            output=self._panels(layer.output.weight), output_bias=self._bias(layer.output.bias),
            mlp_norm=self._keep(layer.before_mlp.weight), mlp_eps=layer.before_mlp.eps,
            gates_ups=self._gates(layer.gate_up.weight),
            gates_ups_bias=None if layer.gate_up.bias is None else self._gates(layer.gate_up.bias[None]),
            down=self._panels(nn.functional.pad(layer.down.weight, (0, 0, 0, missing))),
            down_bias=self._bias(layer.down.bias), scaling=layer.call.scaling,
        )  # fmt: skip

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _panels(self, matrix: torch.Tensor) -> int:
        return self._keep(panels(matrix, 2 * self._lanes))

    def _gates(self, matrix: torch.Tensor) -> int:
        return self._keep(gate_panels(matrix, self._lanes))

    def _bias(self, bias: torch.Tensor | None) -> int | None:
        return None if bias is None else self._panels(bias[None])

    def is_slow(self, rows: int) -> bool:
        """Checks for few rows and large weights: threads share rows here, torch's share columns."""
        return not self._is_cached and 2 * -(-rows // FEW) < torch.get_num_threads()

    def run(self, x: torch.Tensor, rotation: Rotation, plan: DecodePlan, inner: Sequence[int]) -> ForwardOutput:
        pools = (plan.rows, plan.rows.version, plan.prompts, plan.prompts.version)
        if self._pools != pools:
            self._find_pools(plan, like=x.new_empty(1, self._kv_heads, self._dim))
        states, logits, kept = torch.empty_like(x), x.new_empty(len(x), self._vocabulary), []
        threads = torch.get_num_threads()
        scratch_floats = self._reserve_scratch(plan, threads)
        step = StepArgs(
            rows=len(x), hidden=self._hidden, inner=self._inner, vocabulary=self._vocabulary, kv_heads=self._kv_heads,
            group=self._heads // self._kv_heads, dim=self._dim, threads=threads,
            layers=ctypes.addressof(self._layers), norm=self._norm, head=self._head, head_bias=self._head_bias,
            cosines=rotation[0].data_ptr(), signed_sines=rotation[1].data_ptr(), own_at=plan.own.data_ptr(),
            slots=plan.row_slots.data_ptr(), prompt_lengths=plan.prompt_lengths.data_ptr(), x=x.data_ptr(),
            scratch=self._scratch.data_ptr(), scratch_floats=scratch_floats, eps=self._eps,
        )  # fmt: skip
        for step.first, step.last in pairwise([0, *inner, len(self._layers)]):
            if step.last == len(self._layers):
                step.states, step.logits = states.data_ptr(), logits.data_ptr()
            self._decode(ctypes.byref(step))
            if step.last < len(self._layers):
                kept.append(x.clone())
        return ForwardOutput(states, logits, kept)

    def _reserve_scratch(self, plan: DecodePlan, threads: int) -> int:
        """Makes room for all threads; returns the floats of one."""
        pairs = (self._heads // self._kv_heads + 1) // 2 * 2
        of_row = self._hidden + (2 * self._heads + 2 * self._kv_heads) * self._dim + self._inner
        attention = self._dim * (1 + 2 * pairs) + 2 * (plan.prompt_length + plan.own_length)
        floats = TOGETHER * of_row + attention
        if len(self._scratch) < threads * floats:  # zeros at first: rows that do not exist are read too
            self._scratch = torch.zeros(threads * floats * 3 // 2)
        return floats

    def _find_pools(self, plan: DecodePlan, like: torch.Tensor) -> None:
        """Writes the pools' addresses into the structures; they move when they grow."""
        for index, layer in enumerate(self._layers):
            keys, values = plan.rows.layer(index, like, like)
            layer.own_keys, layer.own_values, layer.own_positions = keys.data_ptr(), values.data_ptr(), keys.shape[3]
            keys, values = plan.prompts.layer(index, like, like)
            layer.prompt_keys, layer.prompt_values = keys.data_ptr(), values.data_ptr()
            layer.prompt_positions = keys.shape[3]
        self._pools = plan.rows, plan.rows.version, plan.prompts, plan.prompts.version


def can_compile(decoder: FusedDecoder) -> bool:
    """Checks that `decode.c` computes what these layers ask for, and that there is memory for it."""
    shapes = {(each.qkv.weight.shape, each.down.weight.shape, each.heads, each.kv_heads) for each in decoder.layers}
    return len(shapes) == 1 and all(map(_is_served, decoder.layers)) and decoder.nbytes <= MOST_BYTES


def _is_served(layer: Layer) -> bool:
    gates, weight, call = torch.linspace(-9, 9, 19), layer.qkv.weight, layer.call
    return (
        (weight.device.type, weight.dtype) == ("cpu", torch.float32)
        and layer.head_dim % BLOCK == 0
        and (call.sliding_window, call.softcap, call.sinks) == (None, None, None)
        and torch.equal(layer.activation(gates), nn.functional.silu(gates))  # it has several classes
    )


def panels(matrix: torch.Tensor, width: int) -> torch.Tensor:
    """Cuts [depth, columns] into [panel, depth, width], filled up with zeros."""
    depth, columns = matrix.shape
    padded = nn.functional.pad(matrix, (0, -columns % width))
    return padded.view(depth, -1, width).transpose(0, 1).contiguous()


def gate_panels(matrix: torch.Tensor, lanes: int) -> torch.Tensor:
    """Cuts [depth, gates then ups] into panels of `lanes` columns from the gates, then those of their ups."""
    depth, columns = matrix.shape
    both = nn.functional.pad(matrix.view(depth, 2, columns // 2), (0, -(columns // 2) % lanes))
    return panels(both.view(depth, 2, -1, lanes).transpose(1, 2).reshape(depth, -1), 2 * lanes)
