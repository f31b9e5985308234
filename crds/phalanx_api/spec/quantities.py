"""Quantities of the spec: memory such as `16Gi`, CPU such as `500m`, counts such as `25%`."""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

MEMORY_PATTERN = r"^[0-9]*[1-9][0-9]*(\.[0-9]{1,3})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$|^0\.[0-9]*[1-9](M|G|T|P|Mi|Gi|Ti|Pi)$"
PERCENT_PATTERN = r"^([0-9]|[1-9][0-9]|100)%$"
CPU_PATTERN = r"^[1-9][0-9]*m?$|^[0-9]+\.[0-9]{1,3}$"
_FACTORS = (
    {"": 1} | {s: 1000 ** (i + 1) for i, s in enumerate("kMGTP")} | {f"{s}i": 1024 ** (i + 1) for i, s in enumerate("KMGTP")}
)


def parse_bytes(quantity: str) -> int:
    """Returns the bytes of a memory quantity, rounded down. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    if not match or not re.search(MEMORY_PATTERN, quantity):
        raise ValueError(f"{quantity!r} is not a memory quantity such as 16Gi")
    return int(Decimal(match[1]) * _FACTORS[match[2]])


def _text(value: object) -> object:
    """Converts numbers, as YAML reads `cpu: 4`, to text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _schema(pattern: str) -> dict[str, Any]:
    kinds = [{"type": "integer"}, {"type": "string"}]
    return {"x-kubernetes-int-or-string": True, "anyOf": kinds, "pattern": pattern, "minimum": 1, "maxLength": 24}


Memory = Annotated[
    str, BeforeValidator(_text), Field(pattern=MEMORY_PATTERN, max_length=24), WithJsonSchema(_schema(MEMORY_PATTERN))
]
"""A memory quantity, kept as written."""
Cpu = Annotated[str, BeforeValidator(_text), Field(pattern=CPU_PATTERN, max_length=24), WithJsonSchema(_schema(CPU_PATTERN))]
"""A CPU quantity, kept as written."""


def _count(value: object) -> object:
    """Validates a count before the union of two types, which would report each error twice."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("must be a count or a percentage such as 25%")
    if isinstance(value, str) and not re.search(PERCENT_PATTERN, value):
        raise ValueError(f"{value!r} is not a percentage such as 25%")
    if isinstance(value, int) and not 0 <= value <= 1000:
        raise ValueError("must be from 0 to 1000")
    return value


def _count_schema() -> dict[str, Any]:
    kinds = [{"type": "integer"}, {"type": "string"}]
    numbers = {"minimum": 0, "maximum": 1000, "pattern": PERCENT_PATTERN, "maxLength": 4}
    return {"x-kubernetes-int-or-string": True, "anyOf": kinds} | numbers


Share = Annotated[int | str, BeforeValidator(_count), WithJsonSchema(_count_schema())]
"""A count, or a percentage of one."""


def share_of(share: int | str, total: int, *, up: bool) -> int:
    """Returns the count of a share of `total`, with percentages rounded up or down."""
    if isinstance(share, int):
        return share
    exact = int(share.removesuffix("%")) * total
    return -(-exact // 100) if up else exact // 100
