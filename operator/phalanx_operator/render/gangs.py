"""Who places the pods of a group together: one Protocol, and what each kind of scheduler needs of a group.

    Native     a PodGroup of Kubernetes itself (scheduling.k8s.io); the pods name it, and wait until all of them fit
    Volcano    a PodGroup of Volcano, named by an annotation, and its scheduler
    Kueue      a label on the StatefulSet: Kueue makes of its pods one workload and admits all of them or none
    Fallback   nothing in the objects: the operator makes one group after another (`decide.admission`)
    None       nothing at all

A group keeps the kind that it was made with, as a label; objects beside it belong to its StatefulSet and go with it.
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
class Additions:
    """What a gang adds to a group: labels of its StatefulSet, annotations and fields of its pods."""

    labels: dict[str, str] = field(default_factory=dict)
    pod_annotations: dict[str, str] = field(default_factory=dict)
    pod_spec: Object = field(default_factory=dict)


class Gang(Protocol):
    """One kind of gang."""

    @property
    def kind(self) -> GangKind:
        """Its name, as in the label and in the status."""
        ...

    def additions(self, service: InferenceService, group: str) -> Additions:
        """What the StatefulSet of a group needs."""
        ...

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """What must be there beside the StatefulSet, which has this UID and so many pods, and owns it."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """No other object and no other scheduler: Fallback and None."""

    kind: GangKind = "None"

    def additions(self, service: InferenceService, group: str) -> Additions:
        """See Gang."""
        return Additions()

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """See Gang."""
        return []


@dataclass(frozen=True, slots=True)
class Native:
    """A PodGroup of Kubernetes."""

    kind: GangKind = "Native"

    def additions(self, service: InferenceService, group: str) -> Additions:
        """See Gang."""
        return Additions(pod_spec={"schedulingGroup": {"podGroupName": group}})

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """See Gang."""
        spec = {"schedulingPolicy": {"gang": {"minCount": pods}}}
        return [_beside(service, NATIVE_API, group, uid, spec)]


@dataclass(frozen=True, slots=True)
class Volcano:
    """A PodGroup of Volcano."""

    kind: GangKind = "Volcano"

    def additions(self, service: InferenceService, group: str) -> Additions:
        """See Gang."""
        scheduler = service.spec.placement.scheduler_name or VOLCANO_SCHEDULER
        return Additions(pod_annotations={VOLCANO_GROUP: group}, pod_spec={"schedulerName": scheduler})

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """See Gang."""
        placement = service.spec.placement
        optional = {"queue": placement.queue_name, "priorityClassName": placement.priority_class_name}
        spec = {"minMember": pods} | {name: value for name, value in optional.items() if value}
        return [_beside(service, VOLCANO_API, group, uid, spec)]


@dataclass(frozen=True, slots=True)
class Kueue:
    """Kueue's own integration with StatefulSets."""

    kind: GangKind = "Kueue"

    def additions(self, service: InferenceService, group: str) -> Additions:
        """See Gang."""
        return Additions(labels={KUEUE_QUEUE: service.spec.placement.queue_name or ""})

    def objects(self, service: InferenceService, group: str, uid: str, pods: int) -> list[Object]:
        """See Gang."""
        return []


def of_kind(kind: str) -> Gang:
    """The gang that a group was made with, by its label; groups of former versions have none."""
    return next((gang for gang in (Native(), Volcano(), Kueue(), Alone("Fallback")) if gang.kind == kind), Alone("None"))


def gang_options(service: InferenceService) -> bool:
    """Whether the gang depends on what the cluster serves."""
    return service.shape.pods > 1 and service.spec.placement.gang.mode in ("Auto", "Native", "Volcano")


def chosen(service: InferenceService, served: Set[str]) -> Gang:
    """The gang of groups that are made now. `served`: versions of the APIs of schedulers that the cluster has.

    A group of one pod needs none, but for a queue that admits it.
    """
    placement, is_one = service.spec.placement, service.shape.pods == 1
    mode = placement.gang.mode
    if mode == "Kueue" or (mode == "Auto" and placement.queue_name and placement.scheduler_name != VOLCANO_SCHEDULER):
        return Kueue()
    if mode == "None" or is_one:
        return Alone("None")
    if mode == "Native" or (mode == "Auto" and NATIVE_API in served and placement.scheduler_name is None):
        return Native()
    if mode == "Volcano" or (mode == "Auto" and VOLCANO_API in served and placement.scheduler_name == VOLCANO_SCHEDULER):
        return Volcano()
    return Alone("Fallback")


def missing_gang_reason(gang: Gang, served: Set[str]) -> str:
    """The API that a gang needs and the cluster does not serve; empty when it has what it needs."""
    needed = {"Native": NATIVE_API, "Volcano": VOLCANO_API}.get(gang.kind, "")
    return "" if needed in served else needed


def _beside(service: InferenceService, api_version: str, group: str, uid: str, spec: Object) -> Object:
    """An object of a group's name that goes with its StatefulSet, and before it: until then the name is not free."""
    kind = {"apiVersion": "apps/v1", "kind": "StatefulSet"}
    owner = kind | {"name": group, "uid": uid, "controller": True, "blockOwnerDeletion": True}
    metadata = {
        "name": group,
        "namespace": service.namespace,
        "labels": child_labels(service, "group") | {labels.GROUP: group},
        "ownerReferences": [owner],
    }
    return {"apiVersion": api_version, "kind": "PodGroup", "metadata": metadata, "spec": spec}
