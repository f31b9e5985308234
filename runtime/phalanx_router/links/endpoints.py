"""Leaders of a service, from its pods or from a fixed list."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx_api import labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One leader or router."""

    key: str  # UID of the pod: a recreated pod is another leader
    address: str  # host:port
    group: str
    created: str = ""  # RFC 3339; orders leaders by age
    is_leaving: bool = False  # its pod is being deleted or its group drains
    is_https: bool = False  # its HTTP port serves HTTPS
    is_internal: bool = False  # it is reached by mutual TLS


_HTTPS, _INTERNAL = "https://", "internal://"
Leaders = Mapping[str, Endpoint]
"""By key."""


class LeaderSource(Protocol):
    """Source of the list of leaders."""

    async def run(self, on_change: Callable[[Leaders], None]) -> None:
        """Calls `on_change` with the first list and after each change."""
        ...


class StaticLeaders:
    """Fixed list of `host:port` addresses, with `https://` in front for HTTPS, or `internal://` for mutual TLS."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._leaders = {address: _static_endpoint(address) for address in addresses}

    async def run(self, on_change: Callable[[Leaders], None]) -> None:
        """Calls `on_change` once."""
        on_change(self._leaders)
        await asyncio.Event().wait()


def _static_endpoint(address: str) -> Endpoint:
    place = address.removeprefix(_HTTPS).removeprefix(_INTERNAL)
    is_https, is_internal = address.startswith(_HTTPS), address.startswith(_INTERNAL)
    return Endpoint(key=place, address=place, group=place, is_https=is_https, is_internal=is_internal)


class Metadata(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Fields of a pod's `metadata`."""

    uid: str = ""
    name: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    resource_version: str = ""


class PodStatus(msgspec.Struct, frozen=True):
    """Fields of a pod's `status`."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")


class Pod(msgspec.Struct, frozen=True):
    """Fields of a pod."""

    metadata: Metadata = Metadata()
    status: PodStatus = PodStatus()


def leader_selector(service: str) -> str:
    """Label selector of the service's leader pods."""
    return _selector({labels.SERVICE: service, labels.POD_INDEX: "0", labels.COMPONENT: "group"})


def router_selector(service: str) -> str:
    """Label selector of the service's router pods."""
    return _selector({labels.SERVICE: service, labels.COMPONENT: "router"})


def _selector(match_labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in match_labels.items())


def leaders_of(pods: Iterable[Pod]) -> dict[str, Endpoint]:
    """Leaders by pod UID, from running pods with an IP."""
    return {
        pod.metadata.uid: Endpoint(
            key=pod.metadata.uid,
            address=f"{_host(pod.status.pod_ip)}:{_port(pod)}",
            group=pod.metadata.labels.get(labels.GROUP, pod.metadata.name),
            created=pod.metadata.creation_timestamp,
            is_leaving=pod.metadata.deletion_timestamp is not None or labels.DRAINING in pod.metadata.annotations,
            is_https=pod.metadata.annotations.get(labels.SCHEME) == "https",
            is_internal=pod.metadata.annotations.get(labels.INTERNAL_TLS) == "true",
        )
        for pod in pods
        if pod.status.pod_ip and pod.status.phase not in ("Succeeded", "Failed")
    }


def _port(pod: Pod) -> int:
    """Routers have a port of its own for other pods with certificates, leaders one port for all."""
    is_router = pod.metadata.labels.get(labels.COMPONENT) == "router"
    is_internal = pod.metadata.annotations.get(labels.INTERNAL_TLS) == "true"
    return labels.INTERNAL_PORT if is_router and is_internal else labels.HTTP_PORT


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
