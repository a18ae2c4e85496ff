"""Versions of installed packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version(name: str) -> str | None:
    """As its distribution says; None where it is not installed (or run from a source folder)."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
