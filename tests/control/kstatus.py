"""The generic rules of kstatus, by which tools such as `kpt live` and Flux wait for objects."""

from phalanx_operator.kube.client import Json


def kstatus(service: Json) -> str:
    """Returns Current, InProgress, Failed or Terminating. The first of `Reconciling` and `Stalled` overrides `Ready`.

    Source: sigs.k8s.io/cli-utils, pkg/kstatus/status: checkGenericProperties, then checkReadyCondition.
    """
    metadata, status = service["metadata"], service.get("status", {})
    if "deletionTimestamp" in metadata:
        return "Terminating"
    if status.get("observedGeneration", metadata["generation"]) != metadata["generation"]:
        return "InProgress"
    verdicts = {c["type"]: c["status"] for c in status.get("conditions", ())}
    first = next((kind for kind, verdict in verdicts.items() if kind in ("Reconciling", "Stalled") and verdict == "True"), None)
    if first:
        return "InProgress" if first == "Reconciling" else "Failed"
    return "Current" if verdicts.get("Ready", "True") == "True" else "InProgress"
