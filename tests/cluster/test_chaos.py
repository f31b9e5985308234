"""Three minutes of `bench.chaos`: strikes under load. It prints its seed; PHALANX_CHAOS_SEED repeats it."""

import os
import secrets

import pytest

from bench.chaos.__main__ import run
from bench.chaos.strikes import struck
from tests.cluster.fixtures import Cluster

pytestmark = pytest.mark.cluster
MINUTES = 3.0
AWAY_S = 12.0
"""Short, so that the kinds below leave room for others in three minutes."""
KINDS = ("operator", "pod", "node", "api")
"""What must be struck. The operator comes first: just after another strike it may be that nobody leads."""


def test_the_state_converges_after_every_strike(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    if cluster.files is None:
        pytest.skip("nodes and the API server are struck: the cluster of this machine only")
    seed = int(os.environ.get("PHALANX_CHAOS_SEED") or secrets.randbelow(1_000_000))
    with capsys.disabled():
        print(f"\nchaos: seed {seed}", flush=True)
    result = run(cluster, minutes=MINUTES, seed=seed, first=KINDS, most_away_s=AWAY_S)
    assert result.holds, result
    assert set(KINDS) <= struck(result.strikes)
