"""Compiled kernels by instruction set."""

import pytest
from torch import Tensor

from phalanx_runtime.model.native.library import Library, library

TARGETS = ["native", "x86-64-v3", "x86-64"]
"""This processor; AVX2; neither AVX2 nor AVX-512."""


def compiled(target: str) -> Library:
    """Returns the kernels for an instruction set; skips the test without a compiler."""
    kernels = library(target)
    if kernels is None:
        pytest.skip("no compiler here")
    return kernels


class Ones:
    """Adds 1 to all outputs of a linear."""

    def add(self, y: Tensor, x: Tensor, *, alternates: bool = False) -> None:
        y += 1
