"""Golden files, compared or rewritten with --golden-update (`make golden`), and polled routers."""

import pathlib
from collections.abc import AsyncIterator, Callable

import pytest

from tests.control.polled_routers import Scene, polled_routers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
Check = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-update", action="store_true", default=False, help="write golden files instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Check:
    """Returns a function that compares a text with a golden file."""
    update: bool = request.config.getoption("--golden-update", default=False)

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: make golden"
        assert text == path.read_text()

    return check


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with polled_routers() as scene:
        yield scene
