"""Leaders of a service, read from its pods, or from a fixed list for tests and a single machine.

The key of a leader is the UID of its pod: a recreated pod with the same name and address is another leader. `links.leader_watch`
lists and watches the pods.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx_api import labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of one leader."""

    key: str
    # host:port.
    address: str
    group: str
    # Creation time (RFC 3339), which orders leaders by age; "" when unknown.
    created: str = ""
    # Gets no new requests: its pod is being deleted or its group is draining.
    leaving: bool = False


Leaders = Mapping[str, Endpoint]
"""All leaders of the service, by key."""


class LeaderSource(Protocol):
    """Source of the list of leaders."""

    async def run(self, found: Callable[[Leaders], None]) -> None:
        """Calls `found` with the first list and after each change, until cancelled."""
        ...


class StaticLeaders:
    """Fixed list of `host:port` addresses."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._leaders = {address: Endpoint(key=address, address=address, group=address) for address in addresses}

    async def run(self, found: Callable[[Leaders], None]) -> None:
        """Calls `found` once and waits until cancelled."""
        found(self._leaders)
        await asyncio.Event().wait()


class Metadata(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Fields of a pod's `metadata` that the router reads."""

    uid: str = ""
    name: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    resource_version: str = ""


class PodStatus(msgspec.Struct, frozen=True):
    """Fields of a pod's `status` that the router reads."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")


class Pod(msgspec.Struct, frozen=True):
    """Fields of a pod that the router reads."""

    metadata: Metadata = Metadata()
    status: PodStatus = PodStatus()


def leader_selector(service: str) -> str:
    """Returns the label selector of the service's leader pods."""
    return _selector({labels.SERVICE: service, labels.POD_INDEX: "0", labels.COMPONENT: "group"})


def router_selector(service: str) -> str:
    """Returns the label selector of the service's router pods."""
    return _selector({labels.SERVICE: service, labels.COMPONENT: "router"})


def _selector(wanted: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in wanted.items())


def leaders_of(pods: Iterable[Pod]) -> dict[str, Endpoint]:
    """Returns the leaders by pod UID: pods that have an IP and have not terminated."""
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
