"""The operator in a cluster, installed by `kubectl apply -k`; tests and demo install it so."""

from pathlib import Path

from tests.cluster.access import Cluster

NAMESPACE = "phalanx-system"
_DEPLOYMENT = ("-n", NAMESPACE, "deployment/phalanx-operator")
_OVERLAY = Path(__file__).parents[2] / "manifests" / "overlays" / "test"


def install(cluster: Cluster) -> None:
    """Nothing; the operator of this checkout runs and its CRD is served.

    An operator that was there before is restarted: its image may be another one under the same tag.
    """
    was_there = cluster.kubectl("get", *_DEPLOYMENT, "-o", "name", "--ignore-not-found")
    overlay = cluster.kubectl("kustomize", str(_OVERLAY))
    cluster.kubectl("apply", "-f", "-", stdin=overlay.replace("localhost/phalanx-", f"{cluster.image_prefix}/phalanx-"))
    cluster.kubectl("wait", "--for=condition=Established", "crd/inferenceservices.phalanx.dev", "--timeout=60s")
    if was_there:
        cluster.kubectl("rollout", "restart", *_DEPLOYMENT)
    cluster.kubectl("rollout", "status", *_DEPLOYMENT, "--timeout=120s")
