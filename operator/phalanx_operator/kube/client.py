"""The door to the API server: the Protocol that the operator needs of it, and paths of the objects it speaks of."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx_api.spec import inference_service as api

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, as the API's paths know it."""

    api_version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of one object, or of all objects in a namespace, or (no namespace) in the cluster."""
        parts = ["api" if "/" not in self.api_version else "apis", self.api_version]
        parts += ["namespaces", namespace] if namespace else []
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/" + "/".join(part for part in parts if part)


SERVICES_OF_OURS = Resource(f"{api.GROUP}/{api.VERSION}", api.PLURAL)
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
"""The same events, as they can be selected by what they are about."""
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
"""Kinds that the operator renders."""


def resource_of(rendered: Json) -> Resource:
    """The resource of a rendered object."""
    return RESOURCES[rendered["apiVersion"], rendered["kind"]]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list: its objects, the list's version, and where the next page begins (empty: no more)."""

    items: list[Json]
    resource_version: str
    next_page: str


class KubeClient(Protocol):
    """What the operator asks of the API server. A call that does not succeed raises a `KubeError`; all end in bounded time."""

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Json:
        """The object. Raises: Gone when there is none."""
        ...

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        """The metadata of the object as made, or as it would be. Raises: Conflict when one of that name is there."""
        ...

    async def apply(self, resource: Resource, body: Json, *, subresource: str | None = None) -> Json:
        """The object after server-side apply by the operator: its metadata, or all of it where a subresource is applied."""
        ...

    async def merge(
        self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Json:
        """What `apply` answers, after a merge patch. Raises: Conflict when the patch names another resourceVersion or UID."""
        ...

    async def replace(self, resource: Resource, body: Json) -> Json:
        """The object after an update. Raises: Conflict when it was changed meanwhile."""
        ...

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        """Starts the deletion of an object and all that it owns. `grace_s` is for pods: theirs, and 0 waits for no kubelet.

        Raises: Gone, or Conflict when it is another object by now.
        """
        ...

    async def list_page(self, resource: Resource, namespace: str | None, selector: str, after: str, *, fields: str = "") -> Page:
        """One page of the objects with these labels and fields; `after` is the former page's `next_page`."""
        ...

    def watch(self, resource: Resource, namespace: str | None, selector: str, resource_version: str) -> AsyncIterator[Json]:
        """Changes since that version as `{"type": .., "object": ..}`, bookmarks too; an object may hold no more than is read of
        it. Ends when the server ends it. Raises: Gone when that version is too old, Retry when nothing at all was heard for too
        long."""
        ...


# What can go wrong with the API server, by who can act.


class KubeError(Exception):
    """An answer that is no success. The message says what was asked, of which object, and what came back."""


class Retry(KubeError):
    """Ours, later: the server is away, busy, or not there yet."""


class Rejected(KubeError):
    """The user's: the API server refuses an object for what the spec says."""


class Conflict(KubeError):
    """Normal life: someone else was first. Look again."""


class Gone(KubeError):
    """Normal life: the object is not there any more, or the watch must start again."""


class Denied(KubeError):
    """The installer's: the operator lacks a right."""
