"""Reads the certificate of `spec.router.tls`: the operator may read a Secret by name, and watches none."""

import base64
import binascii
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from phalanx_api import labels
from phalanx_api.conditions import Reason
from phalanx_api.spec.inference_service import InferenceService
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
    try:
        leaf = x509.load_pem_x509_certificates(base64.b64decode(data[labels.TLS_CERTIFICATE], validate=True))[0]
    except (ValueError, binascii.Error):
        return ObservedCertificate(
            Reason.INVALID_CERTIFICATE, f"{labels.TLS_CERTIFICATE} of the Secret {secret} is no certificate"
        )
    try:
        key = load_pem_private_key(base64.b64decode(data[labels.TLS_KEY], validate=True), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm, binascii.Error):
        why = f"{labels.TLS_KEY} of the Secret {secret} is not a key without a password"
        return ObservedCertificate(Reason.INVALID_CERTIFICATE, why)
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    try:
        is_its_key = key.public_key().public_bytes(*form) == leaf.public_key().public_bytes(*form)
    except (ValueError, UnsupportedAlgorithm):
        why = f"{labels.TLS_CERTIFICATE} of the Secret {secret} has a key of an unknown kind"
        return ObservedCertificate(Reason.INVALID_CERTIFICATE, why)
    if not is_its_key:
        why = f"{labels.TLS_KEY} of the Secret {secret} is not the key of its {labels.TLS_CERTIFICATE}"
        return ObservedCertificate(Reason.INVALID_CERTIFICATE, why)
    until, moment = leaf.not_valid_after_utc, parse_time(now)
    end = f"{until:%Y-%m-%dT%H:%M:%SZ}"
    if moment is not None and until <= moment:
        return ObservedCertificate(Reason.EXPIRED, f"the certificate in the Secret {secret} expired at {end}")
    return ObservedCertificate(Reason.VALID, f"it expires at {end}")
