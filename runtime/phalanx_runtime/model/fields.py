"""Fields of config.json, read with their types. A value that makes no sense is refused with its name."""

from collections.abc import Mapping

from phalanx_runtime.errors import ModelError

Json = Mapping[str, object]


def integer(raw: Json, field: str, default: int | None = None) -> int:
    """A whole number of at least 1. Raises ModelError."""
    value = raw.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {field} must be a whole number of at least 1, not {value!r}")
    return value


def number(raw: Json, field: str, default: float | None = None) -> float:
    """A number. Raises ModelError."""
    value = raw.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"config.json: {field} must be a number, not {value!r}")
    return float(value)


def optional_number(raw: Json, field: str, default: float | None = None) -> float | None:
    """A number, `default` where the field is missing, None where it is null. Raises ModelError."""
    if field not in raw:
        return default
    return None if raw[field] is None else number(raw, field)
