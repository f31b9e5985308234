"""Issues the certificates of a service: an authority of its own, and a certificate for each role.

A certificate is due at `RENEWED_AT` of its lifetime. A new authority is trusted at once and signs after `SPREAD`, when every pod
trusts it; the former one is trusted until it ends, because certificates that it signed are still in use.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFETIME = datetime.timedelta(days=90)
LIFETIME = datetime.timedelta(days=7)
"""Of a role's certificate. The operator may be away for half of it, which is longer than a weekend."""
RENEWED_AT = 1 / 2
SPREAD = datetime.timedelta(minutes=10)
"""Longer than a kubelet and a pod need to load a changed Secret."""
SKEW = datetime.timedelta(minutes=5)
"""Difference between clocks of nodes."""
_MARK = b"-----END"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> str:
        """The certificate."""
        return self.certificate.public_bytes(Encoding.PEM).decode()

    @property
    def key_pem(self) -> str:
        """The key, without a password."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def make_authority(service: str, now: datetime.datetime) -> Pair:
    """Returns a new authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Phalanx service {service}"[:64])])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(name, name, key, now, now + AUTHORITY_LIFETIME)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Pair(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Pair, name: str, now: datetime.datetime) -> Pair:
    """Returns a certificate for servers and clients with this DNS name. It ends before its authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name.partition(".")[0])])
    end = min(now + LIFETIME, authority.certificate.not_valid_after_utc)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    identifier = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = _builder(subject, authority.certificate.subject, key, now, end)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(usage, critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    builder = builder.add_extension(issuer, critical=False)
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, start: datetime.datetime, end: datetime.datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(start - SKEW).not_valid_after(end)


def read_pairs(certificates: bytes, keys: bytes) -> list[Pair]:
    """Returns the pairs in two PEM files, in their order; nothing if they are not such files."""
    try:
        found = x509.load_pem_x509_certificates(certificates)
        private = [load_pem_private_key(text, password=None) for text in _blocks(keys)]
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return []
    if len(found) != len(private):
        return []
    both = zip(found, private, strict=True)
    pairs = [Pair(certificate, key) for certificate, key in both if isinstance(key, ec.EllipticCurvePrivateKey)]
    return [pair for pair in pairs if pair.key.public_key() == pair.certificate.public_key()]


def _blocks(text: bytes) -> list[bytes]:
    parts = text.split(_MARK)
    return [part[part.index(b"-----BEGIN") :] + _MARK + b" PRIVATE KEY-----\n" for part in parts[:-1]]


def renew_authorities(authorities: Sequence[Pair], service: str, now: datetime.datetime) -> list[Pair]:
    """Returns the authorities to trust, the newest first: without those that ended, and with a new one if it is due."""
    valid = [pair for pair in authorities if pair.certificate.not_valid_after_utc > now]
    if not valid or is_due(valid[0].certificate, now):
        valid.insert(0, make_authority(service, now))
    return valid


def signing_authority(authorities: Sequence[Pair], now: datetime.datetime) -> Pair:
    """Returns the newest authority that all pods trust; the oldest if there is none yet."""
    spread = [pair for pair in authorities if pair.certificate.not_valid_before_utc + SKEW + SPREAD <= now]
    return spread[0] if spread else authorities[-1]


def is_due(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    """Returns whether a certificate has to be renewed."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now >= start + RENEWED_AT * (end - start)


def is_issued_by(certificate: x509.Certificate, authorities: Sequence[Pair]) -> bool:
    """Returns whether one of the authorities issued it."""
    for pair in authorities:
        try:
            certificate.verify_directly_issued_by(pair.certificate)
            return True
        except (ValueError, TypeError, InvalidSignature):
            continue
    return False


def trusted_pem(authorities: Sequence[Pair]) -> str:
    """Returns the certificates of the authorities."""
    return "".join(pair.pem for pair in authorities)
