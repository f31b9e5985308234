"""Certificates of a test's own authority, and folders that change as a kubelet changes a mounted Secret."""

import base64
import datetime
import itertools
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from phalanx_api import labels
from phalanx_frontend.tls import Certificate, CertificateFiles
from phalanx_operator.apply import issuing

_START = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
"""Before the times of worlds."""
Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
_versions = itertools.count()


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, PEM."""

    certificate: str
    key: str

    @property
    def der(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self.certificate)

    @property
    def secret_data(self) -> dict[str, str]:
        """`data` of a Secret of type kubernetes.io/tls."""
        files = {"tls.crt": self.certificate, "tls.key": self.key}
        return {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}


def issue(*names: str, ends_in_s: float = 86_400.0, ends_at: str = "", starts_at: str = "", key: Key | None = None) -> Issued:
    """Returns a self-signed certificate for DNS names; `ends_in_s` may be negative, the others are times of RFC 3339."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ends_in_s)
    end = datetime.datetime.fromisoformat(ends_at) if ends_at else end
    start = _START
    if starts_at:
        start = datetime.datetime.fromisoformat(starts_at)
        end = start + datetime.timedelta(seconds=ends_in_s)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return Issued(certificate.public_bytes(Encoding.PEM).decode(), private)


def mount(folder: Path, files: dict[str, str]) -> None:
    """Replaces the files at once, by a link to a new folder, as a kubelet does."""
    version = folder / f"..{next(_versions)}"
    version.mkdir(parents=True)
    for name, text in files.items():
        (version / name).write_text(text)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..new").symlink_to(version.name)
    os.replace(folder / "..new", folder / "..data")


def mount_certificate(folder: Path, issued: Issued) -> None:
    """Mounts a Secret of type kubernetes.io/tls."""
    mount(folder, {"tls.crt": issued.certificate, "tls.key": issued.key})


def served_certificate(host: str, port: int) -> bytes:
    """Returns the certificate that a server presents to a new connection, DER."""
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, port), timeout=10))


class Authority:
    """Issues certificates of a service as the operator does."""

    def __init__(self, service: str = "chat", namespace: str = "team") -> None:
        self._service, self._namespace = service, namespace
        self.pairs = [issuing.make_authority(service, datetime.datetime.now(datetime.UTC))]

    def mount(self, folder: Path, role: str, issued_by: int = 0) -> Path:
        """Mounts a new certificate of a role; `issued_by` numbers the authorities, the newest first."""
        name = labels.peer_name(role, self._service, self._namespace)
        pair = issuing.issue(self.pairs[issued_by], name, datetime.datetime.now(datetime.UTC))
        mount(folder, {"tls.crt": pair.pem, "tls.key": pair.key_pem, "ca.crt": issuing.trusted_pem(self.pairs)})
        return folder

    def certificate(self, folder: Path, role: str) -> Certificate:
        """Returns a mounted certificate."""
        return Certificate(CertificateFiles.in_folder(self.mount(folder, role), is_mutual=True))

    def add(self) -> None:
        """Adds a newer authority."""
        self.pairs.insert(0, issuing.make_authority(self._service, datetime.datetime.now(datetime.UTC)))

    @property
    def secret_data(self) -> dict[str, str]:
        """`data` of the Secret of the authority."""
        files = {"ca.crt": issuing.trusted_pem(self.pairs), "ca.key": "".join(pair.key_pem for pair in self.pairs)}
        return {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
