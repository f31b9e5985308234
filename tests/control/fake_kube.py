"""A KubeClient in memory, and the controllers that would act on what it holds."""

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from phalanx_api import labels
from phalanx_api.summary import BalancePolicy, RouterSummary
from phalanx_operator.decide.state.fleet import Fleet, RouterAnswer, merge
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
from phalanx_operator.routers import RouterTarget
from tests.control.builders import pod_body

Where = tuple[str, str, str]
_QUICK = ("poddisruptionbudgets", "networkpolicies", "servicemonitors", "prometheusrules", "ingresses", "httproutes")
"""What goes at once when it is deleted."""


def written_by(manager: str, at: str = "2026-01-02T03:00:00Z") -> Json:
    """What the API server notes of who wrote `spec.replicas`."""
    return {"manager": manager, "operation": "Update", "time": at, "fieldsV1": {"f:spec": {"f:replicas": {}}}}


class FakeRouters:
    """The routers of one service. `says`: what each of them answers; None: nothing. `is_new`: they had no time to."""

    def __init__(self) -> None:
        self.says: RouterSummary | None = None
        self.is_new = False
        self.asked: list[RouterTarget] = []
        self.policy = BalancePolicy()
        self.hear_s = 0.0
        self.forgotten: list[Key] = []

    def fleet(self, key: Key, targets: Sequence[RouterTarget]) -> Fleet:
        heard = [RouterAnswer(target.uid, 0.0, self.says) for target in targets] if self.says else []
        return replace(merge(heard, len(targets), 45.0), is_new=self.is_new)

    def tell(self, key: Key, targets: Sequence[RouterTarget], policy: BalancePolicy, hear_s: float) -> None:
        self.asked, self.policy, self.hear_s = list(targets), policy, hear_s

    def forget(self, key: Key) -> None:
        self.forgotten.append(key)


class FakeKube:
    """Objects by (plural, namespace, name). `calls` are the writes in order, `reads` the rest; `failures` are raised once each.

    `unknown`: kinds whose CRDs are not there. `schedulers`: API versions of PodGroups that are. `told_of_groups`: events of the
    controller of StatefulSets.
    """

    def __init__(self) -> None:
        self.objects: dict[Where, Json] = {}
        self.unknown = {"servicemonitors", "prometheusrules", "httproutes"}
        self.schedulers: set[str] = set()
        self.told_of_groups: list[Json] = []
        self.calls: list[str] = []
        self.reads: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.events: asyncio.Queue[Json | None] = asyncio.Queue()
        self._count = 0

    def put(self, resource: Resource, body: Json) -> Json:
        """An object that somebody else made."""
        metadata = body["metadata"]
        self._count += 1
        defaults = {"uid": f"made-{self._count}", "creationTimestamp": f"2026-01-01T00:{self._count:02}:00Z", "generation": 1}
        body = copy.deepcopy(body) | {"metadata": defaults | metadata | {"resourceVersion": str(self._count)}}
        self.objects[resource.plural, metadata["namespace"], metadata["name"]] = body
        return copy.deepcopy(body)

    def of(self, resource: Resource) -> dict[str, Json]:
        """Objects of one kind by name."""
        return {where[2]: body for where, body in self.objects.items() if where[0] == resource.plural}

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Json:
        self._record("get", resource, name, write=False)
        return copy.deepcopy(self._there(resource, namespace, name))

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        metadata = body["metadata"]
        self._record("try" if dry_run else "create", resource, metadata["name"], write=not dry_run)
        if (resource.plural, metadata["namespace"], metadata["name"]) in self.objects:
            raise Conflict(f"{metadata['name']} exists")
        return _metadata(body if dry_run else self.put(resource, body))

    async def apply(self, resource: Resource, body: Json, *, subresource: str | None = None) -> Json:
        if _has_null(body):
            raise ValueError(f"the API server takes null for a wrong type: {body}")
        metadata = body["metadata"]
        if resource.plural in self.unknown:
            raise Gone("404 page not found")
        self._record("apply", resource, metadata["name"], subresource)
        where = (resource.plural, metadata["namespace"], metadata["name"])
        if where not in self.objects and subresource:
            raise Gone("no such object")
        former = self.objects.get(where, {"metadata": {}})
        _refuse_others(former["metadata"], metadata)
        made = self.put(resource, former | body | {"metadata": former["metadata"] | metadata})
        return made if subresource else _metadata(made)

    async def merge(
        self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Json:
        self._record("merge", resource, name, subresource)
        body = self._there(resource, namespace, name)
        metadata = dict(body["metadata"])
        for field in ("resourceVersion", "uid"):
            if patch["metadata"].get(field, metadata[field]) != metadata[field]:
                raise Conflict("changed meanwhile")
        notes = metadata.get("annotations", {}) | patch["metadata"].get("annotations", {})
        metadata["annotations"] = {note: text for note, text in notes.items() if text is not None}
        if "replicas" in patch.get("spec", {}):
            # As the API server: a 0 through /scale loses its owner, and nothing that is written there afterwards has one.
            is_lost = patch["spec"]["replicas"] == 0 or metadata.get("managedFields") == []
            metadata["managedFields"] = [] if is_lost else [written_by("phalanx-operator")]
        made = self.put(resource, body | {"metadata": metadata, "spec": body["spec"] | patch.get("spec", {})})
        return made if subresource else _metadata(made)

    async def replace(self, resource: Resource, body: Json) -> Json:
        metadata = body["metadata"]
        self._record("replace", resource, metadata["name"])
        there = self._there(resource, metadata["namespace"], metadata["name"])
        if there["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise Conflict("changed meanwhile")
        return self.put(resource, body)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        self._record("delete" if grace_s is None else "kill" if grace_s == 0 else "hurry", resource, name)
        body = self._there(resource, namespace, name)
        if body["metadata"]["uid"] != uid:
            raise Conflict("another object by now")
        if grace_s == 0 or resource.plural in _QUICK:
            del self.objects[resource.plural, namespace, name]
            return
        body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        body["metadata"]["deletionGracePeriodSeconds"] = 315 if grace_s is None else grace_s

    async def list_page(self, resource: Resource, namespace: str | None, selector: str, after: str, *, fields: str = "") -> Page:
        self._record("list", resource, after, write=False)
        if resource == CORE_EVENTS:
            return Page([event for event in self.told_of_groups if event["involvedObject"]["uid"] in fields], "1", "")
        if resource.plural == "podgroups" and resource.api_version not in self.schedulers:
            raise Gone("404 page not found")
        there = [(w[2], body) for w, body in self.objects.items() if w[0] == resource.plural and namespace in (None, w[1])]
        left = [body for name, body in sorted(there, key=lambda one: one[0]) if name > after]
        return Page(left[:2], str(self._count), left[1]["metadata"]["name"] if len(left) > 2 else "")

    async def watch(self, resource: Resource, namespace: str | None, selector: str, resource_version: str) -> AsyncIterator[Json]:
        self._record("watch", resource, resource_version, write=False)
        while (event := await self.events.get()) is not None:
            if isinstance(event.get("raise"), Exception):
                raise event["raise"]
            yield event

    def _there(self, resource: Resource, namespace: str, name: str) -> Json:
        where = (resource.plural, namespace, name)
        if where not in self.objects:
            raise Gone(f"no {resource.plural} {name}")
        return self.objects[where]

    def _record(self, verb: str, resource: Resource, name: str, subresource: str | None = None, *, write: bool = True) -> None:
        call = f"{verb} {resource.plural}{'/' + subresource if subresource else ''} {name}".rstrip()
        (self.calls if write else self.reads).append(call)
        if error := self.failures.pop(call, None):
            raise error


class FakeCluster:
    """What the controllers and the kubelets do, one move at a time."""

    def __init__(self, kube: FakeKube, children: Children) -> None:
        self.kube = kube
        self.children = children

    def start_pods(self, *, ready: bool = True, reason: str = "") -> None:
        """Every group that is not being deleted gets its pods, in this state; what is being deleted goes."""
        for name, group in list(self.kube.of(STATEFUL_SETS).items()):
            namespace = group["metadata"]["namespace"]
            size = group["spec"]["replicas"]
            if "deletionTimestamp" in group["metadata"]:
                del self.kube.objects["statefulsets", namespace, name]
                for index in range(size):
                    self.kube.objects.pop(("pods", namespace, f"{name}-{index}"), None)
                continue
            for index in range(size):
                where = ("pods", namespace, f"{name}-{index}")
                if self.kube.objects.get(where, {}).get("metadata", {}).get("annotations"):
                    continue  # it runs, and somebody noted something on it
                uid = self.kube.objects[where]["metadata"]["uid"] if where in self.kube.objects else f"pod-{name}-{index}"
                self.kube.put(PODS, pod_body(group, index, ready=ready, uid=uid, reason=reason))

    def start_routers(self) -> None:
        """Every router runs and answers."""
        for deployment in list(self.kube.of(DEPLOYMENTS).values()):
            replicas = deployment["spec"]["replicas"]
            state = {"observedGeneration": 1, "updatedReplicas": replicas, "readyReplicas": replicas}
            self.kube.put(DEPLOYMENTS, deployment | {"status": state})

    def start_router_pods(self, count: int = 1) -> None:
        """So many pods of routers are ready and can be asked."""
        for index in range(count):
            identity = {labels.SERVICE: "chat", labels.COMPONENT: "router"}
            metadata = {"name": f"chat-router-{index}", "namespace": "team", "uid": f"router-{index}", "labels": identity}
            status = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": f"10.0.0.{index}"}
            self.kube.put(PODS, {"metadata": metadata, "spec": {}, "status": status})

    def lose_node(self, name: str, since: str) -> None:
        """The control plane does not hear a node any more: its pods are not ready, and their deletion never ends."""
        condition = {"type": "Ready", "status": "Unknown", "lastTransitionTime": since}
        self.kube.put(NODES, {"metadata": {"name": name, "namespace": ""}, "spec": {}, "status": {"conditions": [condition]}})
        for pod in list(self.kube.of(PODS).values()):
            if pod["spec"].get("nodeName") == name:
                self.kube.put(PODS, pod | {"status": {"conditions": [{"type": "Ready", "status": "False"}]}})

    def tell(self) -> None:
        """The informers hear of everything, as a watch tells it."""
        children = self.children
        children.pods.replace(self._told(PODS))
        children.sets.replace(self._told(STATEFUL_SETS))
        children.deployments.replace(self._told(DEPLOYMENTS))
        children.services.replace(self._told(SERVICES))
        children.nodes.replace(self._told(NODES))

    def _told(self, resource: Resource) -> list[Json]:
        events = [msgspec.json.encode({"type": "ADDED", "object": body}) for body in self.kube.of(resource).values()]
        return [read_event(event)["object"] for event in events]


def _refuse_others(there: Json, wanted: Json) -> None:
    """What is bound to a UID makes nothing, what is bound to a version may make it anew, and both change nothing else."""
    if "uid" in wanted and there.get("uid") != wanted["uid"]:
        raise Conflict("uid mismatch")
    if there and "resourceVersion" in wanted and there["resourceVersion"] != wanted["resourceVersion"]:
        raise Conflict("the object has been modified")


def _metadata(body: Json) -> Json:
    """What most writes answer."""
    return {"metadata": body["metadata"]}


def _has_null(value: Any) -> bool:
    """Whether null is anywhere in this body."""
    if isinstance(value, Mapping):
        return any(map(_has_null, value.values()))
    return value is None or (isinstance(value, list) and any(map(_has_null, value)))
