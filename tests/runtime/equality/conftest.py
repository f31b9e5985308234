"""Runs every equality test with and without lag; pipeline stages have no lag.

`make test` runs each test with one of both, chosen by its name, and `make test-all` with the other one too.
"""

from collections.abc import Iterator
from zlib import crc32

import pytest

from tests.runtime.lag import lagging

LAGS = "lag 0", "lag 1"


@pytest.fixture(autouse=True, params=[0, 1], ids=LAGS)
def lag(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixtures of a module, such as the answers to compare with, are made before, without lag."""
    with lagging(request.param):
        yield


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not ("lag 1" in item.name and "pp" in item.name)]
    for item in items:
        own = next((lag for lag in LAGS if lag in item.name), None)
        if own is not None and "pp" not in item.name and own != LAGS[crc32(_without_lag(item.nodeid).encode()) % 2]:
            item.add_marker(pytest.mark.slow)


def _without_lag(name: str) -> str:
    for lag in LAGS:
        name = name.replace(lag, "")
    return name
