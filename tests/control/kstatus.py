"""What tools that wait for objects (`kpt live`, Flux, Argo CD's likes) make of a service, by the generic rules of kstatus."""

from phalanx_operator.kube.client import Json


def kstatus(service: Json) -> str:
    """Current, InProgress, Failed or Terminating.

    Of `Reconciling` and `Stalled` the one that is listed first decides, and then nobody asks for `Ready`.
    Source: sigs.k8s.io/cli-utils, pkg/kstatus/status: checkGenericProperties, then checkReadyCondition.
    """
    metadata, status = service["metadata"], service.get("status", {})
    if "deletionTimestamp" in metadata:
        return "Terminating"
    if status.get("observedGeneration", metadata["generation"]) != metadata["generation"]:
        return "InProgress"
    said = {one["type"]: one["status"] for one in status.get("conditions", ())}
    first = next((kind for kind, verdict in said.items() if kind in ("Reconciling", "Stalled") and verdict == "True"), None)
    if first:
        return "InProgress" if first == "Reconciling" else "Failed"
    return "Current" if said.get("Ready", "True") == "True" else "InProgress"
