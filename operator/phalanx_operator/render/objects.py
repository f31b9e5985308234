"""What all rendered objects have in common: type, metadata, owner, security."""

from dataclasses import dataclass
from typing import Any

from phalanx_api import labels
from phalanx_api.spec import inference_service as api
from phalanx_api.spec.inference_service import InferenceService

Object = dict[str, Any]
"""An object of the Kubernetes API, ready for JSON."""

USER = 65532
"""The images' user."""


@dataclass(frozen=True, slots=True)
class Images:
    """Images for services that do not name one."""

    runtime: str
    router: str


def child(service: InferenceService, api_version: str, kind: str, name: str, component: str, **fields: object) -> Object:
    """An object that belongs to the service, and so goes with it."""
    metadata = {
        "name": name,
        "namespace": service.namespace,
        "labels": child_labels(service, component),
        "ownerReferences": [owner(service)],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata} | fields


def child_labels(service: InferenceService, component: str) -> dict[str, str]:
    """Labels of a child."""
    return {labels.MANAGED_BY: labels.MANAGER, labels.SERVICE: service.name, labels.COMPONENT: component}


def owner(service: InferenceService) -> Object:
    """The owner reference to the service."""
    return {
        "apiVersion": f"{api.GROUP}/{api.VERSION}",
        "kind": api.KIND,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pod_security() -> Object:
    """Security context of a pod that the restricted Pod Security Standard admits."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    """Security context of a container that the restricted Pod Security Standard admits."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def http_probe(path: str, *, period_s: int, failures: int) -> Object:
    """A probe of the HTTP process. The time-out is long, for a busy machine answers late."""
    return {
        "httpGet": {"path": path, "port": labels.HTTP_PORT},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
