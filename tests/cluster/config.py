"""Files and addresses of a cluster. Clusters of different names can run at once."""

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
API_PORT = 6443
API_URL = f"https://{API_IP}:{API_PORT}"
NODE_GROUP = 10250
"""Group ID of kubelets and kube-proxies, which packet filters match."""
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
LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
"""Security context of containers, with a read-only root."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node with its address and those of its pods."""

    name: str
    ip: str
    pod_cidr: str


NODES = (Node("node1", "172.30.0.1", "10.244.0.0/24"), Node("node2", "172.30.0.2", "10.244.1.0/24"))


def node_named(name: str) -> Node:
    """Returns a node. Raises Failed."""
    for node in NODES:
        if node.name == name:
            return node
    raise Failed(f"no node {name!r}: expected {' or '.join(node.name for node in NODES)}")


def grace_s() -> int:
    """Returns the seconds without heartbeats until a node is NotReady: $PHALANX_NODE_GRACE, or 20. Kubelets send one each 5 s."""
    text = os.environ.get("PHALANX_NODE_GRACE", "20")
    if not text.isdigit() or int(text) < 6:
        raise Failed(f"PHALANX_NODE_GRACE={text!r}: expected whole seconds, 6 or more")
    return int(text)


@dataclass(frozen=True, slots=True)
class ClusterFiles:
    """Paths of a cluster. `down` keeps keys, logs and image stores."""

    name: str
    root: Path

    @property
    def lock(self) -> Path:
        """Locked by `up` and `down`."""
        return self.root / "lock"

    @property
    def pki(self) -> Path:
        """Keys, certificates and kubeconfigs. The digit is the version of their content."""
        return self.root / "pki-1"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.pki / "admin.kubeconfig"

    @property
    def logs(self) -> Path:
        """One log per daemon, of its last start."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Files of the running control plane."""
        return self.root / "run"

    @property
    def made_folders(self) -> Path:
        """Lists mount points created on the machine by all clusters. The last `down` removes them."""
        return self.root.parent / "made-folders"

    def netns(self, node: Node) -> Path:
        """The mount point of the node's network namespace."""
        return self.root / f"{node.name}.netns"

    def node(self, node: Node) -> Path:
        """The node's configuration and the data of its daemons."""
        return self.root / node.name

    def store(self, node: Node) -> Path:
        """The node's image store."""
        return self.root / f"{node.name}-store"

    def cgroup(self, node: Node) -> str:
        """The node's cgroup. A kubelet would delete other nodes' pods in a shared one."""
        return f"phalanx-{self.name}-{node.name}"

    def etcd_folders(self) -> tuple[Path, Path]:
        """Possible folders of etcd's data: in memory, or on disk if shared memory is small."""
        return Path(f"/dev/shm/phalanx-{self.name}-etcd"), self.run / "etcd"

    def etcd_folder(self) -> Path:
        """The folder of etcd's data on this machine."""
        in_memory, on_disk = self.etcd_folders()
        shared = Path("/dev/shm")
        return in_memory if shared.is_dir() and shutil.disk_usage(shared).free > ETCD_MIN_BYTES else on_disk


def cluster_files() -> ClusterFiles:
    """Returns the paths of cluster $PHALANX_CLUSTER, by default "phalanx". Raises Failed for an invalid name."""
    name = os.environ.get("PHALANX_CLUSTER", "phalanx")
    if not NAME.fullmatch(name):
        raise Failed(f"PHALANX_CLUSTER={name!r}: expected 1 to 32 lower-case letters, digits and dashes")
    return ClusterFiles(name, cache_root() / "clusters" / name)
