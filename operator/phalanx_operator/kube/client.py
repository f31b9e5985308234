"""Calls to the API server, their errors, and the kinds of objects."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx_api import labels
from phalanx_api.spec import inference_service as api

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object."""

    api_version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Returns the path of one object, or of all in a namespace or the cluster."""
        parts = ["api" if "/" not in self.api_version else "apis", self.api_version]
        parts += ["namespaces", namespace] if namespace else []
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(part for part in parts if part)


INFERENCE_SERVICES = Resource(f"{api.GROUP}/{api.VERSION}", api.PLURAL)
PODS = Resource("v1", "pods")
STATEFUL_SETS = Resource("apps/v1", "statefulsets")
DEPLOYMENTS = Resource("apps/v1", "deployments")
NODES = Resource("v1", "nodes")
CONFIG_MAPS = Resource("v1", "configmaps")
DISRUPTION_BUDGETS = Resource("policy/v1", "poddisruptionbudgets")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "networkpolicies")
INGRESSES = Resource("networking.k8s.io/v1", "ingresses")
HTTP_ROUTES = Resource("gateway.networking.k8s.io/v1", "httproutes")
SERVICE_MONITORS = Resource("monitoring.coreos.com/v1", "servicemonitors")
PROMETHEUS_RULES = Resource("monitoring.coreos.com/v1", "prometheusrules")
SERVICES = Resource("v1", "services")
SECRETS = Resource("v1", "secrets")
EVENTS = Resource("events.k8s.io/v1", "events")
CORE_EVENTS = Resource("v1", "events")
"""The same, selectable by `involvedObject`."""
LEASES = Resource("coordination.k8s.io/v1", "leases")
RESOURCES = {
    ("apps/v1", "StatefulSet"): STATEFUL_SETS,
    ("apps/v1", "Deployment"): DEPLOYMENTS,
    ("v1", "Service"): SERVICES,
    ("v1", "Secret"): SECRETS,
    ("v1", "ConfigMap"): CONFIG_MAPS,
    ("policy/v1", "PodDisruptionBudget"): DISRUPTION_BUDGETS,
    ("networking.k8s.io/v1", "NetworkPolicy"): NETWORK_POLICIES,
    ("networking.k8s.io/v1", "Ingress"): INGRESSES,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTES,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITORS,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PROMETHEUS_RULES,
    ("v1", "ServiceAccount"): Resource("v1", "serviceaccounts"),
    ("rbac.authorization.k8s.io/v1", "Role"): Resource("rbac.authorization.k8s.io/v1", "roles"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): Resource("rbac.authorization.k8s.io/v1", "rolebindings"),
}
"""Rendered kinds."""


def resource_of(rendered: Json) -> Resource:
    """Returns the resource of a rendered object."""
    return RESOURCES[rendered["apiVersion"], rendered["kind"]]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list."""

    items: list[Json]
    resource_version: str
    next_page: str
    """Continue token; empty on the last page."""


class KubeClient(Protocol):
    """Calls to the API server. Each fails with a `KubeError`, `Gone` without the object, and ends in bounded time."""

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Json:
        """Returns the object."""
        ...

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        """Returns the created metadata. Raises Conflict if the name exists."""
        ...

    async def apply(
        self, resource: Resource, body: Json, *, subresource: str | None = None, manager: str = labels.MANAGER
    ) -> Json:
        """Returns the metadata after server-side apply; for a subresource the whole object.

        Each field manager removes only what it had applied itself.
        """
        ...

    async def merge(
        self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Json:
        """Patches. Returns as `apply`. Raises Conflict for another resourceVersion or UID."""
        ...

    async def replace(self, resource: Resource, body: Json) -> Json:
        """Returns the object after an update. Raises Conflict if it changed."""
        ...

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        """Starts the deletion of an object and its dependents. `grace_s` is for pods. Raises Conflict for another UID."""
        ...

    async def list_page(self, resource: Resource, namespace: str | None, selector: str, after: str, *, fields: str = "") -> Page:
        """Returns one page. `after`: `next_page` of the former."""
        ...

    def watch(self, resource: Resource, namespace: str | None, selector: str, resource_version: str) -> AsyncIterator[Json]:
        """Yields `{"type": .., "object": ..}` until the server ends the watch, with at least the fields that `observe` reads.

        Raises `Gone` for an expired version, Retry after a long silence.
        """
        ...


class KubeError(Exception):
    """A failed call. Subclasses differ by who can act."""


class Retry(KubeError):
    """Transient: the API server is unavailable or busy."""


class Rejected(KubeError):
    """For the user: an object of the service is rejected."""


class Conflict(KubeError):
    """Another writer was first."""


class Gone(KubeError):
    """The object does not exist, or the watch must restart."""


class Denied(KubeError):
    """For the administrator: a permission is missing."""


class Unauthenticated(Denied):
    """The credentials are unknown or expired."""
