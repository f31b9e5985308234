"""Who the leaders are: from the pods of the service, or from a fixed list for one machine and tests.

A leader is keyed by its pod's UID: a pod that comes back under the same name and address is another leader. The watch
that brings the pods is in `watch`; this module only reads them.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx_api import labels


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One leader. `created` orders leaders by age (RFC 3339; "" where nobody knows).

    A leaving one gets no new requests: its pod is being deleted, or the operator has its group emptied.
    """

    key: str
    address: str
    group: str
    created: str = ""
    leaving: bool = False


Leaders = Mapping[str, Endpoint]
"""All leaders of the service, by key."""


class LeaderSource(Protocol):
    """Where leaders come from."""

    async def run(self, found: Callable[[Leaders], None]) -> None:
        """Calls `found` with the first list and after each change, for ever."""
        ...


class StaticLeaders:
    """A fixed list of `host:port`."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._leaders = {address: Endpoint(address, address, address) for address in addresses}

    async def run(self, found: Callable[[Leaders], None]) -> None:
        """Tells the list once, and waits until it is cancelled."""
        found(self._leaders)
        await asyncio.Event().wait()


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """The part of a pod's metadata that a router reads; fields are Kubernetes' own."""

    uid: str = ""
    name: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    resource_version: str = ""


class PodStatus(msgspec.Struct, frozen=True):
    """The part of a pod's status that a router reads."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")


class Pod(msgspec.Struct, frozen=True):
    """The part of a pod that a router reads."""

    metadata: Metadata = Metadata()
    status: PodStatus = PodStatus()


def selector(service: str) -> str:
    """The label selector of the service's leader pods."""
    return _selector({labels.SERVICE: service, labels.POD_INDEX: "0", labels.COMPONENT: "group"})


def router_selector(service: str) -> str:
    """The label selector of the service's routers."""
    return _selector({labels.SERVICE: service, labels.COMPONENT: "router"})


def _selector(wanted: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in wanted.items())


def leaders_of(pods: Iterable[Pod]) -> dict[str, Endpoint]:
    """The leaders among these pods: those with an address that have not ended."""
    return {
        pod.metadata.uid: Endpoint(
            key=pod.metadata.uid,
            address=f"{_host(pod.status.pod_ip)}:{labels.HTTP_PORT}",
            group=pod.metadata.labels.get(labels.GROUP, pod.metadata.name),
            created=pod.metadata.creation_timestamp,
            leaving=pod.metadata.deletion_timestamp is not None or labels.DRAINING in pod.metadata.annotations,
        )
        for pod in pods
        if pod.status.pod_ip and pod.status.phase not in ("Succeeded", "Failed")
    }


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
