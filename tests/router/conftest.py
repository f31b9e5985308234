"""The event loop of all router tests."""

import pathlib
from collections.abc import Callable, Mapping

import pytest

from tests.router.fakes import TOKEN
from tests.unhurried import UnhurriedLoop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], UnhurriedLoop]]:
    """A loop whose clock ignores pauses of the machine, which would make groups stale."""
    return {"unhurried": UnhurriedLoop}


@pytest.fixture
def token_file(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return str(path)
