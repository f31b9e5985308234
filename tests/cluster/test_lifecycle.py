"""The cluster comes up twice, goes down twice, recovers from any kill, and leaves nothing: a second cluster, beside the first."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import lifecycle, namespaces, node
from tests.cluster.config import NODES, ClusterFiles, cluster_files

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
NAME = "lifecycle"

DAEMONS = {
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns"),
    *("containerd", "kubelet", "kube-proxy", "node1-init", "node2-init"),
}


def call(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.cluster", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)


def done(*words: str) -> str:
    found = call(*words)
    assert found.returncode == 0, found.stderr
    return found.stdout


def traces(files: ClusterFiles) -> list[str]:
    """What speaks of the cluster anywhere on the machine, found without asking the code under test."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(files.root).encode() in (folder / "cmdline").read_bytes():
                found.append(f"process {folder.name}")
        except OSError:  # it has ended
            continue
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(files.root) in line]
    for top in ("/sys/fs/cgroup", "/dev/shm", "/run"):
        found += [str(path) for path in Path(top).rglob(f"*phalanx-{NAME}*")]
    return found


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFiles]:
    """The paths of a cluster of the tests' own; down before and after."""
    if os.environ.get("CLUSTER"):
        pytest.skip(f"CLUSTER={os.environ['CLUSTER']}: asks about clusters of this machine")
    monkeypatch.setenv("PHALANX_CLUSTER", NAME)
    done("down")
    yield cluster_files()
    done("down")


def pids(files: ClusterFiles) -> dict[str, int]:
    """The daemons, by name; not the short-lived programs that kube-proxy and containerd start now and then."""
    found = {process.name: process.pid for one in NODES for process in namespaces.processes(files.netns(one))}
    return {name: pid for name, pid in found.items() if name in DAEMONS}


def test_up_and_down_are_idempotent(files: ClusterFiles) -> None:
    done("up")
    before = pids(files)
    done("up")
    assert pids(files) == before
    assert done("kubectl", "get", "nodes", "-o", "name").split() == ["node/node1", "node/node2"]
    began = time.monotonic()
    done("down")
    print(f"down: {time.monotonic() - began:.1f} s")
    assert (lifecycle.left(files), traces(files)) == ([], [])
    done("down")
    assert call("status").returncode == 1


@pytest.mark.parametrize("victim", ["etcd", "kube-apiserver", "coredns", "kubelet", "containerd", "node2-init", "kube-proxy"])
def test_up_repairs_killed_programs(files: ClusterFiles, victim: str) -> None:
    done("up")
    before = pids(files)
    os.kill(before[victim], signal.SIGKILL)
    done("up")
    after = pids(files)
    assert after[victim] != before[victim]
    assert set(before) == set(after) == DAEMONS
    assert done("status")


@pytest.mark.parametrize("reached", ["network", "etcd", "node2-init", "kubelet"])
def test_up_works_after_it_was_killed_half_way(files: ClusterFiles, reached: str) -> None:
    command = [sys.executable, "-m", "tests.cluster", "up"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as interrupted:
        while interrupted.poll() is None:
            if reached in pids(files) or (reached == "network" and namespaces.exists(files.netns(NODES[1]))):
                interrupted.kill()
    assert interrupted.returncode == -signal.SIGKILL
    done("up")
    assert all(node.is_up(files, one) for one in NODES)
    done("down")
    assert (lifecycle.left(files), traces(files)) == ([], [])


def test_down_works_after_up_was_killed_half_way(files: ClusterFiles) -> None:
    command = [sys.executable, "-m", "tests.cluster", "up"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as interrupted:
        while interrupted.poll() is None:
            if "containerd" in pids(files):
                interrupted.kill()
    done("down")
    assert (lifecycle.left(files), traces(files)) == ([], [])
