"""What is wrong with a body, told by its field."""

from collections.abc import Sequence
from typing import Any

from phalanx_frontend.errors import ApiError, invalid


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
