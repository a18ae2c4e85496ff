"""Files of the hub by their address, hf:ORG/REPO or hf:ORG/REPO@REVISION."""

from __future__ import annotations

import re
from pathlib import Path

from gambit.errors import UserError, first_line
from gambit.models.files import OFFLINE, hub_address, hub_silence, is_offline

SCHEME = "hf:"
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def repository_of(address: str) -> tuple[str, str | None]:
    """Returns the repository and the revision of an address with or without its scheme."""
    repository, _, revision = address.removeprefix(SCHEME).partition("@")
    if not REPOSITORY.fullmatch(repository):
        raise UserError(f"{address!r}: give {SCHEME}ORG/REPO, or {SCHEME}ORG/REPO@REVISION")
    return repository, revision or None


def cached_file(address: str, filename: str) -> Path | None:
    """Returns a file in this machine's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    repository, revision = repository_of(address)
    found = try_to_load_from_cache(repository, filename, revision=revision)
    return Path(found) if isinstance(found, str) else None


def fetched_file(address: str, filename: str) -> Path:
    """Returns a file, fetched if the hub has a newer one than the cache."""
    from huggingface_hub import hf_hub_download

    repository, revision = repository_of(address)
    cached = cached_file(address, filename)
    reason = f"{OFFLINE} is set" if is_offline() else hub_silence()
    if reason is not None and cached is None:
        raise UserError(
            f"{address}: {filename} is not in this machine's cache, and {hub_address()} gives none ({reason})"
        )
    if reason is not None and cached is not None:
        return cached
    try:
        return Path(hf_hub_download(repository, filename, revision=revision))
    except (OSError, ValueError) as error:
        raise UserError(f"{address}: {filename} cannot be fetched: {first_line(error)}") from error
