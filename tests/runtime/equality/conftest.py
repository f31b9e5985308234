"""Runs every equality test with and without lag; pipeline stages have no lag."""

from collections.abc import Iterator

import pytest

from tests.runtime.lag import lagging


@pytest.fixture(autouse=True, params=[0, 1], ids=["lag 0", "lag 1"])
def lag(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixtures of a module, such as the answers to compare with, are made before, without lag."""
    with lagging(request.param):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not ("lag 1" in item.name and "pp" in item.name)]
