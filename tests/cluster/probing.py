"""Tries the ports of pods from a pod: TCP, TLS, and TLS with certificates that are mounted there."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.cluster.config import LOCKED
from tests.cluster.fixtures import Cluster

POD = "prober"
TCP, NO_CERTIFICATE = "TCP", "TLS"
"""Ways to connect; a further one for each mounted Secret, by its name."""
PATHS = ("/", "/healthz", "/readyz", "/metrics", "/v1/health", "/v1/models", "/ui", "/phalanx/summary", "/phalanx/streams")
_LISTENERS = """
import json, pathlib
found = set()
for name in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            found.add(int(local.rpartition(":")[2], 16))
print(json.dumps(sorted(found)))
"""
_PROBE = """
import concurrent.futures, json, pathlib, socket, ssl, sys
targets, paths = json.loads(sys.argv[1]), json.loads(sys.argv[2])
ways = {"TCP": None, "TLS": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
for folder in pathlib.Path("/certificates").iterdir():
    context = ways[folder.name] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
for context in ways.values():
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
def ask(job):
    (host, port), way, path = job
    request = f"GET {path} HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n".encode() if path else b"phxorder" + bytes(64)
    try:
        with socket.create_connection((host, port), 5) as connection:
            if ways[way] is not None:
                connection = ways[way].wrap_socket(connection)
            connection.sendall(request)
            answer = connection.recv(200)
    except OSError:
        return None
    is_alert = way == "TCP" and answer[:2] == bytes([21, 3])
    return [host, port, way, path, answer.decode("latin-1")] if answer and not is_alert else None
jobs = [(target, way, path) for target in targets for way in ways for path in [*paths, ""]]
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    print(json.dumps([answer for answer in pool.map(ask, jobs) if answer]))
"""
"""An alert of TLS in answer to TCP is no answer of a service."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Bytes that a port answered."""

    host: str
    port: int
    way: str
    path: str
    """Empty: not HTTP, but the magic of orders to ranks and a nonce."""
    answer: str

    @property
    def status(self) -> str:
        """The HTTP status; another word for other answers."""
        words = self.answer.split()
        return words[1] if words and words[0].startswith("HTTP/") else "bytes"


def listeners(cluster: Cluster, namespace: str, pod: str) -> set[int]:
    """Returns the TCP ports on which processes of a pod listen, by the kernel's list."""
    return set(json.loads(cluster.kubectl("-n", namespace, "exec", pod, "--", "python3", "-c", _LISTENERS)))


def declared(pod: dict[str, Any]) -> set[int]:
    """Returns the ports in the spec of a pod."""
    return {int(port["containerPort"]) for container in pod["spec"]["containers"] for port in container.get("ports", [])}


def start(cluster: Cluster, namespace: str, secrets: Iterable[str]) -> None:
    """Starts the pod that tries ports, with these Secrets of its namespace."""
    names = list(secrets)
    mounts = [{"name": name, "mountPath": f"/certificates/{name}", "readOnly": True} for name in names]
    container = {
        "name": "c",
        "image": cluster.image("router"),
        "command": ["python3", "-c", "import time; time.sleep(3600)"],
        "securityContext": LOCKED,
        "volumeMounts": mounts,
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": name, "secret": {"secretName": name}} for name in names],
    }
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD, "namespace": namespace}, "spec": spec}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", f"pod/{POD}", "--timeout=120s")


def probe(cluster: Cluster, namespace: str, targets: Iterable[tuple[str, int]]) -> list[Answered]:
    """Returns every answer that the pod gets from these addresses, in all ways."""
    words = ("python3", "-c", _PROBE, json.dumps(list(targets)), json.dumps(PATHS))
    return [Answered(*found) for found in json.loads(cluster.kubectl("-n", namespace, "exec", POD, "--", *words))]
