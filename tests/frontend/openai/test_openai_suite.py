"""The OpenAI suite over a fake backend."""

from collections.abc import Iterator

import pytest

from phalanx_frontend.app import create_app
from tests.frontend.fakes import FakeBackend
from tests.frontend.openai_suite import OpenAISuite
from tests.frontend.openai_target import Target
from tests.frontend.serving import served_in_thread


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with served_in_thread(create_app(FakeBackend())) as url:
        yield Target(url, "tiny")


class TestApiServer(OpenAISuite):
    """The whole suite."""
