"""Groups of ranks by shape, as test parameters."""

import pytest

GROUPS: dict[str, tuple[list[int], int]] = {"one": ([1], 1), "tp2": ([2], 1), "pp2": ([2], 2), "pp2 x tp2": ([4], 2)}
"""Ranks of each pod, and pipeline stages."""
groups = pytest.mark.parametrize(("pods", "stages"), GROUPS.values(), ids=GROUPS.keys())
