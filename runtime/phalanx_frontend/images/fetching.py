"""Reads images over https, from hosts that an administrator allows, within bounds of bytes, time and redirects.

A client chooses the URL, and a host chooses where it redirects. So each host is resolved here, its addresses are checked, and the
connection is made to a checked address. Errors name no address.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phalanx_api.network.addresses import Address, embedded, is_public, matches_name, network_of
from phalanx_frontend.images.budget import current_lease
from phalanx_frontend.images.errors import ImageRefused

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS = 3
TIMEOUT_S = 10.0
"""For the whole image."""
HTTPS_PORT = 443
_DNS_THREADS = ThreadPoolExecutor(8, "image-dns")
"""A name server that does not answer keeps these, and not the threads that tokenize and load models."""
_REDIRECTS = (301, 302, 303, 307, 308)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host and port. Raises OSError."""


async def resolve_host(host: str, port: int) -> list[str]:
    """Returns the addresses of a host, in the order of the resolver. Raises OSError."""
    ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_DNS_THREADS, ask)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Hosts of images: names, `*.suffix`, or `*`, which have public addresses; addresses and networks may be private."""

    entries: tuple[str, ...]

    def may_name(self, host: str) -> bool:
        """Returns whether an entry allows the host, whatever its address is."""
        return any(network_of(entry) is not None or matches_name(entry, host) for entry in self.entries)

    def allow(self, host: str, address: Address, port: int = HTTPS_PORT) -> bool:
        """Returns whether a connection to `host` may be made to this address and port. Names allow port 443 only."""
        target = embedded(address)
        if any(target in network for network in map(network_of, self.entries) if network is not None):
            return True
        return port == HTTPS_PORT and is_public(address) and any(matches_name(entry, host) for entry in self.entries)


class HttpsFetcher:
    """Implements `source.ImageFetcher`."""

    def __init__(
        self,
        hosts: AllowedHosts,
        *,
        resolve: Resolve = resolve_host,
        trust: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`trust`: certificates of servers; by default those of the system."""
        self._hosts = hosts
        self._resolve = resolve
        self._trust = trust or ssl.create_default_context()  # once: it reads all certificates of the system
        self._timeout_s = timeout_s

    async def fetch(self, url: str, max_bytes: int, param: str) -> bytes:
        """See `ImageFetcher`."""
        import httpx  # takes long to import, and most servers fetch nothing

        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._fetch(httpx.URL(url), max_bytes, param)
        except httpx.InvalidURL as error:
            raise ImageRefused(param, f"{param}: the URL of the image is invalid", "image_url_refused") from error
        except (httpx.HTTPError, OSError, ValueError) as error:  # a timeout is an OSError
            # One message, so that a client does not learn which ports answer.
            why = f"{param}: the image cannot be read from its host within {self._timeout_s:g} s"
            raise ImageRefused(param, why, "image_unavailable") from error

    async def _fetch(self, url: "httpx.URL", max_bytes: int, param: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(url, max_bytes, param)
            if isinstance(found, bytes):
                return found
            url = url.join(found)
        raise ImageRefused(param, f"{param}: the image redirects more than {MAX_REDIRECTS} times", "image_url_refused")

    async def _get(self, url: "httpx.URL", max_bytes: int, param: str) -> bytes | str:
        """Returns the image, or the URL of a redirect. Raises httpx.HTTPError."""
        import httpx

        address = await self._address(url, param)
        host = url.raw_host.decode()  # as DNS and certificates spell it
        async with httpx.AsyncClient(verify=self._trust, trust_env=False, timeout=self._timeout_s) as client:
            headers = {"host": url.netloc.decode(), "accept-encoding": "identity", "accept": "image/*"}
            sent = client.build_request("GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": host})
            response = await client.send(sent, stream=True)
            try:
                if response.status_code in _REDIRECTS and "location" in response.headers:
                    return str(response.headers["location"])
                if response.status_code != 200:
                    raise OSError(f"status {response.status_code}")
                return await _read(response, max_bytes, param)
            finally:
                await response.aclose()

    async def _address(self, url: "httpx.URL", param: str) -> str:
        """Returns an allowed address of the URL's host. Raises OSError."""
        host = url.raw_host.decode()
        if url.scheme != "https" or url.userinfo or not host or not self._hosts.may_name(host):
            raise _refused(param)
        port = url.port or HTTPS_PORT
        found = [address.partition("%")[0] for address in await self._resolve(host, port)]
        allowed = [address for address in found if self._hosts.allow(host, ipaddress.ip_address(address), port)]
        if not allowed:
            raise _refused(param)
        return allowed[0]


def _refused(param: str) -> ImageRefused:
    return ImageRefused(param, f"{param}: this server reads no images from that host, or only over https", "image_url_refused")


async def _read(response: "httpx.Response", max_bytes: int, param: str) -> bytes:
    """Returns the body as sent: a compressed one is no image."""
    content = bytearray()
    async for piece in response.aiter_raw():
        current_lease().take(len(piece))
        content += piece
        if len(content) > max_bytes:
            raise ImageRefused(param, f"{param}: the image has more than {max_bytes} bytes", "image_too_large")
    return bytes(content)
