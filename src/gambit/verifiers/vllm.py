"""Runs a verifier on a vLLM engine of its own, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gambit.config.options import EngineConfig
from gambit.errors import EngineError, UserError, first_line
from gambit.verifiers.base import ReadingScore, ThoughtReading, VerifierInfo
from gambit.verifiers.families import FAMILIES, Family, PromptFormat, own_settings, read_config, verifier_info
from gambit.verifiers.lora import merged_folder
from gambit.verifiers.lora_folder import is_verifier
from gambit.verifiers.names import VerifierName, family_named, model_folder

if TYPE_CHECKING:
    from gambit.engines.vllm.compat.pooling import StatePooler
    from gambit.verifiers.families import Head


CPU_OPTIONS = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 30}
ACTIVATION_BYTES = 2 << 30  # of a pass over as many tokens as vLLM takes at a time
MPS_FOLDER = "/tmp/nvidia-mps"  # where its daemon listens unless CUDA_MPS_PIPE_DIRECTORY says otherwise
CLOSE_SECONDS = 10  # after which a process that was asked to end is killed
Scores = list[tuple[float, int] | None]  # score and computed tokens; None: longer than its context
SERVER = "from gambit.verifiers.vllm import main; main()"


class VllmVerifier:
    """Sends token ids, gets scores. One batch is under way at a time; vLLM takes it apart as it sees fit."""

    def __init__(self, process: ServerProcess, info: VerifierInfo, prompt_format: PromptFormat) -> None:
        self.info = info
        self._process = process
        self._format = prompt_format

    def read(self, readings: Sequence[ThoughtReading]) -> Sequence[ReadingScore | None]:
        found = self._process.ask([array("i", self._format.encode(reading)) for reading in readings])
        return [None if each is None else ReadingScore(*each) for each in found]

    def close(self) -> None:
        self._process.close()


class ServerProcess:
    """The process and the socket to it."""

    def __init__(self, setup: PoolingSetup, environment: Mapping[str, str]) -> None:
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(there.fileno())],
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C and `timeout` signal a group: what that means is ours to say
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
            )
        self._connection = Connection(here.detach())
        self.ready = self._begin(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: object) -> Any:
        """Send something and wait for the answer."""
        try:
            self._connection.send(message)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise EngineError(f"its vLLM process {self.pid} has ended ({self._ending()})") from error
        if isinstance(answer, PoolingFailed):
            self.close()
            raise EngineError(answer.reason)
        return answer

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _begin(self, setup: PoolingSetup) -> PoolingReady:
        try:
            ready = self.ask(setup)
        except BaseException:
            self.close()
            raise
        assert isinstance(ready, PoolingReady)
        return ready

    def _ending(self) -> str:
        code = self._process.returncode
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """A verifier whose files were found and understood, and whose process is still to be started."""

    name: VerifierName
    config: EngineConfig
    device: str
    folder: Path
    family: Family

    def start(self) -> VllmVerifier:
        try:
            process = ServerProcess(self._setup(), environment_for(self.device, self.config.verifier_gpu_share))
        except EngineError as error:
            raise EngineError(f"the verifier {self.name.model} does not start on vLLM: {error} (its part of the memory "
                              f"is --verifier-memory {self.config.verifier_memory})") from error  # fmt: skip
        where = {"runs_on": "vllm", "device": self.device, "context_tokens": process.ready.context_tokens}
        info = verifier_info(self.name.model, self.family, own_settings(self.folder), self.config, **where)
        return VllmVerifier(process, info, self.family.make_format(self.folder))

    def _setup(self) -> PoolingSetup:
        options = {**_options(self.config, self.device, self.folder), **self.config.verifier_options}
        return PoolingSetup(str(self.folder), self.family.name, options)


def plan_pooling(name: VerifierName, config: EngineConfig, device: str) -> PoolingPlan:
    """A verifier of one's own is merged with its generator's weights, if it was not yet; `device` as torch calls it."""
    if find_spec("vllm") is None:
        raise UserError("vLLM is not installed: pip install 'gambit-search[vllm]', or use --verifier-engine local")
    if config.verifier_gpu_share < 1:
        check_shared_gpu(device)
    folder = model_folder(name)
    if is_verifier(folder):
        folder = merged_folder(folder, config.model)
    return PoolingPlan(name, config, device, folder, family_named(name, folder))


def _options(config: EngineConfig, device: str, folder: Path) -> dict[str, Any]:
    if device == "cpu":
        return dict(CPU_OPTIONS)
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    return memory_options(config, total, sum(path.stat().st_size for path in folder.glob("*.safetensors")))


def memory_options(config: EngineConfig, total: int, weights: int) -> dict[str, Any]:
    """Of a share vLLM finds out what is left for keys and values; with bytes that is given, so that several engines can
    start at once on a GPU without taking each other's memory for their own."""
    # Graphs are of decode steps, which it does not have: without them it starts in half the time.
    options = {"gpu_memory_utilization": config.verifier_part.share_of(total), "enforce_eager": True}
    if config.verifier_part.num_bytes is None:
        return options
    left = config.verifier_part.num_bytes - weights - ACTIVATION_BYTES
    if left <= 0:
        raise UserError(f"--verifier-memory {config.verifier_memory}: its weights take {weights >> 20:,} MiB and a "
                        f"pass {ACTIVATION_BYTES >> 20:,}, nothing is left for keys and values: raise it")  # fmt: skip
    return {**options, "kv_cache_memory_bytes": left}


def check_shared_gpu(device: str) -> None:
    """Without MPS two processes take turns on a GPU, each with all of it: a share would be ignored in silence."""
    if not device.startswith("cuda"):
        raise UserError(f"--verifier-gpu-share is of a GPU, and the verifier runs on {device}: leave it out")
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_FOLDER)) / "control"
    if not pipe.exists():
        raise UserError("--verifier-gpu-share needs NVIDIA's MPS, and none runs here: start it with "
                        "`nvidia-cuda-mps-control -d`, or leave the option out")  # fmt: skip


def environment_for(device: str, gpu_share: float = 1.0) -> dict[str, str]:
    """For the new process; what the user has set stays, but for the device and its share."""
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if gpu_share < 1:
        wanted["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * gpu_share:g}"
    for key, value in (("VLLM_NO_USAGE_STATS", "1"), ("VLLM_LOGGING_LEVEL", "ERROR"), ("TQDM_DISABLE", "1")):
        wanted[key] = os.environ.get(key, value)
    _, _, number = device.partition(":")
    if number:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        wanted["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(number)] if visible else number
    return wanted


# -- in the process of its own -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolingSetup:
    """What the process is to run."""

    folder: str
    family: str
    options: dict[str, Any]  # of vLLM


@dataclass(frozen=True, slots=True)
class PoolingReady:
    """It runs."""

    context_tokens: int


@dataclass(frozen=True, slots=True)
class PoolingFailed:
    """It does not start, or cannot answer."""

    reason: str


def serve(connection: Connection) -> None:
    """Until the other side hangs up."""
    try:
        pooler, head = _start(connection.recv())
    except Exception as error:
        if os.environ.get("GAMBIT_DEBUG"):
            traceback.print_exc()
        connection.send(PoolingFailed(first_line(error)))
        return
    connection.send(PoolingReady(pooler.max_tokens))
    while True:
        try:
            sequences: list[array[int]] = connection.recv()
        except EOFError:
            return
        connection.send(_scores(pooler, head, sequences))


def _start(setup: PoolingSetup) -> tuple[StatePooler, Head]:
    import torch

    folder = Path(setup.folder)
    head = FAMILIES[setup.family].read_head(folder).to(torch.device("cpu"))
    from gambit.engines.vllm.compat.pooling import StatePooler  # takes seconds

    return StatePooler(setup.folder, str(read_config(folder)["model_type"]), setup.options), head


def _scores(pooler: StatePooler, head: Head, sequences: Sequence[array[int]]) -> Scores | PoolingFailed:
    short = [tokens for tokens in sequences if len(tokens) <= pooler.max_tokens]
    try:
        states, counts = pooler.states(short) if short else (None, [])
    except Exception as error:
        return PoolingFailed(first_line(error))
    probabilities = [] if states is None else head.probability(states).tolist()
    found = iter(zip(probabilities, counts, strict=True))
    return [next(found) if len(tokens) <= pooler.max_tokens else None for tokens in sequences]


def main() -> None:
    """The socket's number is the only argument."""
    serve(Connection(int(sys.argv[1])))
