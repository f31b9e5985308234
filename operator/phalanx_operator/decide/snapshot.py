"""What the operator knows of one service at one moment, as frozen records."""

from dataclasses import dataclass

from phalanx_api.status import Status


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod of a group or a router. `reason` says why it is not ready, in the words of Kubernetes, if it says so."""

    name: str
    index: int
    owner_uid: str
    component: str = ""
    ready: bool = False
    node: str = ""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """A group, which is a StatefulSet. `created` is its creation time, sortable. `pods` are those that exist."""

    name: str
    uid: str
    revision: str
    created: str
    size: int
    terminating: bool = False
    pods: tuple[ObservedPod, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether every pod that the group should have is there and ready."""
        return not self.terminating and self.ready_pods == self.size

    @property
    def ready_pods(self) -> int:
        """How many of its pods are ready."""
        return sum(pod.ready for pod in self.pods)


@dataclass(frozen=True, slots=True)
class ObservedRouter:
    """The router Deployment. `current` is false while its controller has not seen the newest spec."""

    wanted: int
    updated: int
    ready: int
    current: bool

    @property
    def settled(self) -> bool:
        """Whether all routers run the newest spec and answer."""
        return self.current and self.updated == self.ready == self.wanted


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that decisions about one service rest on."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    has_replicas: bool
    status: Status
    groups: tuple[ObservedGroup, ...] = ()
    router: ObservedRouter | None = None
    router_pods: tuple[ObservedPod, ...] = ()
