"""Kubernetes quantities as the spec writes them: memory such as `16Gi`, CPU such as `4` or `500m`."""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

MEMORY_PATTERN = r"^[0-9]*[1-9][0-9]*(\.[0-9]{1,3})?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$|^0\.[0-9]*[1-9](M|G|T|P|Mi|Gi|Ti|Pi)$"
CPU_PATTERN = r"^[1-9][0-9]*m?$|^[0-9]+\.[0-9]{1,3}$"
_FACTORS = (
    {"": 1} | {s: 1000 ** (i + 1) for i, s in enumerate("kMGTP")} | {f"{s}i": 1024 ** (i + 1) for i, s in enumerate("KMGTP")}
)


def parse_bytes(quantity: str) -> int:
    """Bytes of a memory quantity, rounded down. Raises: ValueError when it is none."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity)
    if not match or not re.search(MEMORY_PATTERN, quantity):
        raise ValueError(f"{quantity!r} is no memory quantity such as 16Gi")
    return int(Decimal(match[1]) * _FACTORS[match[2]])


def _text(value: object) -> object:
    """YAML reads `cpu: 4` as a number; the API takes both."""
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
