"""Claims on folders of the machine: restricted pods may not mount host paths."""

import copy
from pathlib import Path
from typing import Any

SITE_PACKAGES_CLAIM = "site-packages"
SITE_PACKAGES_PATH = "/opt/site-packages"
RUNTIME_CONTAINER = "runtime"


def volume_name(namespace: str, claim: str) -> str:
    """Returns the name of a claim's volume, unique in the cluster."""
    return f"{namespace}-{claim}"


def claim_on(namespace: str, claim: str, folder: Path, access: str = "ReadOnlyMany") -> list[dict[str, Any]]:
    """Returns a volume of a folder and its claim."""
    size = {"storage": "1Gi"}  # required by the schema, unused
    common = {"accessModes": [access], "storageClassName": ""}
    name = volume_name(namespace, claim)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            **common,
            "capacity": size,
            "hostPath": {"path": str(folder), "type": "Directory"},
            "claimRef": {"namespace": namespace, "name": claim},
            "persistentVolumeReclaimPolicy": "Retain",
        },
    }
    bound = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": namespace},
        "spec": {**common, "volumeName": name, "resources": {"requests": size}},
    }
    return [volume, bound]


def local_class(name: str, folders: dict[str, list[Path]]) -> list[dict[str, Any]]:
    """Returns a StorageClass with late binding, and a volume for each folder of each node."""
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    ]
    for node, of_node in folders.items():
        on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        for number, folder in enumerate(of_node):
            spec = {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": name,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder), "type": "Directory"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}},
            }
            metadata = {"name": f"{name}-{node}-{number}", "labels": {"app": name}}
            objects.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec})
    return objects


def with_site_packages(manifest: dict[str, Any]) -> dict[str, Any]:
    """Mounts site-packages into the pods of an InferenceService and adds it to PYTHONPATH."""
    changed = copy.deepcopy(manifest)
    spec = changed["spec"].setdefault("podTemplate", {}).setdefault("spec", {})
    claim = {"claimName": SITE_PACKAGES_CLAIM, "readOnly": True}
    spec.setdefault("volumes", []).append({"name": SITE_PACKAGES_CLAIM, "persistentVolumeClaim": claim})
    containers = spec.setdefault("containers", [])
    runtime = next((x for x in containers if x.get("name") == RUNTIME_CONTAINER), None)
    if runtime is None:
        runtime = {"name": RUNTIME_CONTAINER}
        containers.append(runtime)
    mount = {"name": SITE_PACKAGES_CLAIM, "mountPath": SITE_PACKAGES_PATH, "readOnly": True}
    runtime.setdefault("volumeMounts", []).append(mount)
    runtime.setdefault("env", []).append({"name": "PYTHONPATH", "value": SITE_PACKAGES_PATH})
    return changed
