"""A second cluster starts and stops repeatedly, recovers from any kill and leaves nothing."""

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


def run(*words: str) -> str:
    completed = call(*words)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def traces(files: ClusterFiles) -> list[str]:
    """Returns mentions of the cluster anywhere on the machine, independent of the code under test."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(files.root).encode() in (folder / "cmdline").read_bytes():
                found.append(f"process {folder.name}")
        except OSError:  # it has exited
            continue
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(files.root) in line]
    for top in ("/sys/fs/cgroup", "/dev/shm", "/run"):
        found += [str(path) for path in Path(top).rglob(f"*phalanx-{NAME}*")]
    return found


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFiles]:
    """Paths of the tests' own cluster; down before and after."""
    if os.environ.get("CLUSTER"):
        pytest.skip(f"CLUSTER={os.environ['CLUSTER']}: needs a cluster of this machine")
    monkeypatch.setenv("PHALANX_CLUSTER", NAME)
    run("down")
    yield cluster_files()
    run("down")


def pids(files: ClusterFiles) -> dict[str, int]:
    """Returns the daemons by name, without short-lived programs."""
    found = {process.name: process.pid for each in NODES for process in namespaces.processes(files.netns(each))}
    return {name: pid for name, pid in found.items() if name in DAEMONS}


def test_up_and_down_are_idempotent(files: ClusterFiles) -> None:
    run("up")
    before = pids(files)
    run("up")
    assert pids(files) == before
    assert run("kubectl", "get", "nodes", "-o", "name").split() == ["node/node1", "node/node2"]
    started_s = time.monotonic()
    run("down")
    print(f"down: {time.monotonic() - started_s:.1f} s")
    assert (lifecycle.remains(files), traces(files)) == ([], [])
    run("down")
    assert call("status").returncode == 1


@pytest.mark.parametrize("victim", ["etcd", "kube-apiserver", "coredns", "kubelet", "containerd", "node2-init", "kube-proxy"])
def test_up_repairs_killed_programs(files: ClusterFiles, victim: str) -> None:
    run("up")
    before = pids(files)
    os.kill(before[victim], signal.SIGKILL)
    run("up")
    after = pids(files)
    assert after[victim] != before[victim]
    assert set(before) == set(after) == DAEMONS
    assert run("status")


@pytest.mark.parametrize("stage", ["network", "etcd", "node2-init", "kubelet"])
def test_up_works_after_it_was_killed_halfway(files: ClusterFiles, stage: str) -> None:
    command = [sys.executable, "-m", "tests.cluster", "up"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as interrupted:
        while interrupted.poll() is None:
            if stage in pids(files) or (stage == "network" and namespaces.exists(files.netns(NODES[1]))):
                interrupted.kill()
    assert interrupted.returncode == -signal.SIGKILL
    run("up")
    assert all(node.is_up(files, each) for each in NODES)
    run("down")
    assert (lifecycle.remains(files), traces(files)) == ([], [])


def test_down_works_after_up_was_killed_halfway(files: ClusterFiles) -> None:
    command = [sys.executable, "-m", "tests.cluster", "up"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as interrupted:
        while interrupted.poll() is None:
            if "containerd" in pids(files):
                interrupted.kill()
    run("down")
    assert (lifecycle.remains(files), traces(files)) == ([], [])
