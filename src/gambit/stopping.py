"""When a signal is a second wish to stop, and when it is the first one again."""

from __future__ import annotations

import time

ONE_WISH_SECONDS = 0.3  # coreutils' `timeout` signals a process, and at once again with its whole group


class StopWish:
    """Tells a user who asks to stop again from one whose wish arrives twice."""

    def __init__(self) -> None:
        self._since: float | None = None

    def is_repeated(self) -> bool:
        """To be asked at every signal: whether this one comes from a user who has lost patience."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since > ONE_WISH_SECONDS
