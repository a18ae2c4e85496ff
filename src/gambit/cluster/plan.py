"""The number of engines under Ray, what each needs, and the connection to Ray."""

import importlib.util
import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field

from gambit.config.options import CheckedModel, EngineConfig
from gambit.errors import UserError, first_line, install_line, reason_of

OWN = "local"  # a Ray of this run's own, on this machine
PRESENT = "auto"  # the one that this machine is part of
ADDRESS_VARIABLE = "RAY_ADDRESS"  # set by `ray job submit`, among others
TENSOR_PARALLEL = "tensor_parallel_size"
CLIENT = "ray://"
MOST_ENGINES_PER_CORE = 4  # without a GPU, on one's own machine: each is a process with a model in memory
CONNECT_SECONDS = 5.0  # Ray itself tries for minutes, and writes its own log meanwhile
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # or Ray prints every death on stdout, among the results
}


class ClusterPlan(CheckedModel):
    """The place and number of engines, and the share of a machine of each: options of commands that use Ray."""

    ray: str | None = Field(
        None,
        description="run engines under Ray: in a cluster (its address, or auto), else on this machine alone",
        json_schema_extra={"metavar": "[ADDRESS]"},
    )
    engines: Annotated[int, Field(ge=1, le=4096)] | None = Field(None, description="engines under Ray (default: 1)")
    gpus_per_engine: Annotated[float, Field(ge=0, le=64)] | None = Field(
        None, description="part of a GPU, or GPUs (default: as many as one engine computes on, where there are any)"
    )
    cpus_per_engine: Annotated[float, Field(ge=0.01, le=1024)] | None = Field(
        None, description="cores and threads (default: an even part of this machine's, in a cluster 1)"
    )
    spread: bool = Field(False, description="run every search on all engines at once, some of its islands on each")

    @property
    def address(self) -> str:
        return self.ray or os.environ.get(ADDRESS_VARIABLE) or OWN

    @property
    def num_engines(self) -> int:
        return self.engines or 1

    @property
    def flags(self) -> str:
        """The options as they would be typed again, with a space before each."""
        numbers = {"engines": self.num_engines, **self._numbers}
        given = "".join(f" --{name} {value:g}" for name, value in numbers.items())
        address = "" if self.address == OWN else f" {self.address}"
        return f" --ray{address}{given}{' --spread' if self.spread else ''}"

    @property
    def _numbers(self) -> dict[str, float]:
        """The numbers that were set, by their flags."""
        found = self.model_dump(exclude={"ray", "spread"}, exclude_none=True)
        return {name.replace("_", "-"): value for name, value in found.items()}

    def checked(self, engine: EngineConfig) -> Self | None:
        """Returns the plan, or None for a run without Ray; raises for options that contradict each other."""
        if self.ray is None:
            if self.spread:
                raise UserError("--spread is for engines under Ray: add --ray --engines 2, or leave it out")
            for flag, value in self._numbers.items():
                raise UserError(f"--{flag} {value:g} is for engines under Ray: add --ray, or leave it out")
            return None
        if self.spread and self.num_engines == 1:
            raise UserError("--spread needs more than one engine: add --engines 2, or leave it out")
        check_plan(self, engine)
        return self

    def check_alone(self, concurrency: int) -> None:
        """Raises if a search on all engines would have others beside it."""
        if self.spread and concurrency > 1:
            raise UserError(f"--concurrency {concurrency} and --spread disagree: a search on all engines runs alone, "
                            "leave one of them out")  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """Resources that Ray sets aside for one engine, always on one machine."""

    gpus: float = 0.0  # several for tensor parallel, a part of one where engines share it
    cpus: float = 1.0  # and as many threads

    @property
    def shares_a_gpu(self) -> bool:
        return 0 < self.gpus < 1


def check_plan(plan: ClusterPlan, engine: EngineConfig) -> None:
    """Raises for mistakes that can be found before Ray is started."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"--ray needs the package ray: {install_line('ray')}")
    if plan.address.startswith(CLIENT):
        raise UserError(f"--ray {plan.address}: Ray's client protocol cannot stream results; run gambit on a machine "
                        "of the cluster with --ray auto, or hand it in with `ray job submit`")  # fmt: skip
    if plan.address not in (OWN, PRESENT):
        _check_address(plan.address)
    gpus, workers = plan.gpus_per_engine, workers_of(engine)
    if gpus is not None and gpus > 1 and gpus != int(gpus):
        raise UserError(f"--gpus-per-engine {gpus:g}: an engine has a part of one GPU, or whole ones")
    if gpus is not None and workers > 1 and gpus != workers:
        raise UserError(f"--gpus-per-engine {gpus:g} and {TENSOR_PARALLEL}={workers} disagree: leave "
                        f"--gpus-per-engine out, and every engine gets {workers}")  # fmt: skip
    if gpus and engine.device == "cpu":
        raise UserError(f"--gpus-per-engine {gpus:g} and --device cpu disagree: leave one of them out")


def _check_address(address: str) -> None:
    """Raises unless it has the form of an address and its port is open."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--ray {address}: not an address of Ray: give HOST:PORT, auto for the cluster that this "
                        "machine is part of, or --ray alone for this machine")  # fmt: skip
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(f"--ray {address}: no server answers there ({reason_of(error)}): start a cluster with `ray "
                        "start --head`, or give the address of one") from error  # fmt: skip


def workers_of(engine: EngineConfig) -> int:
    """Returns the number of GPUs that one engine computes on together."""
    found = engine.engine_options.get(TENSOR_PARALLEL, 1)
    return found if isinstance(found, int) else 1


def engine_needs(plan: ClusterPlan, engine: EngineConfig, cluster: Mapping[str, float]) -> EngineNeeds:
    """Returns the needs of one engine. `cluster`: the resources of all its machines together."""
    num_gpus = cluster.get("GPU", 0.0)
    gpus = plan.gpus_per_engine
    if gpus is None:
        gpus = float(workers_of(engine)) if num_gpus and engine.device != "cpu" else 0.0
    if plan.address == OWN:
        _check_room(plan.num_engines, gpus, num_gpus)
    return EngineNeeds(gpus, _cpus(plan))


def _check_room(num_engines: int, gpus: float, num_gpus: float) -> None:
    """Raises if the engines do not fit on this machine; a cluster may still grow, and is not checked."""
    if gpus * num_engines > num_gpus:
        raise UserError(f"{num_engines} engines with {gpus:g} GPUs each need {gpus * num_engines:g}, and "
                        f"this machine has {num_gpus:g}: lower --engines, or let several share one "
                        "(--gpus-per-engine 0.5)")  # fmt: skip
    most = MOST_ENGINES_PER_CORE * (os.cpu_count() or 1)
    if not gpus and num_engines > most:
        raise UserError(f"{num_engines} engines would wait for each other on this machine's {os.cpu_count() or 1} "
                        f"cores: give at most {most} --engines, or a cluster (--ray ADDRESS)")  # fmt: skip


def _cpus(plan: ClusterPlan) -> float:
    """Returns the cores of each engine; engines on a machine of their own share its cores."""
    if plan.cpus_per_engine is not None:
        return plan.cpus_per_engine
    return float(max(1, (os.cpu_count() or 1) // plan.num_engines)) if plan.address == OWN else 1.0


@contextmanager
def connected(plan: ClusterPlan) -> Iterator[Mapping[str, float]]:
    """Connects this process to Ray as a driver and yields the cluster's resources; uses a connection that is there."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        yield ray.cluster_resources()
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if plan.address == OWN:
            # At least the cores of all engines: on this machine alone nothing is gained by making them wait.
            cores = max(os.cpu_count() or 1, math.ceil(_cpus(plan) * plan.num_engines))
            ray.init(address=OWN, include_dashboard=False, num_cpus=cores, **quiet)
        else:
            ray.init(address=plan.address, **quiet)
    except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"--ray {plan.address}: {first_line(error)}; start one with `ray start --head`") from error
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()
