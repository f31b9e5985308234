"""The cluster as a pytest fixture, one for the whole run.

CLUSTER unset: ours, brought up where it is down, and then taken down again at the end. CLUSTER=current: that of the kubeconfig.
CLUSTER=none: the tests that want one are skipped, with that reason. Import `cluster` in a conftest.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from images.steps import ROOT
from tests.cluster import lifecycle, namespaces
from tests.cluster.access import Cluster, current, ours
from tests.cluster.config import NODES, cluster_files
from tools.errors import Failed, Missing

__all__ = ["Cluster", "cluster"]


def _call(*words: str) -> None:
    status = subprocess.run([sys.executable, "-m", "tests.cluster", *words], cwd=ROOT).returncode
    if status != 0:
        raise Failed(f"python3 -m tests.cluster {' '.join(words)}: exit status {status}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster with our images in it."""
    mode = os.environ.get("CLUSTER", "")
    if mode == "none":
        pytest.skip("CLUSTER=none")
    if mode == "current":
        try:
            yield current()
        except Missing as missing:
            pytest.fail(str(missing), pytrace=False)
        return
    if mode:
        pytest.fail(f"CLUSTER={mode!r}: expected current, none or nothing", pytrace=False)
    files = cluster_files()
    was_up = lifecycle.is_up(files)
    _call("up", "--images")
    try:
        # Services and pods answer inside only, so this process and what it starts from here on goes there.
        with namespaces.inside(files.netns(NODES[0])):
            yield ours()
    finally:
        if not was_up:
            _call("down")
