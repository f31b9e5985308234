"""Reads the certificate of `spec.router.tls`: the operator may read a Secret by name, and watches none."""

import base64
import binascii
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx_api import labels
from phalanx_api.conditions import Reason
from phalanx_api.spec.inference_service import InferenceService
from phalanx_api.tls.certificates import CertificateUnusable, NotValidNow, check_validity, read_certificate
from phalanx_operator.decide.state.snapshot import ObservedCertificate, parse_time
from phalanx_operator.kube.client import SECRETS, Gone, KubeClient, KubeError
from phalanx_operator.kube.store import Key

log = logging.getLogger(__name__)
REREAD_S = 30.0


@dataclass(frozen=True, slots=True)
class _Reading:
    secret: str
    at_s: float
    data: Mapping[str, Any] | None
    """Null if there is no such Secret."""


class RouterCertificates:
    """Reads each Secret at most once per `REREAD_S`."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._readings: dict[Key, _Reading] = {}

    async def read(self, service: InferenceService, now: str) -> ObservedCertificate | None:
        """Returns the judged certificate; null without the field, and if this read of the Secret fails."""
        key, tls = (service.namespace, service.name), service.spec.router.tls
        if tls is None:
            self.forget(key)
            return None
        former, now_s = self._readings.get(key), self._clock()
        if former is None or former.secret != tls.secret_name or now_s - former.at_s >= REREAD_S:
            try:
                secret = await self._client.get(SECRETS, service.namespace, tls.secret_name)
                former = _Reading(tls.secret_name, now_s, secret.get("data") or {})
            except Gone:
                former = _Reading(tls.secret_name, now_s, None)
            except KubeError as error:
                log.warning("certificate not read", extra={"service": "/".join(key), "why": str(error)})
                return None
            self._readings[key] = former
        return judge(former.secret, former.data, now)

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self._readings.pop(key, None)


def judge(secret: str, data: Mapping[str, Any] | None, now: str) -> ObservedCertificate:
    """Returns whether routers can serve with the data of a Secret."""
    if data is None:
        return ObservedCertificate(Reason.NOT_FOUND, f"there is no Secret {secret}")
    missing = [name for name in (labels.TLS_CERTIFICATE, labels.TLS_KEY) if not data.get(name)]
    if missing:
        return ObservedCertificate(Reason.INVALID_CERTIFICATE, f"the Secret {secret} has no {' and no '.join(missing)}")
    certificate, key = (_decoded(data[name]) for name in (labels.TLS_CERTIFICATE, labels.TLS_KEY))
    certificate_name, key_name = (f"{name} of the Secret {secret}" for name in (labels.TLS_CERTIFICATE, labels.TLS_KEY))
    try:
        leaf = read_certificate(certificate, key, certificate_name, key_name)
        _check_served(certificate, key, f"the certificate in the Secret {secret}")
        if (moment := parse_time(now)) is not None:
            check_validity(leaf, moment, f"the certificate in the Secret {secret}")
    except NotValidNow as error:
        reason = Reason.EXPIRED if error.is_expired else Reason.INVALID_CERTIFICATE
        return ObservedCertificate(reason, str(error))
    except CertificateUnusable as error:
        return ObservedCertificate(Reason.INVALID_CERTIFICATE, str(error))
    return ObservedCertificate(Reason.VALID, f"it expires at {leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}")


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Loads a certificate with its intermediates, and its key. Raises OSError, which `ssl.SSLError` is.

    Python loads them from files only; these are in memory.
    """
    with _file(certificate) as certificate_file, _file(key) as key_file:
        context.load_cert_chain(certificate_file, key_file, password="")  # without one, OpenSSL asks the terminal


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    with os.fdopen(os.memfd_create("certificate", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _check_served(certificate: bytes, key: bytes, name: str) -> None:
    """Raises CertificateUnusable if `ssl` refuses the certificate, its key or an intermediate. name: for the message.

    The version and the settings of OpenSSL are those of this process; routers have another image.
    """
    try:
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
    except ssl.SSLError as error:
        raise CertificateUnusable(f"{name} cannot be served: {error.reason or error}") from error


def _decoded(text: str) -> bytes:
    """Returns what no file is if the text is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return b""
