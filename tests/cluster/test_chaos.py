"""Three minutes of `bench.chaos`: failures under load. PHALANX_CHAOS_SEED repeats a printed seed."""

import os
import secrets

import pytest

from bench.chaos.__main__ import run
from bench.chaos.strikes import struck
from tests.cluster.fixtures import Cluster

pytestmark = pytest.mark.cluster
MINUTES = 3.0
AWAY_S = 12.0
"""Short, so that other kinds fit into three minutes."""
KINDS = ("operator", "pod", "node", "api")
"""Required kinds. The operator is first: after another failure there may be no leader."""


def test_state_converges_after_every_failure(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    if cluster.files is None:
        pytest.skip("kills nodes: only in the cluster of this machine")
    seed = int(os.environ.get("PHALANX_CHAOS_SEED") or secrets.randbelow(1_000_000))
    with capsys.disabled():
        print(f"\nchaos: seed {seed}", flush=True)
    result = run(cluster, minutes=MINUTES, seed=seed, first=KINDS, max_outage_s=AWAY_S)
    assert result.holds, result
    assert set(KINDS) <= struck(result.strikes)
