"""Whether a certificate and its key can be served: the rules of the operator for a Secret and of processes for mounted files."""

import datetime

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

MIN_RSA_BITS = 2048
"""Python's `ssl` refuses shorter keys by default."""


class CertificateUnusable(Exception):
    """The message names the file or the Secret, and the reason."""


class NotValidNow(CertificateUnusable):
    """The certificate has expired, or its validity starts later."""

    def __init__(self, why: str, *, is_expired: bool) -> None:
        super().__init__(why)
        self.is_expired = is_expired


def read_certificate(certificate: bytes, key: bytes, certificate_name: str, key_name: str) -> x509.Certificate:
    """Returns the first certificate of a PEM file, whose key the other file holds. Raises CertificateUnusable with the names."""
    try:
        leaf = x509.load_pem_x509_certificates(certificate)[0]
    except ValueError as error:
        raise CertificateUnusable(f"{certificate_name} is no certificate") from error
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CertificateUnusable(f"{key_name} is not a key without a password") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        public = leaf.public_key()
        is_its_key = private.public_key().public_bytes(*form) == public.public_bytes(*form)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateUnusable(f"{certificate_name} has a key of an unknown kind") from error
    if not is_its_key:
        raise CertificateUnusable(f"{key_name} is not the key of the certificate")
    if isinstance(public, rsa.RSAPublicKey) and public.key_size < MIN_RSA_BITS:
        raise CertificateUnusable(f"{key_name} has {public.key_size} bits; RSA needs {MIN_RSA_BITS} or more")
    return leaf


def check_validity(leaf: x509.Certificate, now: datetime.datetime, name: str) -> None:
    """Raises NotValidNow before the start and from the end of the validity. name: of the certificate, in the message."""
    start, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if end <= now:
        raise NotValidNow(f"{name} expired at {end:%Y-%m-%dT%H:%M:%SZ}", is_expired=True)
    if now < start:
        raise NotValidNow(f"{name} is not valid before {start:%Y-%m-%dT%H:%M:%SZ}", is_expired=False)
