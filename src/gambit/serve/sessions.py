"""Who is logged in on the page: sessions behind a cookie, each with a token against forged requests."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from gambit.serve.settings import ApiKey

SESSION_COOKIE = "gambit_session"
LOGIN_COOKIE = "gambit_login"  # holds the token of the login form, before there is a session
SESSION_SECONDS = 12 * 3600
MOST_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class PageSession:
    key: ApiKey
    csrf_token: str
    expires: float


class Sessions:
    """Sessions by their cookie. They are forgotten with the server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: OrderedDict[str, PageSession] = OrderedDict()

    def begin(self, key: ApiKey) -> str:
        """A new session; gives what its cookie holds."""
        while len(self._open) >= MOST_SESSIONS:
            self._open.popitem(last=False)
        name = secrets.token_urlsafe(32)
        self._open[name] = PageSession(key, secrets.token_urlsafe(32), self._clock() + SESSION_SECONDS)
        return name

    def of(self, request: Request) -> PageSession | None:
        found = self._open.get(request.cookies.get(SESSION_COOKIE, ""))
        return found if found is not None and found.expires > self._clock() else None

    def end(self, request: Request) -> None:
        self._open.pop(request.cookies.get(SESSION_COOKIE, ""), None)


def set_cookie(response: Response, name: str, value: str, *, is_secure: bool, seconds: int = SESSION_SECONDS) -> None:
    """Out of reach of scripts and of other sites."""
    response.set_cookie(name, value, max_age=seconds, httponly=True, samesite="strict", secure=is_secure, path="/")


def are_equal(first: str, second: str) -> bool:
    """In constant time; an empty token equals nothing."""
    return bool(first) and hmac.compare_digest(first.encode(), second.encode())
