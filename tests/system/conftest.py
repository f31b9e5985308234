"""The model that programs serve."""

import os
import sys
from pathlib import Path

import pytest

from tests.runtime.tiny import save_tiny


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", action="store_true", help="write the pictures of the documentation")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    folder = tmp_path_factory.mktemp("programs")
    (folder / "token").write_text("a-service-token")
    return save_tiny(folder / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def long_model(model: Path) -> Path:
    """The model, for streams and prompts that are long enough for what a test does to them."""
    return save_tiny(model.parent / "long", max_position_embeddings=4096)
