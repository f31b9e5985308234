"""Installs the operator by `kubectl apply -k`."""

from pathlib import Path

from tests.cluster.access import Cluster

NAMESPACE = "phalanx-system"
_DEPLOYMENT = ("-n", NAMESPACE, "deployment/phalanx-operator")
_OVERLAY = Path(__file__).parents[2] / "manifests" / "overlays" / "test"


def install(cluster: Cluster) -> None:
    """Installs the operator of this checkout and its CRD. Restarts an existing operator: its image may have changed."""
    former = cluster.kubectl("get", *_DEPLOYMENT, "-o", "name", "--ignore-not-found")
    overlay = cluster.kubectl("kustomize", str(_OVERLAY))
    cluster.kubectl("apply", "-f", "-", stdin=overlay.replace("localhost/phalanx-", f"{cluster.image_prefix}/phalanx-"))
    cluster.kubectl("wait", "--for=condition=Established", "crd/inferenceservices.phalanx.dev", "--timeout=60s")
    if former:
        cluster.kubectl("rollout", "restart", *_DEPLOYMENT)
    cluster.kubectl("rollout", "status", *_DEPLOYMENT, "--timeout=120s")
