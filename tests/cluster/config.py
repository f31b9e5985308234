"""Where a cluster keeps its files, and the addresses in it. Two clusters of different names can run side by side."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.cache import cache_root
from tools.errors import Failed

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?")
GPUS_PER_NODE = 8
GPU_RESOURCE = "nvidia.com/gpu"

API_IP = "172.30.0.1"  # also the first node's: the control plane shares its network
API_URL = f"https://{API_IP}:6443"
NETWORK_BITS = 24
SERVICE_CIDR = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"
DNS_SERVICE_IP = "10.96.0.10"
DNS_PORT = 10053  # CoreDNS in the first node's network; 53 is the Service's
DNS_READY_PORT = 8181
POD_CIDR = "10.244.0.0/16"
PAUSE_IMAGE = "localhost/pause:1"
BUSYBOX_IMAGE = "localhost/busybox:1"
ETCD_MIN_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its name, its address, and the addresses of its pods."""

    name: str
    ip: str
    pod_cidr: str


NODES = (Node("node1", "172.30.0.1", "10.244.0.0/24"), Node("node2", "172.30.0.2", "10.244.1.0/24"))


def node_named(name: str) -> Node:
    """The node of that name. Raises Failed."""
    for node in NODES:
        if node.name == name:
            return node
    raise Failed(f"no node {name!r}: expected {' or '.join(node.name for node in NODES)}")


def grace_s() -> int:
    """Seconds of a kubelet's silence before its node is NotReady: $PHALANX_NODE_GRACE, else 20. The kubelet speaks every 5 s."""
    text = os.environ.get("PHALANX_NODE_GRACE", "20")
    if not text.isdigit() or int(text) < 6:
        raise Failed(f"PHALANX_NODE_GRACE={text!r}: expected whole seconds, 6 or more")
    return int(text)


@dataclass(frozen=True, slots=True)
class ClusterFiles:
    """Every path of one cluster. Keys, logs and the nodes' image stores outlive `down`; all else goes."""

    name: str
    root: Path

    @property
    def lock(self) -> Path:
        """The lock that `up` and `down` hold."""
        return self.root / "lock"

    @property
    def pki(self) -> Path:
        """Keys, certificates, kubeconfigs. The digit changes with what they say."""
        return self.root / "pki-1"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.pki / "admin.kubeconfig"

    @property
    def logs(self) -> Path:
        """One log per daemon, of the last start."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Files of the running control plane; goes with it."""
        return self.root / "run"

    @property
    def made_folders(self) -> Path:
        """The list of mount points that had to be made on the machine, shared by all clusters; the last one down removes them."""
        return self.root.parent / "made-folders"

    def netns(self, node: Node) -> Path:
        """The file on which the node's network namespace is mounted."""
        return self.root / f"{node.name}.netns"

    def node(self, node: Node) -> Path:
        """The node's folder: configuration and what its daemons write."""
        return self.root / node.name

    def store(self, node: Node) -> Path:
        """The node's image store, kept from cluster to cluster."""
        return self.root / f"{node.name}-store"

    def cgroup(self, node: Node) -> str:
        """The node's cgroup, in every hierarchy: kubelets that shared one would destroy each other's pods as orphans."""
        return f"phalanx-{self.name}-{node.name}"

    def etcd_folders(self) -> tuple[Path, Path]:
        """Where etcd's data may lie: in memory, or on disk where shared memory is small (as in a container)."""
        return Path(f"/dev/shm/phalanx-{self.name}-etcd"), self.run / "etcd"

    def etcd_folder(self) -> Path:
        """Where etcd's data goes on this machine."""
        in_memory, on_disk = self.etcd_folders()
        shared = Path("/dev/shm")
        return in_memory if shared.is_dir() and shutil.disk_usage(shared).free > ETCD_MIN_BYTES else on_disk


def cluster_files() -> ClusterFiles:
    """The paths of the cluster that $PHALANX_CLUSTER names ("phalanx" by default). Raises Failed for an impossible name."""
    name = os.environ.get("PHALANX_CLUSTER", "phalanx")
    if not NAME.fullmatch(name):
        raise Failed(f"PHALANX_CLUSTER={name!r}: expected 1 to 32 lower-case letters, digits and dashes")
    return ClusterFiles(name, cache_root() / "clusters" / name)
