"""Runs a verifier on a vLLM engine of its own, in a process of its own."""

import os
import socket
import subprocess
import sys
import traceback
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gambit.config.options import EngineConfig
from gambit.errors import EngineError, UserError, first_line, install_line
from gambit.verifiers.base import ReadingScore, ThoughtReading, VerifierInfo
from gambit.verifiers.families import FAMILIES, Family, Head, own_info, read_config, verifier_info
from gambit.verifiers.lora import merged_folder
from gambit.verifiers.lora_folder import is_verifier
from gambit.verifiers.names import VerifierName, family_named, model_folder

if TYPE_CHECKING:
    from gambit.engines.vllm.compat.pooling import StatePooler


CPU_OPTIONS = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 30}
ACTIVATION_BYTES = 2 << 30  # of a pass over as many tokens as vLLM takes at a time
MPS_FOLDER = "/tmp/nvidia-mps"  # where its daemon listens unless CUDA_MPS_PIPE_DIRECTORY is set
CLOSE_SECONDS = 10  # until a process that does not end is killed
SERVER = "from gambit.verifiers.vllm import main; main()"


class VllmVerifier:
    """Sends token ids to its process and gets scores. One batch is under way at a time; vLLM divides it as it sees fit.

    Each message is answered by a message. An `EngineError` among the answers is raised here, and ends the process.
    """

    def __init__(self, name: VerifierName, config: EngineConfig, device: str, folder: Path, family: Family) -> None:
        """Starts the process and waits until it has loaded the verifier in the folder."""
        self._encode = family.encoder(folder)
        options = {**_options(config, device, folder), **config.verifier_options}
        self._process, self._connection = _server(environment_for(device, config.verifier_gpu_share))
        try:
            context_tokens: int = self._ask((str(folder), family.name, options))
        except EngineError as error:
            raise EngineError(f"the verifier {name.model} does not start on vLLM: {error} (its part of the memory "
                              f"is --verifier-memory {config.verifier_memory})") from error  # fmt: skip
        except BaseException:
            self.close()
            raise
        self.info: VerifierInfo = verifier_info(name.model, family, own_info(folder), config, runs_on="vllm",
                                                device=device, context_tokens=context_tokens)  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, readings: Sequence[ThoughtReading]) -> Sequence[ReadingScore | None]:
        found = self._ask([array("i", self._encode(reading)) for reading in readings])
        return [None if each is None else ReadingScore(*each) for each in found]

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: object) -> Any:
        try:
            self._connection.send(message)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            code = self._process.returncode
            ending = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            raise EngineError(f"its vLLM process {self.pid} has ended ({ending})") from error
        if isinstance(answer, EngineError):
            self.close()
            raise answer
        return answer


def _server(environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts a process that serves, and returns it with the socket to it."""
    here, there = socket.socketpair()
    with there:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(there.fileno())],
            pass_fds=(there.fileno(),),
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C and `timeout` signal a group; this process ends with its connection instead
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        )
    return process, Connection(here.detach())


def prepare_vllm_verifier(name: VerifierName, config: EngineConfig, device: str) -> Callable[[], VllmVerifier]:
    """Returns what starts a verifier whose files were found and understood.

    A verifier that Gambit trained is merged with its generator's weights, unless it was before. `device` is what torch
    calls it.
    """
    if find_spec("vllm") is None:
        raise UserError(f"vLLM is not installed: {install_line('vllm')}, or use --verifier-engine local")
    if config.verifier_gpu_share < 1:
        check_shared_gpu(device)
    folder = model_folder(name)
    if is_verifier(folder):
        folder = merged_folder(folder, config.model)
    return partial(VllmVerifier, name, config, device, folder, family_named(name, folder))


def _options(config: EngineConfig, device: str, folder: Path) -> dict[str, Any]:
    if device == "cpu":
        return dict(CPU_OPTIONS)
    total = torch.cuda.get_device_properties(device).total_memory
    return memory_options(config, total, sum(path.stat().st_size for path in folder.glob("*.safetensors")))


def memory_options(config: EngineConfig, total: int, weights: int) -> dict[str, Any]:
    """Returns vLLM's options for the verifier's part of a GPU's memory.

    Given a share, vLLM measures what is left for keys and values. A part in bytes leaves nothing to measure, so that
    several engines can start at once on a GPU and none takes another's memory for its own.
    """
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
    """Refuses a share without MPS: two processes then take turns on a GPU, each with all of it."""
    if not device.startswith("cuda"):
        raise UserError(f"--verifier-gpu-share is of a GPU, and the verifier runs on {device}: leave it out")
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_FOLDER)) / "control"
    if not pipe.exists():
        raise UserError("--verifier-gpu-share needs NVIDIA's MPS, and none runs here: start it with "
                        "`nvidia-cuda-mps-control -d`, or leave the option out")  # fmt: skip


def environment_for(device: str, gpu_share: float = 1.0) -> dict[str, str]:
    """Returns variables of the new process; those that the user has set stay, but for the device and its share."""
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


def main() -> None:
    """Serves on the socket whose number is the only argument, until the other side hangs up."""
    connection = Connection(int(sys.argv[1]))
    try:
        pooler, head = _load(*connection.recv())
    except Exception as error:
        if os.environ.get("GAMBIT_DEBUG"):
            traceback.print_exc()
        connection.send(EngineError(first_line(error)))
        return
    connection.send(pooler.max_tokens)
    while True:
        try:
            sequences: list[array[int]] = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_scores(pooler, head, sequences))
        except Exception as error:
            connection.send(EngineError(first_line(error)))


def _load(folder: str, family: str, options: dict[str, Any]) -> tuple["StatePooler", Head]:
    head = FAMILIES[family].read_head(Path(folder)).to(torch.device("cpu"))
    from gambit.engines.vllm.compat.pooling import StatePooler  # takes seconds

    return StatePooler(folder, str(read_config(Path(folder))["model_type"]), options), head


def _scores(pooler: "StatePooler", head: Head, sequences: Sequence["array[int]"]) -> list[tuple[float, int] | None]:
    """Returns scores and how many tokens were computed for each; None for a sequence longer than the context."""
    short = [tokens for tokens in sequences if len(tokens) <= pooler.max_tokens]
    if not short:
        return [None] * len(sequences)
    states, counts = pooler.states(short)
    found = iter(zip(head.probability(states).tolist(), counts, strict=True))
    return [next(found) if len(tokens) <= pooler.max_tokens else None for tokens in sequences]
