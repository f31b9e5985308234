"""The OpenAI suite over a fake backend."""

from collections.abc import Iterator

import pytest

from phalanx_frontend.app import create_app
from tests.frontend.fakes import FakeBackend
from tests.frontend.openai_suite import OpenAISuite
from tests.frontend.openai_target import Target
from tests.frontend.serving import served_apart


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with served_apart(create_app(FakeBackend())) as url:
        yield Target(url, "tiny")


class TestDoor(OpenAISuite):
    """Everything in the suite."""
