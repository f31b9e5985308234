"""Settings of all router tests."""

from collections.abc import Callable, Mapping

import pytest

from tests.unhurried import UnhurriedLoop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], UnhurriedLoop]]:
    """Groups fall silent here because a test says so, never because the machine stood still for a quarter of a second."""
    return {"unhurried": UnhurriedLoop}
