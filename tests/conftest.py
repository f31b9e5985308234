"""Settings of all tests.

Property tests have no time limit per example, because a loaded machine is no failure. Without a GPU Triton's interpreter runs the
kernels; Triton reads the variable at its first import, which torch would cause. Torch computes with one thread: tiny tensors gain
nothing from more, ranks share the process, and a thread that waits for another on a busy core takes most of a test's time.

The modules and items that the collection of tests leaves are excluded from collections of garbage: nothing frees them.

Coverage makes pure Python three times slower, so property tests and those in `UNTRACED` are not traced: others run these lines.
"""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.interpreter import quicken_interpreter

ROOT = Path(__file__).parent
UNTRACED = tuple(
    ROOT / place
    for place in (
        *("bench", "gpu", "properties", "runtime/equality", "runtime/model/gpu", "runtime/rank/device", "runtime/rank/kernels"),
        *("control/search", "control/loop/test_crash_anywhere.py", "router/search", "frontend/stream/test_resume.py"),
        *(f"control/decide/{name}.py" for name in ("scaling/test_scale", "test_every_field", "test_partition", "test_rollout")),
        *(f"control/decide/test_{name}.py" for name in ("min_ready", "repeatable_plan", "rollout_small_cases")),
        *(f"runtime/core/test_{name}.py" for name in ("eviction", "miss_ratio")),
        "runtime/rank/step/test_verification.py",
    )
)
"""Folders and modules with simulations, and with tests that run the same lines in very many cases."""
_TRACES_CHILDREN = "COVERAGE_PROCESS_CONFIG"
"""Variable by which coverage traces the processes that a test starts."""

os.environ["PHALANX_TOTALS"] = ""  # kept counterexamples and planted faults are no searches

settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):  # of NVIDIA, of AMD
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without collections of garbage, which would pass again and again over all that is imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Leaves nothing for extension modules to report as leaked at the exit."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Runs before the fixtures of a test, those of its module too. A test may have loaded a rank, which sets the threads."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    quicken_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that are not traced."""
    for item in items:
        is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if is_property or any(item.path.is_relative_to(folder) for folder in UNTRACED):
            item.add_marker("no_cover")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Leaves the processes of an untraced test untraced too."""
    config = os.environ.pop(_TRACES_CHILDREN, None) if item.get_closest_marker("no_cover") else None
    try:
        return (yield)
    finally:
        if config is not None:
            os.environ[_TRACES_CHILDREN] = config
