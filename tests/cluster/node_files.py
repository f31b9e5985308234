"""Texts of a node's configuration files."""

import json
from pathlib import Path

from tests.cluster.config import DNS_SERVICE_IP, PAUSE_IMAGE, POD_CIDR, Node

SOCKET = "/run/phalanx/containerd.sock"  # in the node's own /run
# Folders that containerd, CNI and the kubelet always write to. Each node mounts its own: kubelets delete others' sockets.
PRIVATE_FOLDERS = ("/run", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers")
# Settings of the machine that the kubelet writes. Each node mounts its own files over them.
MACHINE_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def init_script(folder: Path, store: Path, init: Path) -> str:
    """Returns the shell script that sets up mounts and then becomes `init`, the node's PID 1."""
    lines = ["set -e"]
    lines += [f"mount -t tmpfs node {private}" for private in PRIVATE_FOLDERS]
    lines += ["mkdir -p /run/phalanx /run/lock"]
    for number, setting in enumerate(MACHINE_SETTINGS):
        lines.append(f"[ ! -e /proc/sys/{setting} ] || mount --bind '{folder}/settings/{number}' /proc/sys/{setting}")
    for shared in (folder, store):  # volumes mounted by the kubelet must reach the containers
        lines += [f"mount --bind '{shared}' '{shared}'", f"mount --make-rshared '{shared}'"]
    return "\n".join([*lines, f"touch '{folder}/mounted'", f"exec '{init}'"])


def cni_config(node: Node, folder: Path) -> str:
    """Connects pods to the node's bridge cni0, with addresses of the node's range."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,  # other pods see the real address
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": f"{folder}/ipam",
            "ranges": [[{"subnet": node.pod_cidr}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, portmap]}, indent=1)


def containerd_config(folder: Path, store: Path, cni_plugins: Path, runc: Path) -> str:
    """Version 2: containerd 1.6 and 1.7 read it, 2.x converts it at start."""
    return f"""version = 2
root = "{store}/containerd"
state = "/run/phalanx/containerd"
oom_score = 0
[grpc]
  address = "{SOCKET}"
[ttrpc]
  address = "{SOCKET}.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true              # without CAP_SYS_RESOURCE a score cannot be lowered
  disable_apparmor = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  netns_mounts_under_state_dir = true        # they end with the node
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{cni_plugins}"
  conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = false
  BinaryName = "{runc}"
"""


def kubelet_config(node: Node, folder: Path, pki: Path, cgroup: str) -> str:
    """Returns the kubelet's settings as JSON, which is YAML."""
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/{node.name}-server.crt",
        "tlsPrivateKeyFile": f"{pki}/{node.name}-server.key",
        "address": node.ip,
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,  # 1.35 and later refuse version 1 without it
        "clusterDNS": [DNS_SERVICE_IP],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{folder}/resolv.conf",  # empty: pods do not use the machine's
        "podLogsDir": f"{folder}/podlogs",
        "volumePluginDir": f"{folder}/volplugins",
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "nodeStatusUpdateFrequency": "5s",
        "evictionHard": {  # tests are not evicted if the disk is full
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
    }
    return json.dumps(settings, indent=1)


def proxy_config(node: Node, pki: Path) -> str:
    """Returns kube-proxy's settings as JSON, which is YAML."""
    settings = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{pki}/proxy.kubeconfig"},
        "hostnameOverride": node.name,
        "mode": "iptables",
        "clusterCIDR": POD_CIDR,
        "bindAddress": node.ip,
        # the node must not resize the machine's connection table
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "oomScoreAdj": 0,
    }
    return json.dumps(settings, indent=1)
