"""Keys, certificates and kubeconfigs of a cluster, made once by openssl."""

import base64
import json
import shutil
from pathlib import Path

from tests.cluster.config import API_IP, API_URL, KUBERNETES_SERVICE_IP, NODES
from tools.cache import finished
from tools.shell import output

DAYS = "3650"
API_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
API_ADDRESSES = ("127.0.0.1", API_IP, KUBERNETES_SERVICE_IP)
# subjects of clients with a kubeconfig
CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
    "dns": "/O=system:masters/CN=dns",
    **{node.name: f"/O=system:nodes/CN=system:node:{node.name}" for node in NODES},
}


def make_pki(folder: Path) -> Path:
    """Creates a CA, certificates of servers and clients, and the key of service account tokens. Returns the folder."""
    return finished(folder, _fill)


def _fill(folder: Path) -> None:
    folder.chmod(0o700)
    _key(folder, "ca")
    uses = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature")
    output(
        "openssl",
        "req",
        "-x509",
        "-new",
        "-key",
        "ca.key",
        "-subj",
        "/CN=test-ca",
        "-days",
        DAYS,
        "-out",
        "ca.crt",
        *uses,
        cwd=folder,
    )
    names = [f"DNS:{name}" for name in API_NAMES] + [f"IP:{address}" for address in API_ADDRESSES]
    _certificate(folder, "apiserver", "/CN=kube-apiserver", "serverAuth", names)
    _certificate(folder, "kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client", "clientAuth", [])
    _certificate(folder, "front-proxy-client", "/CN=front-proxy-client", "clientAuth", [])
    output("openssl", "genrsa", "-out", "sa.key", "2048", cwd=folder)
    output("openssl", "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub", cwd=folder)
    for name, subject in CLIENTS.items():
        _certificate(folder, name, subject, "clientAuth", [])
        (folder / f"{name}.kubeconfig").write_text(json.dumps(kubeconfig(folder, name), indent=1))
    for node in NODES:  # checked by the API server for logs and exec
        _certificate(folder, f"{node.name}-server", f"/CN={node.name}", "serverAuth", [f"DNS:{node.name}", f"IP:{node.ip}"])


def _key(folder: Path, name: str) -> None:
    output("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key", cwd=folder)


def _certificate(folder: Path, name: str, subject: str, usage: str, names: list[str]) -> None:
    _key(folder, name)
    lines = ["basicConstraints=CA:FALSE", "keyUsage=digitalSignature", f"extendedKeyUsage={usage}"]
    if names:
        lines.append(f"subjectAltName={','.join(names)}")
    (folder / "extensions").write_text("\n".join(lines) + "\n")
    request = output("openssl", "req", "-new", "-key", f"{name}.key", "-subj", subject, cwd=folder)
    signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS, "-extfile", "extensions")
    output("openssl", "x509", "-req", *signer, "-out", f"{name}.crt", stdin=request, cwd=folder)


def kubeconfig(folder: Path, name: str) -> dict[str, object]:
    """Returns a client's kubeconfig, valid in every namespace of the cluster: no loopback address."""

    def encoded(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "phalanx", "cluster": {"server": API_URL, "certificate-authority-data": encoded("ca.crt")}}],
        "users": [
            {"name": name, "user": {"client-certificate-data": encoded(f"{name}.crt"), "client-key-data": encoded(f"{name}.key")}}
        ],
        "contexts": [{"name": "phalanx", "context": {"cluster": "phalanx", "user": name}}],
        "current-context": "phalanx",
    }


def forget(folder: Path) -> None:
    """Removes the keys; the next cluster makes new ones."""
    shutil.rmtree(folder, ignore_errors=True)
