"""Keeps the Secrets with the certificates of services with `spec.security.tls: Internal`, and the operator's own certificate."""

import base64
import binascii
import datetime
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from phalanx_api import labels
from phalanx_operator.apply import issuing
from phalanx_operator.apply.issuing import Pair
from phalanx_operator.apply.owned import check_owner
from phalanx_operator.kube.client import SECRETS, Gone, Json, KubeClient, Rejected, Retry
from phalanx_operator.kube.store import Key
from phalanx_operator.observe.certificate import load_pair
from phalanx_operator.render import objects as names
from phalanx_operator.render.objects import Owning, child

log = logging.getLogger(__name__)
CHECK_S = 300.0
"""Between two looks at the Secrets of a service."""
COMPONENT = "certificates"
AUTHORITY_KEY = "ca.key"
ROLES = (labels.ROUTER_ROLE, labels.GROUP_ROLE, labels.METRICS_ROLE)
"""Roles with a Secret."""


def utc_now() -> datetime.datetime:
    """Returns the time."""
    return datetime.datetime.now(datetime.UTC)


class ServiceCertificates:
    """Issues and renews. Each Secret has one writer, the leading operator."""

    def __init__(self, client: KubeClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._checked_s: dict[Key, tuple[str, float]] = {}

    def forget(self, key: Key) -> None:
        """Drops a deleted service."""
        self._checked_s.pop(key, None)

    def due_at_s(self, key: Key) -> float | None:
        """Returns when the Secrets are read again; null for services without certificates."""
        return self._checked_s[key][1] + CHECK_S if key in self._checked_s else None

    async def keep(self, service: Owning, now: datetime.datetime) -> None:
        """Creates and renews what is due. Raises Rejected if another owner has a Secret, Retry, or another KubeError."""
        if not self._is_checked(service):
            await self._keep_all(service, now)
            self._checked_s[service.namespace, service.name] = (service.uid, self._clock())

    async def renew(self, service: Owning, now: datetime.datetime) -> None:
        """Renews if this service has an authority: an invalid spec does not say whether it is to have one. Raises as `keep`."""
        if not self._is_checked(service) and await self._has_authority(service):
            await self.keep(service, now)

    def _is_checked(self, service: Owning) -> bool:
        uid, checked_s = self._checked_s.get((service.namespace, service.name), ("", 0.0))
        return uid == service.uid and self._clock() - checked_s < CHECK_S

    async def _has_authority(self, service: Owning) -> bool:
        try:
            return await self._read(service, names.authority(service.name)) is not None
        except Rejected:  # a Secret of the user, who may use no certificates of the operator
            return False

    async def _keep_all(self, service: Owning, now: datetime.datetime) -> None:
        """The first authority is stored before the roles' Secrets, so that its key is known to each later operator.

        A further one is stored once every role's Secret trusts it: if this operator stops before, the new authority never signs.
        """
        stored = await self._read(service, names.authority(service.name))
        former = _authorities(stored)
        authorities = issuing.renew_authorities(former, service.name, now)
        is_first = issuing.signing_authority(authorities, now) not in former
        if is_first:
            await self._write_authority(service, authorities, is_new=stored is None)
        for role in ROLES:
            await self._keep_role(service, role, authorities, now)
        if authorities != former and not is_first:
            await self._write_authority(service, authorities, is_new=False)

    async def _write_authority(self, service: Owning, authorities: list[Pair], *, is_new: bool) -> None:
        keys = "".join(pair.key_pem for pair in authorities)
        data = {labels.TLS_AUTHORITY: issuing.trusted_pem(authorities), AUTHORITY_KEY: keys}
        await self._write(service, names.authority(service.name), data, "Opaque", is_new=is_new)

    async def _keep_role(self, service: Owning, role: str, authorities: list[Pair], now: datetime.datetime) -> None:
        name = names.role_certificate(service.name, role)
        stored = await self._read(service, name)
        trusted = issuing.trusted_pem(authorities)
        pairs = issuing.read_pairs(_file(stored, labels.TLS_CERTIFICATE), _file(stored, labels.TLS_KEY))
        is_due = not pairs or issuing.is_due(pairs[0].certificate, now)
        if is_due or not issuing.is_issued_by(pairs[0].certificate, authorities):
            signing = issuing.signing_authority(authorities, now)
            pairs = [issuing.issue(signing, labels.peer_name(role, service.name, service.namespace), now)]
        elif _file(stored, labels.TLS_AUTHORITY) == trusted.encode():
            return
        data = {labels.TLS_CERTIFICATE: pairs[0].pem, labels.TLS_KEY: pairs[0].key_pem, labels.TLS_AUTHORITY: trusted}
        await self._write(service, name, data, "kubernetes.io/tls", is_new=stored is None)

    async def _read(self, service: Owning, name: str) -> Json | None:
        try:
            stored = await self._client.get(SECRETS, service.namespace, name)
        except Gone:
            return None
        check_owner(service, stored["metadata"], f"Secret {name}")
        return stored

    async def _write(self, service: Owning, name: str, data: dict[str, str], kind: str, *, is_new: bool) -> None:
        encoded = {file: base64.b64encode(text.encode()).decode() for file, text in data.items()}
        body = child(service, "v1", "Secret", name, COMPONENT, type=kind, data=encoded)
        log.info("certificate issued", extra={"service": f"{service.namespace}/{service.name}", "secret": name})
        await (self._client.create(SECRETS, body) if is_new else self._client.apply(SECRETS, body))


@dataclass(frozen=True, slots=True)
class _Own:
    context: ssl.SSLContext
    renew_at: datetime.datetime


class OperatorIdentity:
    """Certificates with which the operator polls routers: one per service, in memory only."""

    def __init__(self, client: KubeClient, now: Callable[[], datetime.datetime] = utc_now) -> None:
        self._client = client
        self._now = now
        self._own: dict[Key, _Own] = {}

    async def context(self, key: Key) -> ssl.SSLContext:
        """Returns the client's context for a service, read again every `issuing.SPREAD`. Raises KubeError."""
        now, own = self._now(), self._own.get(key)
        if own is None or own.renew_at <= now:
            authorities = _authorities(await self._client.get(SECRETS, key[0], names.authority(key[1])))
            if not authorities:
                raise Retry(f"Secret {names.authority(key[1])} has no authority yet")
            signing = issuing.signing_authority(authorities, now)
            pair = issuing.issue(signing, labels.peer_name(labels.OPERATOR_ROLE, key[1], key[0]), now)
            own = self._own[key] = _Own(_client_context(pair, issuing.trusted_pem(authorities)), now + issuing.SPREAD)
        return own.context

    def forget(self, key: Key) -> None:
        """Drops the certificate: routers refuse it, or the service is deleted."""
        self._own.pop(key, None)


def _client_context(pair: Pair, trusted: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=trusted)
    load_pair(context, pair.pem.encode(), pair.key_pem.encode())
    return context


def _authorities(stored: Json | None) -> list[Pair]:
    return issuing.read_pairs(_file(stored, labels.TLS_AUTHORITY), _file(stored, AUTHORITY_KEY))


def _file(stored: Json | None, name: str) -> bytes:
    try:
        return base64.b64decode(((stored or {}).get("data") or {}).get(name, ""), validate=True)
    except (ValueError, binascii.Error):
        return b""
