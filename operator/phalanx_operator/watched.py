"""What is read of the objects that watches tell of. The rest, most of a pod, is skipped where it stands: that takes a third of
the time. What `observe` reads of an object must be named here."""

from typing import Any, TypedDict

import msgspec

from phalanx_operator.kube.client import Json


class _Owner(TypedDict, total=False):
    uid: str
    controller: bool | None


class _Metadata(TypedDict, total=False):
    name: str
    namespace: str
    uid: str
    resourceVersion: str
    generation: int
    labels: dict[str, str] | None
    annotations: dict[str, str] | None
    ownerReferences: list[_Owner] | None
    creationTimestamp: str | None
    deletionTimestamp: str
    deletionGracePeriodSeconds: int


class _Spec(TypedDict, total=False):
    nodeName: str
    replicas: int
    unschedulable: bool


class _Object(TypedDict, total=False):
    """An object, or the Status that stands for one in an error."""

    metadata: _Metadata
    spec: _Spec | None
    status: Any
    code: int
    message: str


class _Event(TypedDict):
    type: str
    object: _Object


_DECODER = msgspec.json.Decoder(_Event)


def read_event(line: bytes) -> Json:
    """The event of a watch, its object with no other fields than `observe` trims. Raises: msgspec.DecodeError."""
    event: Any = _DECODER.decode(line)
    found: Json = event
    return found
