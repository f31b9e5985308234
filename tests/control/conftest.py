"""Golden files: compared, or written anew with --golden-update (`make golden`)."""

import pathlib
from collections.abc import Callable

import pytest

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
Check = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-update", action="store_true", default=False, help="write golden files instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Check:
    """Compares a text with the golden file of that name."""
    update: bool = request.config.getoption("--golden-update", default=False)

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: make golden"
        assert text == path.read_text()

    return check
