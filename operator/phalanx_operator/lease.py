"""Leader election by one Lease object. A process that loses the lease exits: two leaders would undo each other's work."""

import asyncio
import datetime
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from phalanx_api import labels
from phalanx_operator.decide.leadership import HeldLease, TakeLease, WaitForLease, claim
from phalanx_operator.kube.client import LEASES, Conflict, Gone, Json, KubeClient, KubeError

log = logging.getLogger(__name__)
NAME = labels.LEASE
LEASE_S = 8.0
"""Default duration of an unrenewed lease; all other times are in proportion. A killed leader is replaced within 10 s, including
the RENEW_S in which a candidate sees the last renewal."""
RENEW_S = 1.0
GIVE_UP_S = 5.0
"""Time without renewal after which a leader stops, well before another candidate may take the lease."""
GIVE_BACK_S = 3.0
"""Longest attempt to release the lease at exit; an unreleased lease expires."""
LEAST_S = 0.05
"""Shortest interval in which a candidate reads a lease that is about to expire."""


class LeaseLost(Exception):
    """This process is no longer the leader."""


class Lease:
    """One candidate for the lease."""

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
        self._give_up_s = GIVE_UP_S * lease_s / LEASE_S
        self._give_back_s = GIVE_BACK_S * min(1.0, lease_s / LEASE_S)
        self._clock = clock
        self._pause = pause
        self._seen = ("", 0.0)
        self._ours: Json | None = None
        """The lease of our last write, while no other write is known."""

    async def acquire(self) -> None:
        """Returns when this process is the leader."""
        announced = ""
        while True:
            pause_s = self._renew_s
            try:
                match await self._try():
                    case TakeLease(why):
                        log.info("leading", extra={"identity": self._identity, "why": why})
                        return
                    case WaitForLease(holder, left_s):
                        pause_s = min(pause_s, max(left_s, LEAST_S))  # at its expiry, not up to RENEW_S later
                        if holder != announced:
                            log.info("standing by", extra={"identity": self._identity, "leader": holder})
                        announced = holder
            except KubeError as error:
                log.warning("lease not read", extra={"why": str(error)})
            await self._pause(pause_s)

    async def keep(self) -> None:
        """Renews forever. Raises LeaseLost when another process leads, or no renewal succeeded for too long."""
        renewed_at = self._clock()
        while True:
            await self._pause(self._renew_s)
            began = self._clock()  # the renewal time that the API server stores is not earlier
            left_s = self._give_up_s - (began - renewed_at)
            try:
                async with asyncio.timeout(max(left_s, 0)):
                    answer = await self._try()
                if isinstance(answer, WaitForLease):
                    raise LeaseLost(f"{answer.holder} leads now")
                renewed_at = began
            except TimeoutError as error:
                raise LeaseLost(f"not renewed for {self._give_up_s:.0f} s: the API server does not respond") from error
            except KubeError as error:
                log.warning("lease not renewed", extra={"why": str(error)})
                if self._clock() - renewed_at > self._give_up_s:
                    raise LeaseLost(f"not renewed for {self._give_up_s:.0f} s: {error}") from error

    async def give_back(self) -> None:
        """Releases the lease, so the next candidate leads at once. An error is only logged: the lease expires."""
        try:
            async with asyncio.timeout(self._give_back_s):
                await self._give_back()
        except (KubeError, TimeoutError) as error:
            log.warning("lease not released", extra={"why": str(error) or type(error).__name__})

    async def _give_back(self) -> None:
        body = await self._client.get(LEASES, self._namespace, NAME)
        if body["spec"].get("holderIdentity") == self._identity:
            await self._client.replace(LEASES, body | {"spec": body["spec"] | {"holderIdentity": ""}})

    async def _try(self) -> TakeLease | WaitForLease:
        """Makes one attempt. A renewal is one write with the version of our last write, and a read only after a conflict.

        Raises Conflict when another candidate was faster, or another KubeError.
        """
        if self._ours is not None:
            try:
                await self._write(self._ours)
                return TakeLease("renewal")
            except (Conflict, Gone):
                self._ours = None
        return await self._look_and_try()

    async def _write(self, body: Json) -> None:
        self._ours = await self._client.replace(LEASES, body | {"spec": self._spec(body.get("spec") or {})})

    async def _look_and_try(self) -> TakeLease | WaitForLease:
        try:
            body: Json | None = await self._client.get(LEASES, self._namespace, NAME)
        except Gone:
            body = None
        answer = claim(self._identity, self._held(body), self._lease_s)
        if isinstance(answer, WaitForLease):
            return answer
        if body is None:
            metadata = {"name": NAME, "namespace": self._namespace}
            lease = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata, "spec": self._spec({})}
            made = await self._client.create(LEASES, lease)
            self._ours = lease | {"metadata": made["metadata"]}
        else:
            await self._write(body)
        return answer

    def _held(self, body: Json | None) -> HeldLease | None:
        if body is None:
            return None
        version = body["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        spec = body.get("spec") or {}
        lasts_s = float(spec.get("leaseDurationSeconds") or 0)
        return HeldLease(spec.get("holderIdentity") or "", version, self._clock() - self._seen[1], lasts_s)

    def _spec(self, former: Json) -> Json:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = former.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._lease_s),  # the API server refuses 0
            "acquireTime": former.get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": int(former.get("leaseTransitions", 0)) + (0 if mine else 1),
        }
