"""Parameters of tests of which `make test` runs some, and `make test-all` all."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[object], *kept: object) -> list[Any]:
    """Returns values for `parametrize`, a tuple for several parameters. Those that are not kept are slow."""
    return [value if value in kept else _slow(value) for value in values]


def _slow(value: object) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
