"""The rules of this folder share the syntax trees of all modules."""

import gc
from collections.abc import Iterator

import pytest

from tests.syntax import forget_trees


@pytest.fixture(scope="package", autouse=True)
def trees() -> Iterator[None]:
    """Keeps the trees until the last rule is checked. No garbage is collected meanwhile, because trees have no cycles."""
    gc.disable()
    yield
    forget_trees()
    gc.enable()
