"""Images over https: only from allowed hosts and addresses, within bounds of bytes, time and redirects."""

import asyncio
import ipaddress
import logging
import ssl
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from phalanx_frontend.images.errors import ImageRefused
from phalanx_frontend.images.fetching import MAX_REDIRECTS, AllowedHosts, HttpsFetcher, resolve_host
from phalanx_frontend.logs import start_logging
from tests.certificates import issue, mount_certificate

NAME = "images.example"
CERTIFICATE = issue(NAME)
LOOPBACK = AllowedHosts(("127.0.0.1",))
MAX_BYTES = 5000
After = Literal["close", "wait", "more"]


@asynccontextmanager
async def answering(folder: Path, head: str, body: bytes = b"", *, then: After = "close") -> AsyncIterator[int]:
    """Yields the port of a server that answers every request so; the text PORT in `head` becomes its port.

    then: after the body it closes the connection, waits, or sends more for ever.
    """
    mount_certificate(folder, CERTIFICATE)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            port = writer.get_extra_info("sockname")[1]
            writer.write(f"HTTP/1.1 {head.replace('PORT', str(port))}\r\n\r\n".encode() + body)
            while then == "more":
                writer.write(b"x" * 1000)
                await writer.drain()
            if then == "wait":
                await done.wait()
            writer.close()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        done.set()
        server.close()


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cadata=CERTIFICATE.certificate)


def fetcher(hosts: AllowedHosts = LOOPBACK, addresses: Sequence[str] = ("127.0.0.1",), timeout_s: float = 20.0) -> HttpsFetcher:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    return HttpsFetcher(hosts, resolve=resolve, trust=trusting(), timeout_s=timeout_s)


async def refusal(reader: HttpsFetcher, url: str) -> str:
    with pytest.raises(ImageRefused) as caught:
        await reader.fetch(url, MAX_BYTES, "messages[0].content")
    assert "127.0.0.1" not in caught.value.message and "10." not in caught.value.message, "no address is shown"
    return caught.value.code


async def test_an_allowed_host_is_read_at_its_checked_address(tmp_path: Path) -> None:
    async with answering(tmp_path, "200 OK\r\ncontent-length: 5", b"image") as port:
        assert await fetcher().fetch(f"https://{NAME}:{port}/a.png", MAX_BYTES, "x") == b"image"


async def test_proxies_of_the_environment_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with answering(tmp_path, "200 OK\r\ncontent-length: 5", b"image") as port:
        assert await fetcher().fetch(f"https://{NAME}:{port}/a.png", MAX_BYTES, "x") == b"image"


async def test_no_log_line_shows_a_url(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start_logging()
    caplog.set_level(logging.INFO)
    async with answering(tmp_path, "200 OK\r\ncontent-length: 5", b"image") as port:
        await fetcher().fetch(f"https://{NAME}:{port}/a.png?signature=secret", MAX_BYTES, "x")
    assert "secret" not in caplog.text


async def test_the_certificate_must_be_that_of_the_name(tmp_path: Path) -> None:
    async with answering(tmp_path, "200 OK\r\ncontent-length: 5", b"image") as port:
        assert await refusal(fetcher(), f"https://other.example:{port}/") == "image_unavailable"


@pytest.mark.parametrize("head", ["200 OK", "200 OK\r\ncontent-length: 99999999"])
async def test_endless_bodies_end_at_the_bound(tmp_path: Path, head: str) -> None:
    async with answering(tmp_path, head, then="more") as port:
        assert await refusal(fetcher(), f"https://{NAME}:{port}/") == "image_too_large"


@pytest.mark.parametrize("body", [b"", b"x" * 100], ids=["no body", "a part of the body"])
async def test_slow_bodies_end_at_the_bound(tmp_path: Path, body: bytes) -> None:
    async with answering(tmp_path, "200 OK\r\ncontent-length: 200", body, then="wait") as port:
        assert await refusal(fetcher(timeout_s=0.3), f"https://{NAME}:{port}/") == "image_unavailable"


async def test_compressed_bodies_are_not_expanded(tmp_path: Path) -> None:
    async with answering(tmp_path, "200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5", b"\x1f\x8babc") as port:
        assert await fetcher().fetch(f"https://{NAME}:{port}/", MAX_BYTES, "x") == b"\x1f\x8babc"


@pytest.mark.parametrize(
    "target",
    [
        "http://images.example:PORT/",
        "https://10.1.2.3:PORT/",
        "https://[::1]:PORT/",
        "https://localhost:PORT/",
        "file:///etc/passwd",
    ],
)
async def test_redirects_are_checked_as_the_first_url(tmp_path: Path, target: str) -> None:
    async with answering(tmp_path, f"302 Found\r\nlocation: {target}\r\ncontent-length: 0") as port:
        hosts = AllowedHosts((NAME, "localhost", "127.0.0.1"))

        async def resolve(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.1"] if host == NAME else ["10.1.2.3"] if host == "localhost" else [host]

        reader = HttpsFetcher(hosts, resolve=resolve, trust=trusting())
        assert await refusal(reader, f"https://{NAME}:{port}/") == "image_url_refused"


async def test_redirects_are_bounded(tmp_path: Path) -> None:
    async with answering(tmp_path, f"302 Found\r\nlocation: https://{NAME}:PORT/again\r\ncontent-length: 0") as port:
        assert MAX_REDIRECTS == 3
        assert await refusal(fetcher(), f"https://{NAME}:{port}/") == "image_url_refused"


async def test_other_statuses_are_no_image(tmp_path: Path) -> None:
    async with answering(tmp_path, "404 Not Found\r\ncontent-length: 0") as port:
        assert await refusal(fetcher(), f"https://{NAME}:{port}/") == "image_unavailable"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "::1", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "0.0.0.0"],
)
async def test_private_addresses_of_a_public_name_are_refused(address: str) -> None:
    for hosts in (("*",), ("*.example",), (NAME,)):
        assert await refusal(fetcher(AllowedHosts(hosts), [address]), f"https://{NAME}/a.png") == "image_url_refused"


async def test_names_are_resolved_in_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()

    def getaddrinfo(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        threads.append(threading.current_thread().name)
        return [(0, 0, 0, "", ("8.8.8.8", port))] * 2

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    assert await resolve_host(NAME, 443) == ["8.8.8.8"] and threads[0].startswith("image-dns")


async def test_names_are_resolved_and_matched_in_their_ascii_form() -> None:
    asked = list[str]()

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["10.0.0.1"]

    reader = HttpsFetcher(AllowedHosts(("xn--bcher-kva.example",)), resolve=resolve, trust=trusting())
    assert await refusal(reader, "https://b\u00fccher.example/a.png") == "image_url_refused"
    assert asked == ["xn--bcher-kva.example"]


@pytest.mark.parametrize(("entries", "allowed"), [((NAME,), False), (("*",), False), (("8.8.8.0/24",), True)])
def test_names_allow_one_port(entries: tuple[str, ...], allowed: bool) -> None:
    assert AllowedHosts(entries).allow(NAME, ipaddress.ip_address("8.8.8.8"), 8443) is allowed


@pytest.mark.parametrize("head", ["404 Not Found\r\ncontent-length: 0", "200 OK\r\ncontent-length: 9", "no HTTP"])
async def test_failures_have_one_message(tmp_path: Path, head: str) -> None:
    async with answering(tmp_path, head) as port:
        with pytest.raises(ImageRefused, match=r"^x: the image cannot be read from its host within 20 s$"):
            await fetcher().fetch(f"https://{NAME}:{port}/", MAX_BYTES, "x")


@pytest.mark.parametrize(
    ("entries", "host", "address", "expected"),
    [
        (("*",), "a.b", "8.8.8.8", True),
        (("*.b",), "a.b", "8.8.8.8", True),
        (("*.b",), "b", "8.8.8.8", False),
        (("a.b",), "A.b.", "8.8.8.8", True),
        (("10.0.0.0/8",), "a.b", "10.1.1.1", True),
        (("10.0.0.0/8",), "a.b", "8.8.8.8", False),
        (("*", "10.0.0.0/8"), "a.b", "11.0.0.1", True),
        (("*", "10.0.0.0/8"), "a.b", "192.168.0.1", False),
        (("169.254.169.254",), "a.b", "169.254.169.254", True),
    ],
)
def test_entries_allow_hosts(entries: tuple[str, ...], host: str, address: str, expected: bool) -> None:
    assert AllowedHosts(entries).allow(host, ipaddress.ip_address(address)) is expected


@pytest.mark.parametrize(
    "url", ["https://user@images.example/", "https://", "https://[", "https://a.example:99999/", "https://\x00/"]
)
async def test_broken_urls_are_refused(url: str) -> None:
    assert await refusal(fetcher(AllowedHosts((NAME,))), url) in ("image_url_refused", "image_unavailable")
