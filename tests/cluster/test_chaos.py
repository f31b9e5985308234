"""Failures under load by `bench.chaos`: each required kind once, and random ones in `make test-all`.

PHALANX_CHAOS_SEED repeats a printed seed.
"""

import os
import secrets

import pytest

from bench.chaos.__main__ import run
from bench.chaos.strikes import struck
from tests.cluster.fixtures import Cluster

pytestmark = pytest.mark.cluster
AWAY_S = 12.0
"""Short, so that other kinds fit into the time."""
KINDS = ("operator", "pod", "node", "api")
"""Required kinds. The operator is first: after another failure there may be no leader."""


def chosen_seed() -> int:
    return int(os.environ.get("PHALANX_CHAOS_SEED") or secrets.randbelow(1_000_000))


@pytest.mark.parametrize(
    "minutes", [pytest.param(0.0, id="each kind once"), pytest.param(3.0, id="three minutes", marks=pytest.mark.slow)]
)
def test_state_converges_after_every_failure(cluster: Cluster, capsys: pytest.CaptureFixture[str], minutes: float) -> None:
    if cluster.files is None:
        pytest.skip("kills nodes: only in the cluster of this machine")
    with capsys.disabled():
        result = run(cluster, minutes=minutes, seed=chosen_seed(), first=KINDS, max_outage_s=AWAY_S, has_alerts=minutes > 0)
    assert result.holds, result
    assert set(KINDS) <= struck(result.strikes)


@pytest.mark.slow
def test_answers_of_all_tiers_survive_failures(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    if cluster.files is None:
        pytest.skip("kills nodes: only in the cluster of this machine")
    with capsys.disabled():
        result = run(cluster, minutes=0.0, seed=chosen_seed(), first=("pod", "router"), max_outage_s=AWAY_S, has_rungs=True)
    assert result.holds, result
    assert result.streams["completed"] > 50, result
    assert [tier for tier, count in result.rungs.items() if not count] == [], result
