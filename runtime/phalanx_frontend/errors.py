"""Errors as OpenAI clients know them: `{"error": {"message", "type", "param", "code"}}` with the status that says who can act."""

import json
import math
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from phalanx_frontend.backend import BackendError

MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 1000, 200
"""Bounds of an error, so that a large request never gets a large answer, nor fills a log."""
FIELDS = {"unsupported_speculation": "speculative.method"}
"""The field that a backend refuses by a code."""


class ApiError(Exception):
    """The answer to a request that is not served. `param` names the field, `code` the reason in one word.

    `can_resume`: a stream only stops here.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.can_resume = False
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field to change."""
    return ApiError(400, message, param, code)


def internal_error() -> ApiError:
    """A 500 that tells nothing: the log has the rest."""
    return ApiError(500, "internal error; the server's log says more under this request's id", code="internal_error")


def of_backend(error: BackendError) -> ApiError:
    """What the client is told of a backend's refusal."""
    told = ApiError(error.status, error.message, FIELDS.get(error.code), error.code, error.retry_after_s)
    told.can_resume = error.can_resume
    return told


def in_stream(error: ApiError, event_id: str) -> ApiError:
    """What the client of a stream is told that has come to this id: how to get the rest, if it can."""
    if not error.can_resume:
        return error
    message = f"{error.message}; for the rest repeat the request with the header Last-Event-ID: {event_id}"
    return ApiError(error.status, message, None, error.code)


def error_type(status: int) -> str:
    """OpenAI's `type` for a status."""
    match status:
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
        case _:
            return "server_error" if status >= 500 else "invalid_request_error"


def error_body(error: ApiError) -> bytes:
    """The JSON document."""
    return json.dumps({"error": error_detail(error)}).encode("ascii")


def error_detail(error: ApiError) -> dict[str, str | None]:
    """What is inside. Bounded and encodable, whatever of the request the message quotes."""
    message, param = _cut(error.message, MAX_MESSAGE_CHARS), error.param and _cut(error.param, MAX_PARAM_CHARS)
    return {"message": message, "type": error_type(error.status), "param": param, "code": error.code}


def _cut(text: str, longest: int) -> str:
    whole = text.encode(errors="backslashreplace").decode()
    return whole if len(whole) <= longest else whole[: longest - 3] + "..."


def error_headers(error: ApiError) -> dict[str, str]:
    """Retry-After, rounded up to whole seconds as HTTP wants it, and the exact time that OpenAI's clients read."""
    if error.retry_after_s is None:
        return {}
    seconds = max(0.0, error.retry_after_s)
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(math.ceil(seconds * 1000))}


def error_response(error: ApiError) -> Response:
    """The whole HTTP response."""
    return Response(error_body(error), error.status, error_headers(error), "application/json")


# What is wrong with a body, told by its field.


def of_validation(errors: Sequence[Any], inside: tuple[str, ...] = ("body",)) -> ApiError:
    """The first of pydantic's errors as a 400. Their locations start with `inside`, which is not part of the field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return invalid(None, f"the request body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}")
    field = field_path(first["loc"][len(inside) :])
    message = first["msg"].removeprefix("Value error, ")
    if not field:
        return invalid(None, "the request body must be a JSON object, with content-type application/json")
    if first["type"] == "missing":
        message = "is required"
    return invalid(field, f"{field}: {message}")


def field_path(location: tuple[str | int, ...]) -> str:
    """`messages[0].content` from ("messages", 0, "content")."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")
