"""The fixture `cluster`, one per session.

CLUSTER unset: the cluster of this machine, started and stopped if it is down. CLUSTER=current: that of the kubeconfig.
CLUSTER=none: dependent tests are skipped.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from images.steps import ROOT
from tests.cluster import lifecycle, namespaces
from tests.cluster.access import Cluster, current_cluster, local_cluster
from tests.cluster.config import NODES, cluster_files
from tools.errors import Failed, Missing

__all__ = ["Cluster", "cluster"]


def _call(*words: str) -> None:
    status = subprocess.run([sys.executable, "-m", "tests.cluster", *words], cwd=ROOT).returncode
    if status != 0:
        raise Failed(f"python3 -m tests.cluster {' '.join(words)}: exit status {status}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster with the images of Phalanx."""
    mode = os.environ.get("CLUSTER", "")
    if mode == "none":
        pytest.skip("CLUSTER=none")
    if mode == "current":
        try:
            yield current_cluster()
        except Missing as missing:
            pytest.fail(str(missing), pytrace=False)
        return
    if mode:
        pytest.fail(f"CLUSTER={mode!r}: expected current, none or nothing", pytrace=False)
    files = cluster_files()
    was_up = lifecycle.is_up(files)
    _call("up", "--images")
    try:
        # services and pods answer only in the namespace
        with namespaces.inside(files.netns(NODES[0])):
            yield local_cluster()
    finally:
        if not was_up:
            _call("down")
