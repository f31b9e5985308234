"""Addresses of model sources: private ones only by the operator's setting, at every connection and redirect."""

import ipaddress
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.labels import ENV_PRIVATE_SOURCES
from phalanx_api.network.addresses import is_public
from phalanx_runtime.checkpoint.locate import locate
from phalanx_runtime.checkpoint.sources.addresses import CheckedTransport, PrivateSources, Resolve
from phalanx_runtime.errors import ModelError
from tests.runtime.checkpoint.hub import FILES, NAME, HubHandler, HubServer, running_hub
from tests.runtime.checkpoint.store_kinds import FILES as STORE_FILES
from tests.runtime.checkpoint.store_kinds import Kind, for_stores

PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
    *("100.100.100.200", "168.63.129.16", "192.0.0.192", "224.0.0.1", "255.255.255.255", "198.18.0.1", "240.0.0.1"),
    *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
    *("fec0::1", "::10.0.0.1", "64:ff9b:1::a00:1", "::ffff:10.0.0.1", "2002:a00:1::1", "64:ff9b::10.0.0.1"),
]
PUBLIC = ["1.1.1.1", "8.8.8.8", "172.15.255.255", "172.32.0.0", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1"]
METADATA = "169.254.169.254"


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_internet_addresses_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@given(
    st.sampled_from([address for address in PRIVATE if ":" not in address]),
    st.sampled_from(["::ffff:0:0", "64:ff9b::", "2002::"]),
)
def test_no_ipv6_form_hides_a_private_address(text: str, prefix: str) -> None:
    number = int(ipaddress.IPv4Address(text))
    address = ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) | (number << 80 if prefix == "2002::" else number))
    assert not is_public(address)
    assert not PrivateSources(("other",)).allow("host", address)
    assert PrivateSources((f"{text}/32",)).allow("host", address)


@pytest.mark.parametrize(
    ("entries", "host", "address", "is_allowed"),
    [
        (None, "x", METADATA, True),
        ((), "x", "8.8.8.8", True),
        ((), "x", "10.0.0.1", False),
        (("minio.store",), "minio.store", "10.0.0.1", True),
        (("minio.store",), "MinIO.store.", "10.0.0.1", True),
        (("minio.store",), "a.minio.store", "10.0.0.1", False),
        (("*.store",), "minio.store", "10.0.0.1", True),
        (("*.store",), "store", "10.0.0.1", False),
        (("*.store",), "evilstore", "10.0.0.1", False),
        (("10.0.0.0/8",), "any", "10.9.9.9", True),
        (("10.0.0.0/8",), "any", "192.168.0.1", False),
        (("10.0.0.1",), "10.0.0.1", "10.0.0.1", True),
        (("fd00::/8",), "any", "fd12::1", True),
        (("*",), "any", "127.0.0.1", True),
        (("*",), "any", METADATA, False),
        (("metadata.google.internal",), "metadata.google.internal", METADATA, False),
        ((METADATA,), "any", METADATA, True),
        (("169.254.0.0/16",), "any", METADATA, True),
        (("*",), "any", "168.63.129.16", False),
    ],
)
def test_setting_allows_private_hosts(entries: tuple[str, ...] | None, host: str, address: str, is_allowed: bool) -> None:
    assert PrivateSources(entries).allow(host, ipaddress.ip_address(address)) is is_allowed


# Downloads


@for_stores()
def test_a_store_in_the_cluster_must_be_listed(kind: Kind) -> None:
    kind.put(STORE_FILES)
    kind.set(ENV_PRIVATE_SOURCES, "")
    with pytest.raises(ModelError, match=r"127\.0\.0\.1 has a private address.*PHALANX_PRIVATE_SOURCES \(privateModelSources"):
        kind.locate()
    assert not kind.store.requests
    kind.set(ENV_PRIVATE_SOURCES, "minio.store,127.0.0.1")
    assert (kind.locate().dir / "config.json").exists()


def test_redirects_are_checked_too(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add(NAME, FILES)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv(ENV_PRIVATE_SOURCES, "127.0.0.1")
    with running_hub("127.0.0.2") as inside:
        server.redirect_to = inside.endpoint
        with pytest.raises(ModelError, match=r"127\.0\.0\.2 has a private address"):
            locate(f"hf://{NAME}", cache_dir=tmp_path)
        assert server.requests and not inside.requests


def test_a_name_that_changes_its_address_is_refused(server: HubServer) -> None:
    """A connection goes to the address that was checked, so a second answer of the resolver opens none unchecked."""
    port = httpx.URL(server.endpoint).port
    answers = [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2", "127.0.0.1"]]
    with client_of(lambda host, port: answers.pop(0), "127.0.0.1") as client:
        url = f"http://rebinding.example:{port}/x"
        assert client.get(url).status_code == 404
        with pytest.raises(ModelError, match=r"rebinding\.example \(127\.0\.0\.2\) has a private address"):
            client.get(url)
        assert client.get(url).status_code == 404, "another address of the name is allowed"
    assert len(server.requests) == 2 and not answers


@contextmanager
def client_of(resolve: Resolve, *entries: str) -> Iterator[httpx.Client]:
    with closing(CheckedTransport(PrivateSources(entries), resolve)) as transport, httpx.Client(transport=transport) as client:
        yield client


def test_unknown_name_is_a_connection_error() -> None:
    def fail(host: str, port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    with client_of(fail) as client, pytest.raises(httpx.ConnectError, match="Name or service not known"):
        client.get("http://nowhere.example/")


def test_next_address_is_tried_after_a_failure(server: HubServer) -> None:
    port = httpx.URL(server.endpoint).port
    with client_of(lambda host, port: ["127.0.0.3", "127.0.0.1"], "*") as client:
        assert client.get(f"http://two.example:{port}/x").status_code == 404


def test_next_address_is_tried_after_a_timeout(server: HubServer) -> None:
    port = httpx.URL(server.endpoint).port
    assert port is not None
    with socket.create_server(("127.0.0.3", port), backlog=0) as full, socket.socket() as waiting:
        waiting.connect(full.getsockname())  # the kernel ignores further connections
        url = f"http://two.example:{port}/x"
        with client_of(lambda host, port: ["127.0.0.3"], "*") as client, pytest.raises(httpx.ConnectTimeout):
            client.get(url, timeout=0.05)
        with client_of(lambda host, port: ["127.0.0.3", "127.0.0.1"], "*") as client:
            assert client.get(url, timeout=httpx.Timeout(10, connect=0.05)).status_code == 404


def test_threads_share_the_connections_of_a_host(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[httpx.HTTPTransport] = []

    class CountedTransport(httpx.HTTPTransport):
        def __init__(self, proxy: None = None) -> None:
            made.append(self)
            super().__init__(proxy=proxy)

    monkeypatch.setattr(httpx, "HTTPTransport", CountedTransport)
    barrier = threading.Barrier(8)

    def resolve(host: str, port: int) -> list[str]:
        barrier.wait()
        return ["127.0.0.1"]

    url = f"http://one.example:{httpx.URL(server.endpoint).port}/x"
    with client_of(resolve, "*") as client, ThreadPoolExecutor(8) as threads:
        assert {answer.status_code for answer in threads.map(client.get, [url] * 8)} == {404}
    assert len(made) == 1


def test_certificate_is_verified_for_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"),
            *("-subj", "/CN=models.example", "-addext", "subjectAltName=DNS:models.example"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"hub": HubServer()})) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with client_of(lambda host, port: ["127.0.0.1"], "*") as client:
                assert client.get(f"https://models.example:{server.server_port}/x").status_code == 404
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    client.get(f"https://other.example:{server.server_port}/x")
        finally:
            server.shutdown()
            thread.join()


def test_proxy_gets_no_address_that_is_refused(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.endpoint)
    with client_of(lambda host, port: []) as client:
        assert client.get("http://models.example/x").status_code == 404
        for host in (METADATA, "metadata.google.internal", "10.0.0.1"):
            with pytest.raises(ModelError, match="private address"):
                client.get(f"http://{host}/x")
