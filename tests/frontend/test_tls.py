"""Certificates of servers: loaded again on change, kept if the new one is unusable."""

import asyncio
import datetime
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtensionOID, NameOID
from prometheus_client import CollectorRegistry, generate_latest

from phalanx_api.tls.certificates import CertificateUnusable
from phalanx_frontend.metrics import CertificateMetrics
from phalanx_frontend.tls import Certificate, CertificateFiles, unverified_context
from tests.certificates import Issued, issue, mount, mount_certificate, served_certificate

FIRST, SECOND = issue("chat.example"), issue("chat.example")
EXPIRED = issue("chat.example", ends_in_s=-1.0)


def encrypted(key: str) -> str:
    private = load_pem_private_key(key.encode(), None)
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")).decode()


UNUSABLE = {
    "not a certificate": (Issued("nothing", FIRST.key), "tls.crt"),
    "truncated": (Issued(SECOND.certificate[:200], SECOND.key), "tls.crt"),
    "not a key": (Issued(FIRST.certificate, "nothing"), "tls.key"),
    "the key of another certificate": (Issued(SECOND.certificate, FIRST.key), "not the key of the certificate"),
    "a key with a password": (Issued(SECOND.certificate, encrypted(SECOND.key)), "tls.key"),
    "no key": (Issued(SECOND.certificate, ""), "tls.key"),
}


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    mount_certificate(tmp_path, FIRST)
    return Certificate(CertificateFiles.in_folder(tmp_path))


@asynccontextmanager
async def echoing(certificate: Certificate) -> AsyncIterator[int]:
    """Port of a server that sends back each line."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=certificate.context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def presented(port: int) -> bytes:
    return await asyncio.to_thread(served_certificate, "127.0.0.1", port)


async def test_open_connection_continues_after_a_reload(certificate: Certificate, tmp_path: Path) -> None:
    following = asyncio.create_task(certificate.follow(every_s=0.01))
    async with echoing(certificate) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=unverified_context(), server_hostname="")
        former = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        mount_certificate(tmp_path, SECOND)
        async with asyncio.timeout(10):
            while await presented(port) != SECOND.der:
                await asyncio.sleep(0.01)
        writer.write(b"still here\n")
        assert await reader.readline() == b"still here\n"
        assert former == FIRST.der
        writer.close()
        await writer.wait_closed()
    following.cancel()
    assert certificate.failure == ""


async def test_clients_that_verify_the_name_accept_the_certificate(certificate: Certificate) -> None:
    context = ssl.create_default_context(cadata=FIRST.certificate)
    async with echoing(certificate) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="chat.example")
        writer.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="other.example")


@pytest.mark.parametrize(("issued", "words"), UNUSABLE.values(), ids=UNUSABLE.keys())
async def test_unusable_new_certificate_keeps_the_former_one(
    certificate: Certificate, tmp_path: Path, issued: Issued, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    CertificateMetrics(registry, {"clients": certificate})
    assert b'phalanx_tls_certificate_reload_failed{purpose="clients"} 0.0' in generate_latest(registry)
    mount_certificate(tmp_path, issued)
    certificate.refresh()
    assert words in certificate.failure
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert b'phalanx_tls_certificate_reload_failed{purpose="clients"} 1.0' in generate_latest(registry)
    async with echoing(certificate) as port:
        assert await presented(port) == FIRST.der
        mount_certificate(tmp_path, SECOND)
        certificate.refresh()
        assert await presented(port) == SECOND.der
    assert b'phalanx_tls_certificate_reload_failed{purpose="clients"} 0.0' in generate_latest(registry)


@pytest.mark.parametrize(("issued", "words"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_unusable_first_certificate_is_refused(tmp_path: Path, issued: Issued, words: str) -> None:
    mount_certificate(tmp_path, issued)
    with pytest.raises(CertificateUnusable, match=words):
        Certificate(CertificateFiles.in_folder(tmp_path))


def test_expired_new_certificate_is_not_used(certificate: Certificate, tmp_path: Path) -> None:
    mount_certificate(tmp_path, EXPIRED)
    certificate.refresh()
    assert "expired" in certificate.failure and certificate.current.not_after_s > time.time()


def test_early_new_certificate_is_used_once_it_is_valid(tmp_path: Path) -> None:
    now = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC).timestamp()
    mount_certificate(tmp_path, FIRST)
    certificate = Certificate(CertificateFiles.in_folder(tmp_path), lambda: now)
    former = certificate.current
    mount_certificate(tmp_path, issue("chat.example", starts_at="2030-01-01T00:01:00Z"))
    certificate.refresh()
    assert "is not valid before 2030-01-01T00:01:00Z" in certificate.failure and certificate.current is former
    now += 60
    certificate.refresh()
    assert certificate.failure == "" and certificate.current is not former


def test_removed_files_keep_the_certificate(certificate: Certificate, tmp_path: Path) -> None:
    mount(tmp_path, {})
    certificate.refresh()
    assert "cannot be read" in certificate.failure and certificate.current.not_after_s > time.time()


def test_unchanged_files_are_not_loaded_again(certificate: Certificate) -> None:
    former = certificate.current
    certificate.refresh()
    assert certificate.current is former


def test_metrics_show_the_lifetime(certificate: Certificate) -> None:
    registry = CollectorRegistry()
    CertificateMetrics(registry, {"clients": certificate})
    start, end = (
        registry.get_sample_value(f"phalanx_tls_certificate_{name}_timestamp_seconds", {"purpose": "clients"})
        for name in ("not_before", "not_after")
    )
    assert start is not None and end is not None
    assert start < time.time() < end == certificate.current.not_after_s


def test_unreadable_extension_ends_no_server(certificate: Certificate, tmp_path: Path) -> None:
    """An address of five bytes in the names of a certificate whose chain and key are valid."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "chat.example")]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(now - datetime.timedelta(minutes=1)).not_valid_after(now + datetime.timedelta(days=1))
    broken = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, bytes.fromhex("300787050102030405"))
    made = builder.add_extension(broken, critical=False).sign(key, hashes.SHA256())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    mount_certificate(tmp_path, Issued(made.public_bytes(Encoding.PEM).decode(), pem))
    certificate.refresh()
    assert (certificate.current.name, certificate.failure) == ("", "")
