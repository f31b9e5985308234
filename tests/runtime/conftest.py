"""Settings of all runtime tests."""

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny tensors gain nothing from threads, and ranks that are threads of one process would fight over them."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
