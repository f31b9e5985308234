"""What all rendered objects have in common: type, metadata, owner, security."""

import hashlib
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


# Every name that the operator gives to something. A service's name has at most 40 characters, so all of these fit.

_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX = 5


def groups_service(service: str) -> str:
    """The headless Service that gives the pods of all groups their DNS names."""
    return f"{service}-groups"


def groups_budget(service: str) -> str:
    """The disruption budget of all groups."""
    return f"{service}-groups"


def groups_network(service: str) -> str:
    """The network policy of all groups."""
    return f"{service}-groups"


def policy(service: str) -> str:
    """The ConfigMap with the policy that routers start with."""
    return f"{service}-policy"


def former(service: str) -> str:
    """The ConfigMap with the last revision that was rolled out whole."""
    return f"{service}-former"


def token_secret(service: str) -> str:
    """The Secret with the token that routers, leaders and ranks prove to one another."""
    return f"{service}-token"


def router(service: str) -> str:
    """The router's Deployment, ServiceAccount, Role, RoleBinding, disruption budget and network policy."""
    return f"{service}-router"


def front_door(service: str) -> str:
    """The Service that clients speak to."""
    return service


def group_names(service: str, uid: str, revision: str, count: int) -> tuple[str, ...]:
    """Names for groups of a revision, all different. They look random, yet are the same at every call."""
    found: dict[str, None] = {}
    turn = 0
    while len(found) < count:
        digest = int.from_bytes(hashlib.sha256(f"{uid}/{revision}/{turn}".encode()).digest()[:8], "big")
        turn += 1
        suffix = ""
        for _ in range(_SUFFIX):
            digest, letter = divmod(digest, len(_ALPHABET))
            suffix += _ALPHABET[letter]
        found[f"{service}-g-{suffix}"] = None
    return tuple(found)


def leader_host(service: str, namespace: str, group: str) -> str:
    """DNS name of a group's leader pod, known before the pod exists."""
    return f"{group}-0.{groups_service(service)}.{namespace}.svc"
