"""Builds and calls `decode.c`, the decode step of a small model on a CPU.

It is compiled once a machine, in about a second, and kept in the user's cache folder. Without it torch decodes.
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
# Sums may be reordered, which vector units need. Infinities stay infinite, unlike under -ffast-math.
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


@functools.cache
def native_library() -> ctypes.CDLL | str:
    """Builds and loads the compiled step, once a process. Returns the reason, for a person, if there is none."""
    if os.environ.get(SWITCH) == "0":
        return f"switched off ({SWITCH}=0)"
    try:
        return ctypes.CDLL(str(_built()))
    except subprocess.CalledProcessError as error:
        complaints = [line for line in error.stderr.decode(errors="replace").splitlines() if "error" in line]
        return f"gcc fails: {complaints[-1] if complaints else 'no reason given'}"
    except (OSError, subprocess.SubprocessError, EngineError, UserError) as error:
        return str(error)


def _built() -> Path:
    """Returns the library. It runs as this user, so it must be theirs, in a folder that others cannot write to."""
    if sys.platform != "linux":
        raise EngineError(f"it is written for Linux, not for {sys.platform}")
    compiler = shutil.which("gcc")
    if compiler is None:
        raise EngineError("gcc is not installed")
    # torch's own OpenMP: the threads of a second one would fight with torch's for the cores.
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line]
    if not loaded:
        raise EngineError("torch has not loaded GNU OpenMP (libgomp), whose threads it would share")
    openmp, folder = min(loaded), cache_folder("native")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    library = folder / f"decode-{_fingerprint([compiler, openmp])}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as building:
            built = Path(building, library.name)
            # The runtime is named by its path, first: another one that -fopenmp adds is then not needed.
            command = [compiler, str(_SOURCE), openmp, *_FLAGS, "-Wl,--as-needed", "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILER_SECONDS)
            built.chmod(0o700)
            built.replace(library)  # whole or not at all: another process may be waiting to load it
    _check_private(library)
    return library


def _check_private(path: Path) -> None:
    status = path.lstat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EngineError(f"{path} belongs to another user or others may write to it: remove it")
    if stat.S_ISLNK(status.st_mode):
        raise EngineError(f"{path} is a link: remove it")


def _fingerprint(tools: Sequence[str]) -> str:
    """Hashes source, tools and processor: a folder may be shared by machines whose processors differ."""
    processors = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = {line for line in processors if line.startswith(("model name", "flags"))}
    inputs = (_SOURCE.read_text(), *_FLAGS, *tools, *sorted(kinds))
    return hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]


BLOCK, FEW, TOGETHER = 32, 4, 32  # as in decode.c
MOST_BYTES = 2 << 30  # of weights: they are in memory twice, as transformers' modules need them and as read here
CACHED_BYTES = 32 << 20  # of weights: one thread reads so many faster than torch does with all threads


class CompiledStep:
    """All layers and the output layer, with the weights a second time, in the order in which they are read."""

    def __init__(self, decoder: FusedDecoder, library: ctypes.CDLL) -> None:
        self._decode = library.decode
        self._decode.argtypes, self._decode.restype = [ctypes.POINTER(StepArgs)], None
        self._lanes = ctypes.c_int64.in_dll(library, "lanes").value  # floats of a vector on this processor
        self._is_cached = decoder.nbytes <= CACHED_BYTES
        self._kept: list[torch.Tensor] = []  # the tensors that the structures below point into
        self._scratch = torch.zeros(0)
        self._pools: tuple[object, ...] = ()  # those whose addresses `_layers` has, with their versions
        layer, head = decoder.layers[0], decoder.head
        self._layers = (LayerArgs * len(decoder.layers))(*map(self._layer, decoder.layers))
        self._step = StepArgs(
            hidden=head.weight.shape[0], inner=layer.down.weight.shape[0] + self._missing(layer),
            vocabulary=head.weight.shape[1], kv_heads=layer.kv_heads, group=layer.heads // layer.kv_heads,
            dim=layer.head_dim, layers=ctypes.addressof(self._layers), norm=self._keep(decoder.norm.weight),
            eps=decoder.norm.eps, head=self._panels(head.weight), head_bias=self._bias(head.bias),
        )  # fmt: skip

    def _missing(self, layer: Layer) -> int:
        """Returns how many columns fill the layer's last panel of gates up."""
        return -layer.down.weight.shape[0] % self._lanes

    def _layer(self, layer: Layer) -> LayerArgs:
        bias = layer.gate_up.bias
        gates_bias = None if bias is None else self._keep(gate_panels(bias[None], self._lanes))
        return LayerArgs(
            attention_norm=self._keep(layer.before_attention.weight), attention_eps=layer.before_attention.eps,
            qkv=self._panels(layer.qkv.weight), qkv_bias=self._bias(layer.qkv.bias),
            head_norms=None if layer.head_norms is None else self._keep(layer.head_norms.weight),
            head_eps=0.0 if layer.head_norms is None else layer.head_norms.eps,
            output=self._panels(layer.output.weight), output_bias=self._bias(layer.output.bias),
            mlp_norm=self._keep(layer.before_mlp.weight), mlp_eps=layer.before_mlp.eps,
            gates_ups=self._keep(gate_panels(layer.gate_up.weight, self._lanes)), gates_ups_bias=gates_bias,
            down=self._panels(nn.functional.pad(layer.down.weight, (0, 0, 0, self._missing(layer)))),
            down_bias=self._bias(layer.down.bias), scaling=layer.call.scaling,
        )  # fmt: skip

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _panels(self, matrix: torch.Tensor) -> int:
        return self._keep(panels(matrix, 2 * self._lanes))

    def _bias(self, bias: torch.Tensor | None) -> int | None:
        return None if bias is None else self._panels(bias[None])

    def is_slow(self, rows: int) -> bool:
        """Returns True for few rows and large weights: threads share rows here, torch's share columns."""
        return not self._is_cached and 2 * -(-rows // FEW) < torch.get_num_threads()

    def run(self, x: torch.Tensor, rotation: Rotation, plan: DecodePlan, inner: Sequence[int]) -> ForwardOutput:
        """Runs all layers; x [n, hidden] is overwritten."""
        step, last = self._step, len(self._layers)
        states, logits, kept = torch.empty_like(x), x.new_empty(len(x), step.vocabulary), []
        step.rows, step.threads, step.x = len(x), torch.get_num_threads(), x.data_ptr()
        step.cosines, step.signed_sines = rotation[0].data_ptr(), rotation[1].data_ptr()
        step.own_at, step.slots = plan.own.data_ptr(), plan.row_slots.data_ptr()
        step.prompt_lengths = plan.prompt_lengths.data_ptr()
        self._find_pools(plan, x)
        self._reserve_scratch(plan)
        step.states = step.logits = None  # until the last layers run
        for step.first, step.last in pairwise([0, *inner, last]):
            if step.last == last:
                step.states, step.logits = states.data_ptr(), logits.data_ptr()
            self._decode(ctypes.byref(step))
            if step.last < last:
                kept.append(x.clone())
        return ForwardOutput(states, logits, kept)

    def _find_pools(self, plan: DecodePlan, x: torch.Tensor) -> None:
        """Writes the pools' addresses into the structures, again whenever they have moved."""
        pools = plan.pool, plan.pool.version, plan.prompts, plan.prompts.version
        if self._pools == pools:
            return
        like = x.new_empty(1, self._step.kv_heads, self._step.dim)
        for index, layer in enumerate(self._layers):
            keys, values = plan.pool.layer(index, like, like)
            layer.own_keys, layer.own_values, layer.own_positions = keys.data_ptr(), values.data_ptr(), keys.shape[3]
            keys, values = plan.prompts.layer(index, like, like)
            layer.prompt_keys, layer.prompt_values = keys.data_ptr(), values.data_ptr()
            layer.prompt_positions = keys.shape[3]
        self._pools = plan.pool, plan.pool.version, plan.prompts, plan.prompts.version  # a layer may have appeared

    def _reserve_scratch(self, plan: DecodePlan) -> None:
        step = self._step
        pairs = (step.group + 1) // 2 * 2
        of_row = step.hidden + 2 * (step.group + 1) * step.kv_heads * step.dim + step.inner
        attention = step.dim * (1 + 2 * pairs) + 2 * (plan.prompt_length + plan.own_length)
        step.scratch_floats = TOGETHER * of_row + attention  # of one thread
        floats = step.threads * step.scratch_floats
        if len(self._scratch) < floats:  # zeros at first: rows that do not exist are read too
            self._scratch = torch.zeros(floats * 3 // 2)
        step.scratch = self._scratch.data_ptr()


def can_compile(decoder: FusedDecoder) -> bool:
    """Returns True if `decode.c` computes layers like these, and if there is memory for it."""
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
