"""Groups of ranks by shape, as test parameters."""

import pytest

from tests.slow_cases import some

GROUPS: dict[str, tuple[list[int], int]] = {"one": ([1], 1), "tp2": ([2], 1), "pp2": ([2], 2), "pp2 x tp2": ([4], 2)}
"""Ranks of each pod, and pipeline stages."""
KEPT = [GROUPS[name] for name in GROUPS if name != "pp2"]
groups = pytest.mark.parametrize(("pods", "stages"), some(GROUPS.values(), *KEPT), ids=GROUPS.keys())
