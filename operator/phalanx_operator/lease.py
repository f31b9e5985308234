"""Leader election by a Lease. A process that loses it exits: two leaders would undo each other's work."""

import asyncio
import datetime
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from phalanx_api import labels
from phalanx_operator.decide.leadership import ObservedLease, TakeLease, WaitForLease, claim
from phalanx_operator.kube.client import LEASES, Conflict, Gone, Json, KubeClient, KubeError

log = logging.getLogger(__name__)
NAME = labels.LEASE
LEASE_S = 8.0
"""Of an unrenewed lease; other times are in proportion. A killed leader is replaced within 10 s."""
RENEW_S = 1.0
RENEW_TIMEOUT_S = 5.0
"""A leader without renewal exits before another candidate may lead."""
RELEASE_TIMEOUT_S = 3.0
MIN_PAUSE_S = 0.05


class LeaseLost(Exception):
    """This process is no longer the leader."""


class Lease:
    """One candidate of the leader election."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        identity: str,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._lease_s = lease_s
        self._renew_s = RENEW_S * lease_s / LEASE_S
        self._renew_timeout_s = RENEW_TIMEOUT_S * lease_s / LEASE_S
        self._release_timeout_s = RELEASE_TIMEOUT_S * min(1.0, lease_s / LEASE_S)
        self._clock = clock
        self._pause = pause
        self._observed = ("", 0.0)
        self._own: Json | None = None
        """As last written, until another write is observed."""

    async def acquire(self) -> None:
        """Waits until this process leads."""
        announced = ""
        while True:
            pause_s = self._renew_s
            try:
                match await self._claim():
                    case TakeLease(why):
                        log.info("leading", extra={"identity": self._identity, "why": why})
                        return
                    case WaitForLease(holder, left_s):
                        pause_s = min(pause_s, max(left_s, MIN_PAUSE_S))
                        if holder != announced:
                            log.info("standing by", extra={"identity": self._identity, "leader": holder})
                        announced = holder
            except KubeError as error:
                log.warning("lease not read", extra={"why": str(error)})
            await self._pause(pause_s)

    async def keep(self) -> None:
        """Renews forever. Raises LeaseLost."""
        renewed_at = self._clock()
        while True:
            await self._pause(self._renew_s)
            started_s = self._clock()  # the stored renewal time is not earlier
            left_s = self._renew_timeout_s - (started_s - renewed_at)
            try:
                async with asyncio.timeout(max(left_s, 0)):
                    answer = await self._claim()
                if isinstance(answer, WaitForLease):
                    raise LeaseLost(f"{answer.holder} leads now")
                renewed_at = started_s
            except TimeoutError as error:
                raise LeaseLost(f"not renewed for {self._renew_timeout_s:.0f} s: the API server does not respond") from error
            except KubeError as error:
                log.warning("lease not renewed", extra={"why": str(error)})
                if self._clock() - renewed_at > self._renew_timeout_s:
                    raise LeaseLost(f"not renewed for {self._renew_timeout_s:.0f} s: {error}") from error

    async def release(self) -> None:
        """Releases the lease; logs errors."""
        try:
            async with asyncio.timeout(self._release_timeout_s):
                await self._try_release()
        except (KubeError, TimeoutError) as error:
            log.warning("lease not released", extra={"why": str(error) or type(error).__name__})

    async def _try_release(self) -> None:
        body = await self._client.get(LEASES, self._namespace, NAME)
        if body["spec"].get("holderIdentity") == self._identity:
            await self._client.replace(LEASES, body | {"spec": body["spec"] | {"holderIdentity": ""}})

    async def _claim(self) -> TakeLease | WaitForLease:
        """A renewal is one write with the last version, and reads only after a conflict.

        Raises Conflict if another candidate was faster, or another KubeError.
        """
        if self._own is not None:
            try:
                await self._write(self._own)
                return TakeLease("renewal")
            except (Conflict, Gone):
                self._own = None
        return await self._read_and_claim()

    async def _write(self, body: Json) -> None:
        self._own = await self._client.replace(LEASES, body | {"spec": self._spec(body.get("spec") or {})})

    async def _read_and_claim(self) -> TakeLease | WaitForLease:
        try:
            body: Json | None = await self._client.get(LEASES, self._namespace, NAME)
        except Gone:
            body = None
        answer = claim(self._identity, self._observe(body), self._lease_s)
        if isinstance(answer, WaitForLease):
            return answer
        if body is None:
            metadata = {"name": NAME, "namespace": self._namespace}
            lease = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata, "spec": self._spec({})}
            created = await self._client.create(LEASES, lease)
            self._own = lease | {"metadata": created["metadata"]}
        else:
            await self._write(body)
        return answer

    def _observe(self, body: Json | None) -> ObservedLease | None:
        if body is None:
            return None
        version = body["metadata"]["resourceVersion"]
        if version != self._observed[0]:
            self._observed = (version, self._clock())
        spec = body.get("spec") or {}
        duration_s = float(spec.get("leaseDurationSeconds") or 0)
        return ObservedLease(spec.get("holderIdentity") or "", version, self._clock() - self._observed[1], duration_s)

    def _spec(self, former: Json) -> Json:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_own = former.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._lease_s),  # the API server rejects 0
            "acquireTime": former.get("acquireTime", now) if is_own else now,
            "renewTime": now,
            "leaseTransitions": int(former.get("leaseTransitions", 0)) + (0 if is_own else 1),
        }
