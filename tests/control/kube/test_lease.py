"""Leader election."""

import asyncio
from typing import Any

import pytest

from phalanx_operator.decide.leadership import ObservedLease, TakeLease, WaitForLease, claim
from phalanx_operator.kube.client import LEASES, Retry
from phalanx_operator.lease import LEASE_S, MIN_PAUSE_S, NAME, RENEW_S, RENEW_TIMEOUT_S, Lease, LeaseLost
from tests.control.fake_kube import FakeKube


@pytest.mark.parametrize(
    ("held", "answer"),
    [
        (None, TakeLease),
        (ObservedLease("a", "1", 99), TakeLease),
        (ObservedLease("", "1", 0), TakeLease),
        (ObservedLease("b", "1", LEASE_S), WaitForLease),
        (ObservedLease("b", "1", LEASE_S + 0.1), TakeLease),
        (ObservedLease("b", "1", LEASE_S + 0.1, 2 * LEASE_S), WaitForLease),
        (ObservedLease("b", "1", 2 * LEASE_S + 0.1, 2 * LEASE_S), TakeLease),
        (ObservedLease("b", "1", LEASE_S, LEASE_S / 2), WaitForLease),
    ],
    ids=["no lease", "own", "released", "held", "expired", "longer", "longer, expired", "shorter"],
)
def test_claims(held: ObservedLease | None, answer: type) -> None:
    assert isinstance(claim("a", held, LEASE_S), answer)


class Clock:
    """Time advances only in pauses. A pause after `ends_after` others raises."""

    def __init__(self, ends_after: int = 1000) -> None:
        self.now = 0.0
        self.pauses_left = ends_after

    def read(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.now += seconds
        self.pauses_left -= 1
        if self.pauses_left < 0:
            raise TimeoutError


def candidate(kube: FakeKube, name: str, clock: Clock) -> Lease:
    return Lease(kube, "system", name, clock=clock.read, pause=clock.pause)


def holder(kube: FakeKube) -> str:
    return str(kube.of_kind(LEASES)[NAME]["spec"]["holderIdentity"])


async def test_first_candidate_leads_until_it_is_silent() -> None:
    kube, clock = FakeKube(), Clock()
    await candidate(kube, "a", clock).acquire()
    assert holder(kube) == "a"
    await candidate(kube, "b", clock).acquire()
    assert holder(kube) == "b"
    assert LEASE_S < clock.now < LEASE_S + RENEW_S
    assert kube.of_kind(LEASES)[NAME]["spec"]["leaseTransitions"] == 2


async def test_killed_leader_is_replaced_within_ten_seconds() -> None:
    """The leader renews for the last time right after the candidate has read the lease."""
    kube, clock = FakeKube(), Clock()
    leader = candidate(kube, "a", clock)
    await leader.acquire()
    follower = candidate(kube, "b", RenewedOnce(clock, leader))
    await follower.acquire()
    assert holder(kube) == "b"
    assert LEASE_S < clock.now <= LEASE_S + RENEW_S + 2 * MIN_PAUSE_S < 10


class RenewedOnce(Clock):
    """A view of `clock` in which the leader renews once, at the start of the first pause."""

    def __init__(self, clock: Clock, leader: Lease) -> None:
        super().__init__()
        self.clock = clock
        self.leader: Lease | None = leader

    def read(self) -> float:
        return self.clock.now

    async def pause(self, seconds: float) -> None:
        if self.leader:
            await self.leader.acquire()  # renews its own lease
            self.leader = None
        await self.clock.pause(seconds)


async def test_longer_lease_is_awaited_to_its_end() -> None:
    """An operator may be replaced by a release with shorter leases."""
    kube, clock = FakeKube(), Clock()
    await Lease(kube, "system", "a", lease_s=15.0, clock=clock.read, pause=clock.pause).acquire()
    await candidate(kube, "b", clock).acquire()
    assert holder(kube) == "b"
    assert 15.0 < clock.now < 15.0 + RENEW_S
    assert kube.of_kind(LEASES)[NAME]["spec"]["leaseDurationSeconds"] == LEASE_S


async def test_released_lease_is_acquired_at_once() -> None:
    kube, clock = FakeKube(), Clock()
    first = candidate(kube, "a", clock)
    await first.acquire()
    await first.release()
    await candidate(kube, "b", clock).acquire()
    assert (holder(kube), clock.now) == ("b", 0.0)


async def test_lease_of_another_holder_is_not_released() -> None:
    kube, clock = FakeKube(), Clock()
    await candidate(kube, "a", clock).acquire()
    await candidate(kube, "b", clock).release()
    assert holder(kube) == "a"


async def test_missing_lease_is_released_without_error() -> None:
    await candidate(FakeKube(), "a", Clock()).release()


async def test_renewing_keeps_the_time_when_the_lease_was_acquired() -> None:
    kube, clock = FakeKube(), Clock(ends_after=3)
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    acquired = kube.of_kind(LEASES)[NAME]["spec"]["acquireTime"]
    with pytest.raises(TimeoutError):
        await lease.keep()
    assert kube.of_kind(LEASES)[NAME]["spec"]["acquireTime"] == acquired
    assert kube.calls.count(f"replace leases {NAME}") == 3


async def test_renewal_is_one_write() -> None:
    kube, clock = FakeKube(), Clock(ends_after=3)
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    kube.calls.clear()
    kube.reads.clear()
    with pytest.raises(TimeoutError):
        await lease.keep()
    assert (kube.calls, kube.reads) == ([f"replace leases {NAME}"] * 3, [])


@pytest.mark.parametrize("change", ["annotate", "delete"])
async def test_changed_lease_is_read_and_renewed(change: str) -> None:
    kube, clock = FakeKube(), Clock(ends_after=2)
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    if change == "annotate":
        kube.put(
            LEASES, kube.of_kind(LEASES)[NAME] | {"metadata": {"name": NAME, "namespace": "system", "annotations": {"a": "b"}}}
        )
    else:
        kube.objects.clear()
    kube.calls.clear()
    kube.reads.clear()
    with pytest.raises(TimeoutError):
        await lease.keep()
    retry = {"annotate": f"replace leases {NAME}", "delete": f"create leases {NAME}"}
    assert kube.calls == [f"replace leases {NAME}", retry[change], f"replace leases {NAME}"]
    assert kube.reads == [f"get leases {NAME}"]
    assert holder(kube) == "a"


async def test_replaced_leader_stops() -> None:
    kube, clock = FakeKube(), Clock()
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    body = kube.of_kind(LEASES)[NAME]
    kube.put(LEASES, body | {"spec": body["spec"] | {"holderIdentity": "b"}})
    with pytest.raises(LeaseLost, match="b leads now"):
        await lease.keep()


class UnresponsiveKube(FakeKube):
    """Answers the first two calls only."""

    answers_left = 2

    def _record(self, *args: object, **kwargs: object) -> None:
        self.answers_left -= 1
        if self.answers_left < 0:
            raise Retry("timeout")


async def test_leader_that_cannot_renew_stops_before_expiry() -> None:
    kube, clock = UnresponsiveKube(), Clock()
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    with pytest.raises(LeaseLost, match="not renewed"):
        await lease.keep()
    assert RENEW_TIMEOUT_S < clock.now < LEASE_S


async def test_candidate_retries_an_unreachable_api_server() -> None:
    kube, clock = FakeKube(), Clock()
    kube.failures[f"get leases {NAME}"] = Retry("unreachable")
    await candidate(kube, "a", clock).acquire()
    assert holder(kube) == "a"


class HangingKube(FakeKube):
    """Accepts requests without an answer while `hangs`."""

    hangs = False

    async def get(self, *args: Any, **kwargs: Any) -> Any:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().get(*args, **kwargs)

    async def replace(self, *args: Any, **kwargs: Any) -> Any:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().replace(*args, **kwargs)


class LongPause(Clock):
    """Each pause takes the whole renewal timeout."""

    async def pause(self, seconds: float) -> None:
        await super().pause(RENEW_TIMEOUT_S)


async def test_leader_with_unresponsive_api_server_stops() -> None:
    kube = HangingKube()
    lease = candidate(kube, "a", LongPause())
    await lease.acquire()
    kube.hangs = True
    with pytest.raises(LeaseLost, match="does not respond"):
        await lease.keep()


@pytest.mark.parametrize(("lease_s", "rounded_s"), [(0.4, 1), (1.0, 1), (2.5, 3), (8.0, 8)])
async def test_lease_duration_is_rounded_up(lease_s: float, rounded_s: int) -> None:
    """The API server accepts whole seconds, but not 0."""
    kube, clock = FakeKube(), Clock()
    await Lease(kube, "system", "a", lease_s=lease_s, clock=clock.read, pause=clock.pause).acquire()
    assert kube.of_kind(LEASES)[NAME]["spec"]["leaseDurationSeconds"] == rounded_s


async def test_ending_process_does_not_wait_for_the_api_server() -> None:
    kube, clock = HangingKube(), Clock()
    lease = Lease(kube, "system", "a", lease_s=LEASE_S / 100, clock=clock.read, pause=clock.pause)
    await lease.acquire()
    kube.hangs = True
    async with asyncio.timeout(30):
        await lease.release()
    assert holder(kube) == "a"
