"""etcd, API server, controller manager, scheduler and CoreDNS, in the first node's network."""

import http.client
import shutil
from pathlib import Path

from tests.cluster import daemons, namespaces
from tests.cluster.api import Api
from tests.cluster.config import (
    API_IP,
    DNS_PORT,
    DNS_READY_PORT,
    DNS_SERVICE_IP,
    NODES,
    SERVICE_CIDR,
    ClusterFiles,
    grace_s,
)
from tests.cluster.programs import Programs

CORE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
READY_LIMIT_S = 90.0
GANGS = "--feature-gates=GenericWorkload=true,GangScheduling=true"
"""PodGroups and gang scheduling are alpha in Kubernetes."""
ISSUER = "https://kubernetes.default.svc.cluster.local"
COREFILE = f""".:{DNS_PORT} {{{{
  errors
  ready {API_IP}:{DNS_READY_PORT}
  cache 5
  kubernetes cluster.local in-addr.arpa {{{{
    kubeconfig {{pki}}/dns.kubeconfig
    pods insecure
    ttl 5
  }}}}
}}}}
"""


def _start(files: ClusterFiles, program: Path, *flags: str, env: dict[str, str] | None = None) -> daemons.Daemon:
    with namespaces.inside(files.netns(NODES[0])):
        return daemons.start(program.name, program, *flags, log=files.logs / f"{program.name}.log", env=env)


def is_up(files: ClusterFiles, api: Api) -> bool:
    """Whether the four programs run and the API server is ready."""
    return set(CORE) <= {process.name for process in namespaces.processes(files.netns(NODES[0]))} and api.is_ready()


def start_api(files: ClusterFiles, programs: Programs, api: Api) -> None:
    """Starts etcd and the API server and waits until it is ready."""
    data = files.etcd_folder()
    data.mkdir(parents=True, mode=0o700)
    peer, client = "http://127.0.0.1:2380", "http://127.0.0.1:2379"
    _start(
        files,
        programs.bin / "etcd",
        *("--name=one", f"--data-dir={data}", f"--initial-cluster=one={peer}", f"--initial-advertise-peer-urls={peer}"),
        *(f"--listen-peer-urls={peer}", f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
        "--unsafe-no-fsync",  # the data need not survive a power failure
        env=programs.environment(),
    )
    pki = files.pki
    server = _start(
        files,
        programs.kube("kube-apiserver"),
        *(f"--etcd-servers={client}", f"--advertise-address={API_IP}", f"--service-cluster-ip-range={SERVICE_CIDR}"),
        *(f"--cert-dir={files.run}", f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key"),
        *(f"--client-ca-file={pki}/ca.crt", "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
        *(f"--service-account-key-file={pki}/sa.pub", f"--service-account-signing-key-file={pki}/sa.key"),
        f"--service-account-issuer={ISSUER}",
        *(f"--kubelet-client-certificate={pki}/kubelet-client.crt", f"--kubelet-client-key={pki}/kubelet-client.key"),
        *(f"--kubelet-certificate-authority={pki}/ca.crt", "--kubelet-preferred-address-types=InternalIP"),
        *(f"--requestheader-client-ca-file={pki}/ca.crt", "--requestheader-allowed-names=front-proxy-client"),
        *("--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group"),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        *(f"--proxy-client-cert-file={pki}/front-proxy-client.crt", f"--proxy-client-key-file={pki}/front-proxy-client.key"),
        *("--allow-privileged=true", "--profiling=false"),
        *(GANGS, "--runtime-config=scheduling.k8s.io/v1alpha2=true"),
    )
    daemons.wait_for_daemon("API server ready", api.is_ready, READY_LIMIT_S, server)


def start_controllers(files: ClusterFiles, programs: Programs) -> daemons.Daemon:
    """Starts the scheduler and the controller manager and returns the latter."""
    pki = files.pki

    def common(name: str) -> tuple[str, ...]:
        config = f"{pki}/{name}.kubeconfig"
        return (
            *(f"--kubeconfig={config}", f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}"),
            *("--leader-elect=false", "--bind-address=127.0.0.1", f"--cert-dir={files.run}", "--profiling=false"),
            GANGS,
        )

    manager = _start(
        files,
        programs.kube("kube-controller-manager"),
        *common("controller-manager"),
        *("--use-service-account-credentials=true", f"--service-account-private-key-file={pki}/sa.key"),
        *(
            f"--root-ca-file={pki}/ca.crt",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
        ),
        "--allocate-node-cidrs=false",  # fixed in each node's CNI configuration
        f"--node-monitor-grace-period={grace_s()}s",
        f"--flex-volume-plugin-dir={files.run}/volplugins",
        "--horizontal-pod-autoscaler-sync-period=5s",
        *("--kube-api-qps=500", "--kube-api-burst=1000"),  # the default of 20 delays the first service account by 5 s
    )
    _start(files, programs.kube("kube-scheduler"), *common("scheduler"))
    return manager


def wait_for_accounts(api: Api, manager: daemons.Daemon) -> None:
    """Waits for the default service account, without which pods are rejected."""
    path = "/api/v1/namespaces/default/serviceaccounts/default"
    daemons.wait_for_daemon("default service account", lambda: api.find(path) is not None, READY_LIMIT_S, manager)


def dns_is_up(files: ClusterFiles) -> bool:
    """Whether CoreDNS runs."""
    return any(process.name == "coredns" for process in namespaces.processes(files.netns(NODES[0])))


def start_dns(files: ClusterFiles, programs: Programs, api: Api) -> None:
    """Starts CoreDNS behind the Service kube-dns and waits for it: an earlier query would take five seconds."""
    corefile = files.run / "Corefile"
    corefile.write_text(COREFILE.format(pki=files.pki))
    server = _start(files, programs.coredns, "-conf", str(corefile))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {
            "clusterIP": DNS_SERVICE_IP,
            "ports": [{"name": p.lower(), "port": 53, "protocol": p, "targetPort": DNS_PORT} for p in ("UDP", "TCP")],
        },
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [API_IP], "conditions": {"ready": True}}],
        "ports": [{"name": p.lower(), "port": DNS_PORT, "protocol": p} for p in ("UDP", "TCP")],
    }
    api.apply("/api/v1/namespaces/kube-system/services/kube-dns", service)
    api.apply("/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices/kube-dns", endpoints)
    daemons.wait_for_daemon("CoreDNS ready", lambda: _is_dns_ready(files), READY_LIMIT_S, server)


def _is_dns_ready(files: ClusterFiles) -> bool:
    connection = http.client.HTTPConnection(API_IP, DNS_READY_PORT, timeout=2.0)
    try:
        with namespaces.inside(files.netns(NODES[0])):
            connection.connect()
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def forget(files: ClusterFiles) -> None:
    """Removes the data of a stopped control plane."""
    for data in files.etcd_folders():
        shutil.rmtree(data, ignore_errors=True)
    shutil.rmtree(files.run, ignore_errors=True)
