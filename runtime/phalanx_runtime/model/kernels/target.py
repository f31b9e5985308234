"""Compiles variants for a GPU that this machine may lack. Triton's code and keys are those of a launch on that GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)}
"""A100, H100 and H200, B200."""


class AbsentDevice:
    """Triton's driver of a device that nothing is launched on."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """Returns the architecture to compile for."""
        return self._target

    def get_current_device(self) -> Any:
        """Returns the key of the kernels in memory: one device per architecture."""
        return self._target.arch

    def get_current_stream(self, device: Any) -> int:
        """Returns the default stream."""
        return 0


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[None]:
    """Within, variants compile for this architecture."""
    config = triton.runtime.driver
    try:
        before = config.active
    except RuntimeError:  # no device
        before = None
    config.set_active(AbsentDevice(target))
    try:
        yield
    finally:
        config.set_active(before)
