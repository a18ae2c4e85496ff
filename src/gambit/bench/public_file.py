"""A file of problems in a public git repository: fetched once, recognised by git's own hash, kept in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from gambit.errors import UserError, first_line
from gambit.storage.files import write_whole

MOST_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class PublicFile:
    """A file at one commit."""

    repository: str
    commit: str
    path: str
    blob: str
    address: str = "https://raw.githubusercontent.com"

    @property
    def url(self) -> str:
        return f"{self.address}/{self.repository}/{self.commit}/{self.path}"

    def fetch_to(self, place: Path) -> None:
        """Writes the file to a place; raises where it cannot be fetched or has other content."""
        from huggingface_hub import is_offline_mode  # what users set for every download

        if is_offline_mode():
            raise self._refused(place, "HF_HUB_OFFLINE is set")
        from gambit.scorers.authors import blob_hash
        from gambit.scorers.published import content_of

        try:
            content = content_of(self.url, MOST_BYTES)
        except (OSError, HTTPException, ValueError) as error:
            raise self._refused(place, first_line(error)) from error
        if (found := blob_hash(content)) != self.blob:
            raise self._refused(place, f"its hash is {found[:12]}…, not {self.blob[:12]}…: it was changed")
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, content)

    def _refused(self, place: Path, reason: str) -> UserError:
        return UserError(f"{self.url} cannot be fetched ({reason}): put the file at {place}")
