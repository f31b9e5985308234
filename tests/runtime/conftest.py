"""Settings of all runtime tests."""

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Uses one torch thread: tiny tensors gain nothing from more, and ranks share the process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
