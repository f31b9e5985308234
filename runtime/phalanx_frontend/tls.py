"""Certificates of TLS servers, from the files of a mounted Secret, loaded again when they change.

A new certificate applies to new connections; open ones continue with theirs. A certificate that cannot be used changes nothing.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from phalanx_api import labels

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
"""A kubelet updates a mounted Secret within a minute."""


class CertificateUnusable(Exception):
    """The message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: a certificate followed by its intermediates, and its key without a password."""

    certificate: Path
    key: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "CertificateFiles":
        """The files of a mounted Secret of type kubernetes.io/tls."""
        return cls(folder / labels.TLS_CERTIFICATE, folder / labels.TLS_KEY)

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Returns values that change with the files or the targets of their links."""
        return tuple(_stamp(path) for path in (self.certificate, self.key))


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """A certificate with its key. Times are Unix times."""

    context: ssl.SSLContext
    not_before_s: float
    not_after_s: float


def load_certificate(files: CertificateFiles) -> LoadedCertificate:
    """Loads a certificate for a server. Raises CertificateUnusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    for path in (files.certificate, files.key):
        _read(path)
    try:
        context.load_cert_chain(files.certificate, files.key, password="")  # without one, OpenSSL asks the terminal
        leaf = x509.load_pem_x509_certificates(_read(files.certificate))[0]
    except ssl.SSLError as error:
        why = error.reason or str(error)
        raise CertificateUnusable(f"{files.certificate} and {files.key} are not a certificate and its key: {why}") from error
    except ValueError as error:
        raise CertificateUnusable(f"{files.certificate} holds no certificate: {error}") from error
    return LoadedCertificate(context, leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp())


class ServerCertificate:
    """The certificate that a server presents. `context` is the server's; it never changes."""

    def __init__(self, files: CertificateFiles, now: Callable[[], float] = time.time) -> None:
        """Raises CertificateUnusable."""
        self._files = files
        self._now = now
        self._stamp = files.stamp()
        self.current = load_certificate(files)
        self.failure = ""
        """Why the files, which have changed, are not used."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL calls it in each handshake, also if the client names no server."""
        connection.context = self.current.context

    async def follow(self, every_s: float = POLL_INTERVAL_S) -> None:
        """Loads changed files, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.refresh()

    def refresh(self) -> None:
        """Loads the files if they have changed. Unusable files are tried again after their next change."""
        while (stamp := self._files.stamp()) != self._stamp:  # a Secret may be replaced between its two files
            self._stamp = stamp
            try:
                loaded = load_certificate(self._files)
                if loaded.not_after_s <= self._now():
                    raise CertificateUnusable(f"{self._files.certificate} has expired")
            except CertificateUnusable as error:
                self.failure = str(error)
            else:
                self.current, self.failure = loaded, ""
            if self._files.stamp() == stamp:
                self._report()

    def _report(self) -> None:
        if self.failure:
            log.error("the former certificate is kept: the new one is unusable", extra={"why": self.failure})
        else:
            log.info("certificate loaded again", extra={"file": str(self._files.certificate)})


def unverified_context() -> ssl.SSLContext:
    """Context of a client that reaches a server by an address that its certificate does not name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateUnusable(f"{path} cannot be read: {error.strerror}") from error


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
