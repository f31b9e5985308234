"""Three minutes of `bench.chaos`: strikes under load. It prints its seed; PHALANX_CHAOS_SEED repeats it."""

import os
import secrets

import pytest

from bench.chaos.__main__ import run
from tests.cluster.fixtures import Cluster

pytestmark = pytest.mark.cluster
MINUTES = 3.0


def test_the_state_converges_after_every_strike(cluster: Cluster) -> None:
    if cluster.files is None:
        pytest.skip("nodes and the API server are struck: the cluster of this machine only")
    seed = int(os.environ.get("PHALANX_CHAOS_SEED") or secrets.randbelow(1_000_000))
    result = run(cluster, minutes=MINUTES, seed=seed)
    assert result.holds, result
