"""`gambit doctor`: versions, devices and engines of this machine, and what is missing."""

import dataclasses
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from gambit.cli.options import SEARCH_PANELS, given, picked, with_options
from gambit.cli.terminal import FAILURE, OK, put
from gambit.config import registry
from gambit.config.options import EngineConfig
from gambit.engines.vllm import description, installed
from gambit.errors import UserError, install_line
from gambit.models import files as models

NEEDED = ("gambit-search", "torch", "transformers", "math-verify", "safetensors")
ENGINE_PANELS = [panel for panel in SEARCH_PANELS if panel.model is EngineConfig]
USUAL = ("as_json", "scorer", "engine", "device", "engine_options", "dtype", "kv_budget_tokens", "memory_ratio",
         "any_weights", "offline")  # fmt: skip
CPU_TORCH = "pip install uv && uv pip install --reinstall-package torch --torch-backend=cpu torch"
RAY_HINT = f"not installed: {install_line('ray')} (engines on many GPUs and machines)"
VLLM_HINT = f"not installed: {install_line('vllm')} (Linux, NVIDIA GPU)"


@with_options(*ENGINE_PANELS, without=("model",), usual=USUAL)
def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Try this model: its scorer, pool, memory and time.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **flags: str | bool | None,
) -> int:
    """List the engines and devices that are here, what is missing."""
    if model is None:
        if options := given(flags):
            raise UserError(f"{', '.join(options)}: such options are for a model that is tried: gambit doctor MODEL")
        findings = examine()
    else:
        from gambit.cli.doctor_model import examine_model

        engine = picked(EngineConfig, {**flags, "model": model})
        findings = [Finding(name, Condition.OK, detail) for name, detail in examine_model(engine)]
    is_fit = all(finding.condition is not Condition.MISSING for finding in findings)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"can_run": is_fit, "findings": rows}))
    else:
        put(_findings_table(findings))
    return OK if is_fit else FAILURE


class Condition(StrEnum):
    """The condition of a part of the installation."""

    OK = "ok"
    MISSING = "missing"
    OPTIONAL = "optional"


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the table."""

    name: str
    condition: Condition
    detail: str


def examine() -> list[Finding]:
    """Examines everything that a run may need."""
    torch = _torch()
    return [
        Finding("python", Condition.OK, f"{platform.python_version()} ({sys.executable})"),
        *(_package(name, Condition.MISSING, f"not installed: pip install {name}") for name in NEEDED),
        *_devices(torch),
        _compiled_step(torch),
        *_engines(torch),
        _package("ray", Condition.OPTIONAL, RAY_HINT),
        _bundled_model(),
        Finding("policies", Condition.OK, ", ".join(registry.names("gambit.policies"))),
        Finding("scorers", Condition.OK, ", ".join([*registry.names("gambit.scorers"), "a checkpoint file"])),
    ]


def _torch() -> ModuleType | None:
    """Imports torch; returns None if it is missing or its libraries do not load."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):
        return None


def _package(name: str, otherwise: Condition, hint: str) -> Finding:
    label = name.removesuffix("-search")
    try:
        return Finding(label, Condition.OK, version(name))
    except PackageNotFoundError:
        return Finding(label, otherwise, hint)


def _compiled_step(torch: ModuleType | None) -> Finding:
    """Builds the compiled step and loads a model, which compares the step's results with its own."""
    name, slow = "compiled decode step", "the local engine decodes at half its speed on a CPU"
    if torch is None:
        return Finding(name, Condition.OPTIONAL, f"needs torch: {slow}")
    from gambit.engines.local.model import load_model
    from gambit.engines.local.native import native_library

    library = native_library()
    if isinstance(library, str):
        return Finding(name, Condition.OPTIONAL, f"none ({library}): {slow}")
    model, _ = load_model(models.locate(models.BUNDLED), "cpu")
    if not model.is_compiled:
        return Finding(name, Condition.OPTIONAL, f"its results differ from the model's own, so torch decodes: {slow}")
    return Finding(name, Condition.OK, "built with gcc, gives what the model gives")


def _devices(torch: ModuleType | None) -> Iterator[Finding]:
    threads = f"{os.cpu_count()} cores"
    if torch is None:
        yield Finding("torch import", Condition.MISSING, "torch does not import: reinstall it")
        yield Finding("cpu", Condition.OK, threads)
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.version.cuda and not torch.cuda.is_available():
        build += f" without a GPU; gigabytes smaller: {CPU_TORCH}"
    yield Finding("torch build", Condition.OK, build)
    yield from _cuda(torch)
    has_mps = torch.backends.mps.is_available()
    yield Finding("mps", Condition.OK if has_mps else Condition.OPTIONAL, "available" if has_mps else "not available")
    yield Finding("cpu", Condition.OK, f"{threads}, torch uses {torch.get_num_threads()} threads")


def _cuda(torch: ModuleType) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("cuda", Condition.OPTIONAL, "no CUDA device that torch can use")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", Condition.OK, f"{device.name}, {device.total_memory / 2**30:.0f} GiB")


def _engines(torch: ModuleType | None) -> Iterator[Finding]:
    is_local_ok = torch is not None and find_spec("transformers") is not None
    yield Finding(
        "engine local", Condition.OK if is_local_ok else Condition.MISSING,
        "embedded, through transformers" if is_local_ok else "needs torch and transformers",
    )  # fmt: skip
    build = installed()  # without importing vLLM, which takes seconds and may touch the GPU
    if build is None:
        yield Finding("engine vllm", Condition.OPTIONAL, VLLM_HINT)
    else:
        yield Finding("engine vllm", Condition.OK, description(*build))
    for name in registry.names("gambit.engines"):
        if name not in ("local", "vllm"):
            yield Finding(f"engine {name}", Condition.OK, "installed by another package")


def _bundled_model() -> Finding:
    name = f"model {models.BUNDLED}"
    try:
        return Finding(name, Condition.OK, models.locate(models.BUNDLED))
    except UserError as error:
        return Finding(name, Condition.OPTIONAL, str(error))


def _findings_table(findings: Iterable[Finding]) -> Table:
    styles = {Condition.OK: "green", Condition.MISSING: "red", Condition.OPTIONAL: "yellow"}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = Text("-" if finding.condition is Condition.OPTIONAL else finding.condition, styles[finding.condition])
        table.add_row(finding.name, mark, Text(finding.detail))
    return table
