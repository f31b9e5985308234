"""Gangs, which place the pods of a group together.

Native      a Kubernetes PodGroup (scheduling.k8s.io); pods name it and wait until all fit
Volcano     a Volcano PodGroup, named by an annotation, and Volcano's scheduler
Kueue       a label on the StatefulSet: Kueue admits all its pods or no pod
Fallback    no addition: the operator creates groups one by one (`decide.groups.admission`)
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.render.objects import Object, child_labels

GangKind = Literal["None", "Fallback", "Native", "Volcano", "Kueue"]
NATIVE_API = "scheduling.k8s.io/v1alpha2"
VOLCANO_API = "scheduling.volcano.sh/v1beta1"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
VOLCANO_GROUP = "scheduling.k8s.io/group-name"
VOLCANO_SCHEDULER = "volcano"


@dataclass(frozen=True, slots=True)
class GangAdditions:
    """Labels of the StatefulSet, annotations and fields of its pods."""

    labels: dict[str, str] = field(default_factory=dict)
    pod_annotations: dict[str, str] = field(default_factory=dict)
    pod_spec: Object = field(default_factory=dict)


class Gang(Protocol):
    """One kind of gang."""

    @property
    def kind(self) -> GangKind:
        """As in the group's label."""
        ...

    def additions(self, service: InferenceService, group: str) -> GangAdditions:
        """Returns the additions to the StatefulSet of a group."""
        ...

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """Returns the objects that the StatefulSet with this UID owns."""
        ...


@dataclass(frozen=True, slots=True)
class NoGang:
    """No additions."""

    kind: GangKind = "None"

    def additions(self, service: InferenceService, group: str) -> GangAdditions:
        """See Gang."""
        return GangAdditions()

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """See Gang."""
        return []


@dataclass(frozen=True, slots=True)
class NativeGang:
    """A Kubernetes PodGroup."""

    kind: GangKind = "Native"

    def additions(self, service: InferenceService, group: str) -> GangAdditions:
        """See Gang."""
        return GangAdditions(pod_spec={"schedulingGroup": {"podGroupName": group}})

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """See Gang."""
        spec = {"schedulingPolicy": {"gang": {"minCount": pods}}}
        return [_owned_pod_group(service, NATIVE_API, group, uid, spec)]


@dataclass(frozen=True, slots=True)
class VolcanoGang:
    """A Volcano PodGroup."""

    kind: GangKind = "Volcano"

    def additions(self, service: InferenceService, group: str) -> GangAdditions:
        """See Gang."""
        scheduler = service.spec.placement.scheduler_name or VOLCANO_SCHEDULER
        return GangAdditions(pod_annotations={VOLCANO_GROUP: group}, pod_spec={"schedulerName": scheduler})

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """See Gang."""
        placement = service.spec.placement
        optional = {"queue": placement.queue_name, "priorityClassName": placement.priority_class_name}
        spec = {"minMember": pods} | {name: value for name, value in optional.items() if value}
        return [_owned_pod_group(service, VOLCANO_API, group, uid, spec)]


@dataclass(frozen=True, slots=True)
class KueueGang:
    """Kueue's integration with StatefulSets."""

    kind: GangKind = "Kueue"

    def additions(self, service: InferenceService, group: str) -> GangAdditions:
        """See Gang."""
        return GangAdditions(labels={KUEUE_QUEUE: service.spec.placement.queue_name or ""})

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """See Gang."""
        return []


def gang_of_kind(kind: str) -> Gang:
    """Returns the gang of a label's value."""
    return next(
        (gang for gang in (NativeGang(), VolcanoGang(), KueueGang(), NoGang("Fallback")) if gang.kind == kind), NoGang("None")
    )


def needs_discovery(service: InferenceService) -> bool:
    """Returns whether the gang depends on the served APIs."""
    return service.shape.pods > 1 and service.spec.placement.gang.mode in ("Auto", "Native", "Volcano")


def choose_gang(service: InferenceService, served: Set[str]) -> Gang:
    """Returns the gang of new groups. `served`: API versions of schedulers."""
    placement = service.spec.placement
    mode = placement.gang.mode
    if mode == "Kueue" or (mode == "Auto" and placement.queue_name and placement.scheduler_name != VOLCANO_SCHEDULER):
        return KueueGang()
    if mode == "None" or service.shape.pods == 1:
        return NoGang("None")
    if mode == "Native" or (mode == "Auto" and NATIVE_API in served and placement.scheduler_name is None):
        return NativeGang()
    if mode == "Volcano" or (mode == "Auto" and VOLCANO_API in served and placement.scheduler_name == VOLCANO_SCHEDULER):
        return VolcanoGang()
    return NoGang("Fallback")


def missing_api(gang: Gang, served: Set[str]) -> str:
    """Returns the needed API that the cluster lacks; empty if there is no such API."""
    needed = {"Native": NATIVE_API, "Volcano": VOLCANO_API}.get(gang.kind, "")
    return "" if needed in served else needed


def _owned_pod_group(service: InferenceService, api_version: str, group: str, uid: str, spec: Object) -> Object:
    """It blocks the StatefulSet's deletion, so that its name is free afterwards."""
    kind = {"apiVersion": "apps/v1", "kind": "StatefulSet"}
    owner = kind | {"name": group, "uid": uid, "controller": True, "blockOwnerDeletion": True}
    metadata = {
        "name": group,
        "namespace": service.namespace,
        "labels": child_labels(service, "group") | {labels.GROUP: group},
        "ownerReferences": [owner],
    }
    return {"apiVersion": api_version, "kind": "PodGroup", "metadata": metadata, "spec": spec}
