"""Which addresses model sources may have.

A URI may be chosen by a tenant who has no other access to the cluster's network, and a registry chooses where it redirects. So
addresses are checked when a connection is opened, after the name is resolved, and the connection goes to the checked address.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.request import getproxies, proxy_bypass

import httpx

from phalanx_api import labels
from phalanx_api.network.addresses import Address, embedded, is_metadata, is_public, matches_name, network_of
from phalanx_runtime.errors import ModelError

METADATA_NAMES = ("metadata", "metadata.google.internal", "instance-data")
"""Names of metadata services, for proxies, which resolve names themselves."""


@dataclass(frozen=True, slots=True)
class PrivateSources:
    """Hosts with private addresses that an administrator allows: names, `*.suffix`, addresses, networks; `*` is all.

    Only a network of that size or an address allows a metadata service. Null: every address is allowed.
    """

    entries: tuple[str, ...] | None = None

    def allow(self, host: str, address: Address) -> bool:
        """Returns whether a connection to `host` may go to this address."""
        if self.entries is None or is_public(address):
            return True
        target = embedded(address)
        if any(target in network for network in map(network_of, self.entries) if network is not None):
            return True
        return not is_metadata(address) and any(matches_name(entry, host) for entry in self.entries)

    def allow_name(self, host: str) -> bool:
        """Returns whether a request for `host` may go through a proxy, which resolves the name itself."""
        try:
            return self.allow(host, ipaddress.ip_address(host))
        except ValueError:
            return self.entries is None or host.rstrip(".").lower() not in METADATA_NAMES


ANY_SOURCE = PrivateSources()


def read_private_sources(environment: Mapping[str, str]) -> PrivateSources:
    """Reads the operator's setting. Without it, as on a machine of one's own, every address is allowed."""
    setting = environment.get(labels.ENV_PRIVATE_SOURCES)
    return PrivateSources(None if setting is None else tuple(setting.replace(",", " ").split()))


Resolve = Callable[[str, int], Sequence[str]]
"""Returns the addresses of a host and port. Raises OSError."""


def resolve_host(host: str, port: int) -> list[str]:
    """Returns the addresses of a host, in the order of the resolver. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


class CheckedTransport(httpx.BaseTransport):
    """Sends each request, redirected ones too, to an address of its host that the policy allows. Raises ModelError for none.

    The certificate is verified for the name. With a proxy of the environment only names and literal addresses are checked.
    """

    def __init__(self, policy: PrivateSources, resolve: Resolve = resolve_host) -> None:
        self._policy = policy
        self._resolve = resolve
        self._transports: dict[str, httpx.HTTPTransport] = {}
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Returns the response. Raises httpx.RequestError, ModelError."""
        host = request.url.host
        proxy = _proxy_of(request.url)
        if proxy:
            if not self._policy.allow_name(host):
                raise _refused(host, host)
            return self._transport(proxy, proxy).handle_request(request)
        error: httpx.TransportError | None = None
        for address in self._addresses(request):
            url = request.url.copy_with(host=address)
            extensions = request.extensions | {"sni_hostname": host}
            sent = httpx.Request(request.method, url, headers=request.headers, stream=request.stream, extensions=extensions)
            try:
                return self._transport(host).handle_request(sent)
            except (httpx.ConnectError, httpx.ConnectTimeout) as failure:
                error = failure
        raise error or httpx.ConnectError(f"{host} has no address", request=request)

    def _addresses(self, request: httpx.Request) -> list[str]:
        host, port = request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80)
        try:
            found = [address.partition("%")[0] for address in self._resolve(host, port)]
        except OSError as error:
            raise httpx.ConnectError(f"{host}: {error.strerror or error}", request=request) from error
        allowed = [address for address in found if self._policy.allow(host, ipaddress.ip_address(address))]
        if found and not allowed:
            raise _refused(host, found[0])
        return allowed

    def _transport(self, key: str, proxy: str | None = None) -> httpx.HTTPTransport:
        """Returns the connections of a host: two hosts of one address share none, because a certificate is that of a name."""
        with self._lock:  # threads load parts of a file at the same time
            if key not in self._transports:
                self._transports[key] = httpx.HTTPTransport(proxy=proxy)
            return self._transports[key]

    def close(self) -> None:
        """Closes all connections."""
        for transport in self._transports.values():
            transport.close()


def _proxy_of(url: httpx.URL) -> str:
    """Returns the proxy for a URL; empty for a direct connection."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all") or ""
    return "" if not proxy or proxy_bypass(url.host) else proxy


def _refused(host: str, address: str) -> ModelError:
    shown = f"{host} ({address})" if host != address else host
    return ModelError(
        f"the model source {shown} has a private address, which the operator does not allow: "
        f"an administrator may add the host to its setting {labels.ENV_PRIVATE_SOURCES} (privateModelSources of the chart)"
    )
