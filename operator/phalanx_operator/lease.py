"""Leader election over one Lease object. Who loses the lease ends its process: two leaders would undo each other's work."""

import asyncio
import datetime
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from phalanx_api import labels
from phalanx_operator.decide.leadership import Held, Take, Wait, claim
from phalanx_operator.kube.client import LEASES, Conflict, Gone, Json, KubeClient, KubeError

log = logging.getLogger(__name__)
NAME = labels.LEASE
LEASE_S = 8.0
"""How long a lease holds without being renewed, if nothing else is asked for; all else is in proportion to it. With what a
candidate needs to see the last renewal (RENEW_S) a leader that is killed is followed within 10 s."""
RENEW_S = 1.0
GIVE_UP_S = 5.0
"""A leader that could not renew for so long stops, well before anyone else may take the lease."""
GIVE_BACK_S = 3.0
"""A process that ends tries no longer to give its lease back: whoever ends it may not wait, and the lease runs out by itself."""
LEAST_S = 0.05
"""How soon a candidate looks again at a lease that is about to run out."""


class LeaseLost(Exception):
    """This process leads no more."""


class Lease:
    """One candidate's hold on the lease."""

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
        """The lease as we wrote it last, while nobody is known to have changed it since."""

    async def acquire(self) -> None:
        """Returns when this process leads."""
        announced = ""
        while True:
            pause_s = self._renew_s
            try:
                match await self._try():
                    case Take(why):
                        log.info("leading", extra={"identity": self._identity, "why": why})
                        return
                    case Wait(holder, left_s):
                        pause_s = min(pause_s, max(left_s, LEAST_S))  # when it runs out, not up to RENEW_S later
                        if holder != announced:
                            log.info("standing by", extra={"identity": self._identity, "leader": holder})
                        announced = holder
            except KubeError as error:
                log.warning("lease not read", extra={"why": str(error)})
            await self._pause(pause_s)

    async def keep(self) -> None:
        """Renews for ever. Raises: LeaseLost when someone else leads, or nothing could be renewed for too long."""
        renewed_at = self._clock()
        while True:
            await self._pause(self._renew_s)
            began = self._clock()  # what the API server notes down is not earlier than this
            left_s = self._give_up_s - (began - renewed_at)
            try:
                async with asyncio.timeout(max(left_s, 0)):
                    answer = await self._try()
                if isinstance(answer, Wait):
                    raise LeaseLost(f"{answer.holder} leads now")
                renewed_at = began
            except TimeoutError as error:
                raise LeaseLost(f"not renewed for {self._give_up_s:.0f} s: the API server does not answer") from error
            except KubeError as error:
                log.warning("lease not renewed", extra={"why": str(error)})
                if self._clock() - renewed_at > self._give_up_s:
                    raise LeaseLost(f"not renewed for {self._give_up_s:.0f} s: {error}") from error

    async def give_back(self) -> None:
        """Lets the next candidate lead at once. An error is only logged: the lease then runs out by itself."""
        try:
            async with asyncio.timeout(self._give_back_s):
                await self._give_back()
        except (KubeError, TimeoutError) as error:
            log.warning("lease not given back", extra={"why": str(error) or type(error).__name__})

    async def _give_back(self) -> None:
        body = await self._client.get(LEASES, self._namespace, NAME)
        if body["spec"].get("holderIdentity") == self._identity:
            await self._client.replace(LEASES, body | {"spec": body["spec"] | {"holderIdentity": ""}})

    async def _try(self) -> Take | Wait:
        """One attempt: a renewal is one write, bound to what we wrote last, and a look only when that is not so any more.

        Raises: Conflict when another candidate was faster, or another KubeError.
        """
        if self._ours is not None:
            try:
                await self._write(self._ours)
                return Take("renewal")
            except (Conflict, Gone):
                self._ours = None
        return await self._look_and_try()

    async def _write(self, body: Json) -> None:
        self._ours = await self._client.replace(LEASES, body | {"spec": self._spec(body.get("spec") or {})})

    async def _look_and_try(self) -> Take | Wait:
        try:
            body: Json | None = await self._client.get(LEASES, self._namespace, NAME)
        except Gone:
            body = None
        answer = claim(self._identity, self._held(body), self._lease_s)
        if isinstance(answer, Wait):
            return answer
        if body is None:
            metadata = {"name": NAME, "namespace": self._namespace}
            lease = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata, "spec": self._spec({})}
            made = await self._client.create(LEASES, lease)
            self._ours = lease | {"metadata": made["metadata"]}
        else:
            await self._write(body)
        return answer

    def _held(self, body: Json | None) -> Held | None:
        if body is None:
            return None
        version = body["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        spec = body.get("spec") or {}
        lasts_s = float(spec.get("leaseDurationSeconds") or 0)
        return Held(spec.get("holderIdentity") or "", version, self._clock() - self._seen[1], lasts_s)

    def _spec(self, former: Json) -> Json:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = former.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._lease_s),  # no 0: the API server refuses it
            "acquireTime": former.get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": int(former.get("leaseTransitions", 0)) + (0 if mine else 1),
        }
