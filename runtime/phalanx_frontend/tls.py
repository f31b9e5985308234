"""Certificates of a process, from the files of a mounted Secret, loaded again when they change.

A new certificate applies to new connections; open ones continue with theirs. A certificate that cannot be used changes nothing.
With an authority, both ends of a connection prove a certificate of it. The client checks the role of the server by its name, the
server that of the client by `peer_role`.
"""

import asyncio
import datetime
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from phalanx_api import labels
from phalanx_api.tls.certificates import CertificateUnusable, NotValidNow, check_validity, read_certificate

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 2.0
"""A kubelet updates a mounted Secret within a minute."""
Peer = ssl.SSLSocket | ssl.SSLObject


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: a certificate followed by its intermediates, and its key without a password."""

    certificate: Path
    key: Path
    authority: Path | None = None
    """Authorities, one of which must have issued the certificate of a peer; null: clients need no certificate."""

    @classmethod
    def in_folder(cls, folder: Path, *, is_mutual: bool = False) -> "CertificateFiles":
        """The files of a mounted Secret of type kubernetes.io/tls."""
        authority = folder / labels.TLS_AUTHORITY if is_mutual else None
        return cls(folder / labels.TLS_CERTIFICATE, folder / labels.TLS_KEY, authority)

    @property
    def paths(self) -> list[Path]:
        """All of them."""
        return [self.certificate, self.key, *([self.authority] if self.authority else [])]

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Returns values that change with the files or the targets of their links."""
        return tuple(_stamp(path) for path in self.paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCertificate:
    """A certificate with its key. Times are Unix times."""

    server: ssl.SSLContext
    client: ssl.SSLContext | None
    """Of connections to other pods; null without an authority."""
    leaf: x509.Certificate
    name: str
    """Its first DNS name; empty without one."""
    not_before_s: float
    not_after_s: float


def load_certificate(files: CertificateFiles) -> LoadedCertificate:
    """Loads a certificate, also one that is not valid now. Raises CertificateUnusable."""
    contents = [_read(path) for path in files.paths]
    leaf = read_certificate(contents[0], contents[1], str(files.certificate), str(files.key))
    try:
        server, client = _server_context(files), None
        if files.authority is not None:
            client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _use(client, files)
    except OSError as error:  # also an ssl.SSLError, and a file that was removed since it was read
        why = getattr(error, "reason", None) or error.strerror or str(error)
        names = " and ".join(map(str, files.paths))
        raise CertificateUnusable(f"{names} cannot be used: {why}") from error
    return LoadedCertificate(
        server=server,
        client=client,
        leaf=leaf,
        name=_first_name(leaf),
        not_before_s=leaf.not_valid_before_utc.timestamp(),
        not_after_s=leaf.not_valid_after_utc.timestamp(),
    )


def _server_context(files: CertificateFiles, *, is_outer: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    if files.authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_TICKET  # a resumed session would prove no certificate
        context.num_tickets = 0
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not is_outer:
        _use(context, files)
    return context


def _use(context: ssl.SSLContext, files: CertificateFiles) -> None:
    context.load_cert_chain(files.certificate, files.key, password="")  # without one, OpenSSL asks the terminal
    if files.authority is not None:
        context.load_verify_locations(files.authority)


def _first_name(leaf: x509.Certificate) -> str:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):  # the last: an extension cannot be read
        return ""
    return next(iter(names.get_values_for_type(x509.DNSName)), "")


class Certificate:
    """The certificate of a process. `context` is that of its servers; it never changes."""

    def __init__(self, files: CertificateFiles, now: Callable[[], float] = time.time) -> None:
        """Raises CertificateUnusable."""
        self._files = files
        self._now = now
        self._loading = threading.Lock()
        self._stamp = files.stamp()
        self.current = load_certificate(files)
        self.failure = ""
        """Why the files, which have changed, are not used."""
        self.context = _server_context(files, is_outer=True)
        self.context.sni_callback = self._choose

    def _choose(self, connection: Peer, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL calls it in each handshake, also if the client names no server."""
        connection.context = self.current.server

    def peer_name(self, role: str) -> str:
        """Returns the name in the certificate of another role of this service."""
        return f"{role}.{self.current.name.partition('.')[2]}"

    @property
    def client_context(self) -> ssl.SSLContext:
        """Context of connections to other pods."""
        assert self.current.client is not None, "only certificates with an authority are proved to other pods"
        return self.current.client

    async def follow(self, every_s: float = POLL_INTERVAL_S) -> None:
        """Loads changed files, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.refresh()

    def refresh(self) -> None:
        """Loads the files if they have changed; thread-safe. Unusable files are tried again once they change or are valid."""
        with self._loading:
            self._refresh()

    def _refresh(self) -> None:
        is_early = False
        while (stamp := self._files.stamp()) != self._stamp:  # a Secret may be replaced between its files
            self._stamp, former = stamp, self.failure
            try:
                loaded = load_certificate(self._files)
                now = datetime.datetime.fromtimestamp(self._now(), datetime.UTC)
                check_validity(loaded.leaf, now, str(self._files.certificate))
            except CertificateUnusable as error:
                self.failure = str(error)
                is_early = isinstance(error, NotValidNow) and not error.is_expired
            else:
                self.current, self.failure, is_early = loaded, "", False
            if self._files.stamp() == stamp and (not self.failure or self.failure != former):
                self._report()
        if is_early:  # the same files are used later
            self._stamp = ()

    def _report(self) -> None:
        if self.failure:
            log.error("the former certificate is kept: the new one is unusable", extra={"why": self.failure})
        else:
            log.info("certificate loaded again", extra={"file": str(self._files.certificate)})


def peer_role(connection: Peer | None) -> str:
    """Returns the role that the verified certificate of the other end names; empty without one."""
    found = connection.getpeercert(binary_form=True) if connection is not None else None
    return _first_name(x509.load_der_x509_certificate(found)).partition(".")[0] if found else ""


def client_arguments(certificate: Certificate | None, role: str, *, is_https: bool = False) -> dict[str, Any]:
    """Returns arguments of a connection to a pod of this role, for asyncio and for libraries with its names; empty for TCP.

    With a certificate both ends prove theirs; `is_https`: else by TLS, without verification.
    """
    if certificate is not None:
        return {"ssl": certificate.client_context, "server_hostname": certificate.peer_name(role)}
    return {"ssl": unverified_context()} if is_https else {}


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
