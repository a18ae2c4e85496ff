"""Errors of the server in OpenAI's shape: what every client turns into its own exceptions."""

from __future__ import annotations

from collections.abc import Mapping

from gambit.cluster.serving import NoEngineError
from gambit.errors import UserError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error: its status, its sentence, and the parameter that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, object]:
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def closing(status: int, message: str) -> ApiError:
    """After which the connection ends: the rest of the request is not read."""
    return ApiError(status, message, headers={"connection": "close"})


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of what ended its search."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return bad_request(str(error))
    if isinstance(error, NoEngineError):
        return ApiError(503, str(error), code="no_engine", headers={"retry-after": "5"})
    return ApiError(500, f"the search failed: {error}" if str(error) else f"the search failed: {type(error).__name__}")
