"""The event loop of all router tests."""

from collections.abc import Callable, Mapping

import pytest

from tests.unhurried import UnhurriedLoop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], UnhurriedLoop]]:
    """A loop whose clock ignores pauses of the machine, which would make groups stale."""
    return {"unhurried": UnhurriedLoop}
