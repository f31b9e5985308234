"""A store with one batch of five requests."""

from pathlib import Path

import pytest

from phalanx_router.batches.store import BatchStore
from tests.router.batches.scene import BatchScene


@pytest.fixture
def scene(tmp_path: Path) -> BatchScene:
    return BatchScene(BatchStore(tmp_path, 1 << 20))
