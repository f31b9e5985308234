"""Settings of all tests.

Property tests have no time limit per example, because a loaded machine is no failure. Without a GPU Triton's interpreter runs the
kernels; Triton reads the variable at its first import, which torch would cause. Torch computes with one thread: tiny tensors gain
nothing from more, ranks share the process, and a thread that waits for another on a busy core takes most of a test's time.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.interpreter import quicken_interpreter

settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):  # of NVIDIA, of AMD
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Runs before the fixtures of a test, those of its module too. A test may have loaded a rank, which sets the threads."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    quicken_interpreter()
