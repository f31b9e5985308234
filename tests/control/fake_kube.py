"""A KubeClient in memory, and the controllers of its objects."""

import asyncio
import base64
import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from phalanx_api import labels
from phalanx_api.summary import BalancePolicy, RouterSummary
from phalanx_operator.decide.state.fleet import Fleet, RouterReport, merge
from phalanx_operator.kube.client import (
    CORE_EVENTS,
    DEPLOYMENTS,
    NODES,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    Conflict,
    Gone,
    Json,
    Page,
    Resource,
)
from phalanx_operator.kube.informer import read_event
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.observe import Children
from phalanx_operator.routers import Explain, RouterTarget
from tests.control.builders import NOW, pod_body

ObjectKey = tuple[str, str, str]
_DELETED_AT_ONCE = ("poddisruptionbudgets", "networkpolicies", "servicemonitors", "prometheusrules", "ingresses", "httproutes")
"""Kinds without graceful deletion."""


def written_by(manager: str, at: str = "2026-01-02T03:00:00Z") -> Json:
    """Returns the managedFields entry of a writer of `spec.replicas`."""
    return {"manager": manager, "operation": "Update", "time": at, "fieldsV1": {"f:spec": {"f:replicas": {}}}}


class FakeRouters:
    """The routers of one service. Each answered `summary` `age_s` ago, if set. `is_new`: they had no time to answer."""

    def __init__(self) -> None:
        self.summary: RouterSummary | None = None
        self.age_s = 0.0
        self.is_new = False
        self.unreachable: frozenset[str] = frozenset()
        self.targets: list[RouterTarget] = []
        self.policy = BalancePolicy()
        self.poll_s = 0.0
        self.explain: Explain | None = None
        self.forgotten: list[Key] = []

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        reports = [RouterReport(target.uid, self.age_s, self.summary) for target in targets] if self.summary else []
        return replace(merge(reports, len(targets), 45.0), is_new=self.is_new, unreachable=self.unreachable)

    def publish(
        self, key: Key, targets: Sequence[RouterTarget], policy: BalancePolicy, poll_s: float, explain: Explain | None = None
    ) -> None:
        self.targets, self.policy, self.poll_s, self.explain = list(targets), policy, poll_s, explain

    def forget(self, key: Key) -> None:
        self.forgotten.append(key)


class FakeKube:
    """Objects by plural, namespace and name."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, Json] = {}
        self.unknown = {"servicemonitors", "prometheusrules", "httproutes"}  # kinds without CRD
        self.schedulers: set[str] = set()  # served API versions of PodGroups
        self.group_events: list[Json] = []  # of StatefulSets
        self.calls: list[str] = []  # writes, in order
        self.reads: list[str] = []
        self.failures: dict[str, Exception] = {}  # by call; each is raised once
        self.events: asyncio.Queue[Json | None] = asyncio.Queue()
        self.managed: dict[ObjectKey, dict[str, set[str]]] = {}  # keys of Secrets by field manager
        self.now: Callable[[], str] = lambda: NOW
        self._count = 0

    def put(self, resource: Resource, body: Json) -> Json:
        """Stores an object of another client."""
        metadata = body["metadata"]
        self._count += 1
        defaults = {"uid": f"made-{self._count}", "creationTimestamp": f"2026-01-01T00:{self._count:02}:00Z", "generation": 1}
        body = copy.deepcopy(body) | {"metadata": defaults | metadata | {"resourceVersion": str(self._count)}}
        self.objects[resource.plural, metadata["namespace"], metadata["name"]] = body
        return copy.deepcopy(body)

    def of_kind(self, resource: Resource) -> dict[str, Json]:
        """Returns the objects of one kind by name."""
        return {key[2]: body for key, body in self.objects.items() if key[0] == resource.plural}

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Json:
        self._record("get", resource, name, write=False)
        return copy.deepcopy(self._find(resource, namespace, name))

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        metadata = body["metadata"]
        self._record("try" if dry_run else "create", resource, metadata["name"], write=not dry_run)
        if (resource.plural, metadata["namespace"], metadata["name"]) in self.objects:
            raise Conflict(f"{metadata['name']} exists")
        if "stringData" in body:
            body = body | {"data": {name: base64.b64encode(text.encode()).decode() for name, text in body["stringData"].items()}}
        return _metadata(body if dry_run else self.put(resource, body))

    async def apply(
        self, resource: Resource, body: Json, *, subresource: str | None = None, manager: str = labels.MANAGER
    ) -> Json:
        if _has_null(body):
            raise ValueError(f"the API server takes null for a wrong type: {body}")
        metadata = body["metadata"]
        if resource.plural in self.unknown:
            raise Gone("404 page not found")
        self._record("apply", resource, metadata["name"], subresource)
        key = (resource.plural, metadata["namespace"], metadata["name"])
        if key not in self.objects and subresource:
            raise Gone("no such object")
        former = self.objects.get(key, {"metadata": {}})
        _check_preconditions(former["metadata"], metadata)
        if resource.plural == "secrets" and "data" in body:
            body = body | {"data": self._merged_data(key, former.get("data") or {}, body["data"], manager)}
        applied = self.put(resource, self._applied(key, former, body, manager))
        return applied if subresource else _metadata(applied)

    def _applied(self, key: ObjectKey, former: Json, body: Json, manager: str) -> Json:
        """Returns the object after an apply that takes ownership of all its fields."""
        return former | body | {"metadata": former["metadata"] | body["metadata"]}

    def _merged_data(self, key: ObjectKey, former: Json, data: Json, manager: str) -> Json:
        """As server-side apply: a manager removes only the keys that it applied before."""
        applied = self.managed.setdefault(key, {})
        kept = {name: value for name, value in former.items() if name not in applied.get(manager, set())}
        applied[manager] = set(data)
        return kept | data

    async def merge(
        self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Json:
        self._record("merge", resource, name, subresource)
        body = self._find(resource, namespace, name)
        metadata = dict(body["metadata"])
        for field in ("resourceVersion", "uid"):
            if patch["metadata"].get(field, metadata[field]) != metadata[field]:
                raise Conflict("the object has changed")
        annotations = metadata.get("annotations", {}) | patch["metadata"].get("annotations", {})
        metadata["annotations"] = {name: text for name, text in annotations.items() if text is not None}
        if "replicas" in patch.get("spec", {}):
            # As in the API server, a 0 through /scale has no owner, nor has any later write there.
            is_unowned = patch["spec"]["replicas"] == 0 or metadata.get("managedFields") == []
            metadata["managedFields"] = [] if is_unowned else [written_by("phalanx-operator")]
        parts = {part: body.get(part, {}) | patch[part] for part in ("spec", "data") if part in patch}
        patched = self.put(resource, body | {"metadata": metadata} | parts)
        return patched if subresource else _metadata(patched)

    async def replace(self, resource: Resource, body: Json) -> Json:
        metadata = body["metadata"]
        self._record("replace", resource, metadata["name"])
        stored = self._find(resource, metadata["namespace"], metadata["name"])
        if stored["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise Conflict("the object has changed")
        return self.put(resource, body)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        self._record("delete" if grace_s is None else "force-delete" if grace_s == 0 else "quick-delete", resource, name)
        body = self._find(resource, namespace, name)
        if body["metadata"]["uid"] != uid:
            raise Conflict("another object has this name")
        if grace_s == 0 or resource.plural in _DELETED_AT_ONCE:
            del self.objects[resource.plural, namespace, name]
            return
        body["metadata"]["deletionTimestamp"] = self.now()
        body["metadata"]["deletionGracePeriodSeconds"] = 315 if grace_s is None else grace_s

    async def list_page(self, resource: Resource, namespace: str | None, selector: str, after: str, *, fields: str = "") -> Page:
        self._record("list", resource, after, write=False)
        if resource == CORE_EVENTS:
            return Page([event for event in self.group_events if event["involvedObject"]["uid"] in fields], "1", "")
        if resource.plural == "podgroups" and resource.api_version not in self.schedulers:
            raise Gone("404 page not found")
        items = [(w[2], body) for w, body in self.objects.items() if w[0] == resource.plural and namespace in (None, w[1])]
        left = [body for name, body in sorted(items, key=lambda item: item[0]) if name > after]
        return Page(left[:2], str(self._count), left[1]["metadata"]["name"] if len(left) > 2 else "")

    async def watch(self, resource: Resource, namespace: str | None, selector: str, resource_version: str) -> AsyncIterator[Json]:
        self._record("watch", resource, resource_version, write=False)
        while (event := await self.events.get()) is not None:
            if isinstance(event.get("raise"), Exception):
                raise event["raise"]
            yield event

    def _find(self, resource: Resource, namespace: str, name: str) -> Json:
        key = (resource.plural, namespace, name)
        if key not in self.objects:
            raise Gone(f"no {resource.plural} {name}")
        return self.objects[key]

    def _record(self, verb: str, resource: Resource, name: str, subresource: str | None = None, *, write: bool = True) -> None:
        call = f"{verb} {resource.plural}{'/' + subresource if subresource else ''} {name}".rstrip()
        (self.calls if write else self.reads).append(call)
        if error := self.failures.pop(call, None):
            raise error


class FakeCluster:
    """Controllers and kubelets, one step at a time."""

    def __init__(self, kube: FakeKube, children: Children) -> None:
        self.kube = kube
        self.children = children

    def start_pods(self, *, ready: bool = True, reason: str = "") -> None:
        """Creates the pods of live groups in this state, and removes terminating groups."""
        for name, group in list(self.kube.of_kind(STATEFUL_SETS).items()):
            namespace = group["metadata"]["namespace"]
            size = group["spec"]["replicas"]
            if "deletionTimestamp" in group["metadata"]:
                del self.kube.objects["statefulsets", namespace, name]
                for index in range(size):
                    self.kube.objects.pop(("pods", namespace, f"{name}-{index}"), None)
                continue
            for index in range(size):
                key = ("pods", namespace, f"{name}-{index}")
                if self.kube.objects.get(key, {}).get("metadata", {}).get("annotations"):
                    continue  # it runs, and is annotated
                uid = self.kube.objects[key]["metadata"]["uid"] if key in self.kube.objects else f"pod-{name}-{index}"
                self.kube.put(PODS, pod_body(group, index, ready=ready, uid=uid, reason=reason))

    def start_routers(self) -> None:
        """Makes every router ready."""
        for deployment in list(self.kube.of_kind(DEPLOYMENTS).values()):
            replicas = deployment["spec"]["replicas"]
            state = {"observedGeneration": 1, "updatedReplicas": replicas, "readyReplicas": replicas}
            self.kube.put(DEPLOYMENTS, deployment | {"status": state})

    def start_router_pods(self, count: int = 1, annotations: Mapping[str, str] | None = None) -> None:
        """Creates ready router pods."""
        for index in range(count):
            identity = {labels.SERVICE: "chat", labels.COMPONENT: "router"}
            metadata = {"name": f"chat-router-{index}", "namespace": "team", "uid": f"router-{index}", "labels": identity}
            metadata |= {"annotations": dict(annotations)} if annotations else {}
            status = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": f"10.0.0.{index}"}
            self.kube.put(PODS, {"metadata": metadata, "spec": {}, "status": status})

    def lose_node(self, name: str, since: str) -> None:
        """Makes a node and its pods unready; their deletion never ends. Another node without pods stays ready."""
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        self.kube.put(NODES, {"metadata": {"name": "spare", "namespace": ""}, "spec": {}, "status": ready})
        condition = {"type": "Ready", "status": "Unknown", "lastTransitionTime": since}
        self.kube.put(NODES, {"metadata": {"name": name, "namespace": ""}, "spec": {}, "status": {"conditions": [condition]}})
        for pod in list(self.kube.of_kind(PODS).values()):
            if pod["spec"].get("nodeName") == name:
                unready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
                self.kube.put(PODS, pod | {"status": {**pod["status"], "conditions": [unready]}})

    def sync_informers(self) -> None:
        """Copies all objects to the stores, as a watch does."""
        children = self.children
        children.pods.replace(self._watched(PODS))
        children.sets.replace(self._watched(STATEFUL_SETS))
        children.deployments.replace(self._watched(DEPLOYMENTS))
        children.services.replace(self._watched(SERVICES))
        children.nodes.replace(self._watched(NODES))

    def _watched(self, resource: Resource) -> list[Json]:
        events = [msgspec.json.encode({"type": "ADDED", "object": body}) for body in self.kube.of_kind(resource).values()]
        return [read_event(event)["object"] for event in events]


def _check_preconditions(stored: Json, wanted: Json) -> None:
    """Raises Conflict for another UID or version. An apply with a UID creates nothing."""
    if "uid" in wanted and stored.get("uid") != wanted["uid"]:
        raise Conflict("uid mismatch")
    if stored and "resourceVersion" in wanted and stored["resourceVersion"] != wanted["resourceVersion"]:
        raise Conflict("the object has been modified")


def _metadata(body: Json) -> Json:
    """Returns the response of most writes."""
    return {"metadata": body["metadata"]}


def _has_null(value: Any) -> bool:
    """Returns whether the body contains null."""
    if isinstance(value, Mapping):
        return any(map(_has_null, value.values()))
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))
