"""Common parts of rendered objects, and their names."""

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx_api import labels
from phalanx_api.spec import inference_service as api
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.spec.pod_template import INTERNAL_VOLUME

Object = dict[str, Any]
"""A Kubernetes object as JSON."""

USER = 65532
"""Of the images."""


class Owning(Protocol):
    """A service that owns objects, by its identity."""

    @property
    def namespace(self) -> str:
        """Its namespace."""
        ...

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def uid(self) -> str:
        """Its UID."""
        ...


@dataclass(frozen=True, slots=True)
class Owner:
    """A service whose spec is invalid."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Images:
    """Default images, and the Secrets with credentials of their registries, in the namespaces of services."""

    runtime: str
    router: str
    pull_secrets: tuple[str, ...] = ()

    def credentials(self) -> Object:
        """Returns fields of a pod's spec."""
        secrets = [{"name": name} for name in self.pull_secrets]
        return {"imagePullSecrets": secrets} if secrets else {}


def child(service: Owning, api_version: str, kind: str, name: str, component: str, **fields: object) -> Object:
    """Returns an object that the service owns."""
    metadata = {
        "name": name,
        "namespace": service.namespace,
        "labels": child_labels(service, component),
        "ownerReferences": [owner(service)],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata} | fields


def child_labels(service: Owning, component: str) -> dict[str, str]:
    """Returns the labels of a child."""
    return {labels.MANAGED_BY: labels.MANAGER, labels.SERVICE: service.name, labels.COMPONENT: component}


def owner(service: Owning) -> Object:
    """Returns the owner reference to the service."""
    return co_owner(service) | {"controller": True, "blockOwnerDeletion": True}


def co_owner(service: Owning) -> Object:
    """Returns the owner reference of an object that several services own."""
    return {"apiVersion": f"{api.GROUP}/{api.VERSION}", "kind": api.KIND, "name": service.name, "uid": service.uid}


def pod_security() -> Object:
    """Returns a restricted security context."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    """Returns a restricted security context."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def http_probe(path: str, *, period_s: int, failures: int, is_https: bool = False, port: int = labels.HTTP_PORT) -> Object:
    """Returns a probe of the HTTP process, with a long timeout for busy machines. A kubelet accepts any certificate."""
    return {
        "httpGet": {"path": path, "port": port} | ({"scheme": "HTTPS"} if is_https else {}),
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


_LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "claims": "name",
}
"""Lists that are merged by a key of their items."""


def merge_overlay(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Merges as `kubectl patch` does: maps by key, lists by their items' key."""
    result = dict(base)
    for key, value in overlay.items():
        former = base.get(key)
        if isinstance(former, dict) and isinstance(value, dict):
            result[key] = merge_overlay(former, value)
        elif isinstance(former, list) and isinstance(value, list) and key in _LIST_KEYS:
            result[key] = _merge_items(_LIST_KEYS[key], former, value)
        else:
            result[key] = value
    return result


def _merge_items(key: str, base: list[dict[str, Any]], overlay: list[dict[str, Any]]) -> list[dict[str, Any]]:
    overlaid = {item.get(key): item for item in overlay}
    existing = {item.get(key) for item in base}
    result = [merge_overlay(item, overlaid.get(item.get(key), {})) for item in base]
    return result + [item for item in overlay if item.get(key) not in existing]


def internal_volume(service: InferenceService, role: str) -> Object:
    """Returns the volume with the certificate of a role."""
    secret = {"secretName": role_certificate(service.name, role), "defaultMode": 0o440}
    return {"name": INTERNAL_VOLUME, "secret": secret}


INTERNAL_MOUNT: Object = {"name": INTERNAL_VOLUME, "mountPath": labels.INTERNAL_TLS_DIR, "readOnly": True}
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX = 5


def groups_service(service: str) -> str:
    """Headless Service of group pods."""
    return f"{service}-groups"


def groups_budget(service: str) -> str:
    """Disruption budget of groups."""
    return f"{service}-groups"


def groups_network(service: str) -> str:
    """Network policy of groups."""
    return f"{service}-groups"


def policy(service: str) -> str:
    """ConfigMap with the routers' first policy."""
    return f"{service}-policy"


def revision_record(service: str) -> str:
    """ConfigMap with the last complete revision."""
    return f"{service}-former"


SHARED_PAGES = "phalanx-shared-pages"
"""Secret of a namespace: tokens for cached pages (`wire.holders`), by service."""


def token_secret(service: str) -> str:
    """Secret with the service's token."""
    return f"{service}-token"


def authority(service: str) -> str:
    """Secret with the certificate authority of the service, which no pod mounts."""
    return f"{service}-authority"


def role_certificate(service: str, role: str) -> str:
    """Secret with the certificate of a role."""
    return f"{service}-{role}-tls"


def router(service: str) -> str:
    """Deployment, ServiceAccount, Role, RoleBinding, disruption budget and network policy of routers."""
    return f"{service}-router"


def client_service(service: str) -> str:
    """Service for clients."""
    return service


def group_names(service: str, uid: str, revision: str, count: int) -> tuple[str, ...]:
    """Returns `count` different names: random letters, the same at every call."""
    result: dict[str, None] = {}
    attempt = 0
    while len(result) < count:
        digest = int.from_bytes(hashlib.sha256(f"{uid}/{revision}/{attempt}".encode()).digest()[:8], "big")
        attempt += 1
        suffix = ""
        for _ in range(_SUFFIX):
            digest, letter = divmod(digest, len(_ALPHABET))
            suffix += _ALPHABET[letter]
        result[f"{service}-g-{suffix}"] = None
    return tuple(result)


def leader_host(service: str, namespace: str, group: str) -> str:
    """Returns the DNS name of a group's leader pod."""
    return f"{group}-0.{groups_service(service)}.{namespace}.svc"
