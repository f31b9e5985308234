"""Who leads."""

import asyncio
from typing import Any

import pytest

from phalanx_operator.decide.leadership import HeldLease, TakeLease, WaitForLease, claim
from phalanx_operator.kube.client import LEASES, Retry
from phalanx_operator.lease import GIVE_UP_S, LEASE_S, LEAST_S, NAME, RENEW_S, Lease, LeaseLost
from tests.control.fake_kube import FakeKube


@pytest.mark.parametrize(
    ("held", "answer"),
    [
        (None, TakeLease),
        (HeldLease("me", "1", 99), TakeLease),
        (HeldLease("", "1", 0), TakeLease),
        (HeldLease("you", "1", LEASE_S), WaitForLease),
        (HeldLease("you", "1", LEASE_S + 0.1), TakeLease),
        (HeldLease("you", "1", LEASE_S + 0.1, 2 * LEASE_S), WaitForLease),
        (HeldLease("you", "1", 2 * LEASE_S + 0.1, 2 * LEASE_S), TakeLease),
        (HeldLease("you", "1", LEASE_S, LEASE_S / 2), WaitForLease),
    ],
    ids=["no lease", "ours", "given back", "held", "run out", "theirs is longer", "theirs has run out", "theirs is shorter"],
)
def test_claims(held: HeldLease | None, answer: type) -> None:
    assert isinstance(claim("me", held, LEASE_S), answer)


class Clock:
    """Time passes only while someone waits. After `ends_after` pauses the wait raises."""

    def __init__(self, ends_after: int = 1000) -> None:
        self.now = 0.0
        self.left = ends_after

    def read(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.now += seconds
        self.left -= 1
        if self.left < 0:
            raise TimeoutError


def candidate(kube: FakeKube, name: str, clock: Clock) -> Lease:
    return Lease(kube, "system", name, clock=clock.read, pause=clock.pause)


def holder(kube: FakeKube) -> str:
    return str(kube.of(LEASES)[NAME]["spec"]["holderIdentity"])


async def test_first_candidate_leads_until_it_is_silent() -> None:
    kube, clock = FakeKube(), Clock()
    await candidate(kube, "a", clock).acquire()
    assert holder(kube) == "a"
    await candidate(kube, "b", clock).acquire()
    assert holder(kube) == "b"
    assert LEASE_S < clock.now < LEASE_S + RENEW_S
    assert kube.of(LEASES)[NAME]["spec"]["leaseTransitions"] == 2


async def test_killed_leader_is_replaced_within_ten_seconds() -> None:
    """It renews right after the candidate has looked, and never again."""
    kube, clock = FakeKube(), Clock()
    leader = candidate(kube, "a", clock)
    await leader.acquire()
    follower = candidate(kube, "b", RenewedOnce(clock, leader))
    await follower.acquire()
    assert holder(kube) == "b"
    assert LEASE_S < clock.now <= LEASE_S + RENEW_S + 2 * LEAST_S < 10


class RenewedOnce(Clock):
    """Another clock, whose first pause begins with a renewal by the leader."""

    def __init__(self, clock: Clock, leader: Lease) -> None:
        super().__init__()
        self.clock = clock
        self.leader: Lease | None = leader

    def read(self) -> float:
        return self.clock.now

    async def pause(self, seconds: float) -> None:
        if self.leader:
            await self.leader.acquire()  # its own lease: it is renewed
            self.leader = None
        await self.clock.pause(seconds)


async def test_longer_lease_is_awaited_to_its_end() -> None:
    """As while an operator is replaced by one of a release with shorter leases: the old one stops by its own."""
    kube, clock = FakeKube(), Clock()
    await Lease(kube, "system", "a", lease_s=15.0, clock=clock.read, pause=clock.pause).acquire()
    await candidate(kube, "b", clock).acquire()
    assert holder(kube) == "b"
    assert 15.0 < clock.now < 15.0 + RENEW_S
    assert kube.of(LEASES)[NAME]["spec"]["leaseDurationSeconds"] == LEASE_S


async def test_released_lease_is_acquired_at_once() -> None:
    kube, clock = FakeKube(), Clock()
    first = candidate(kube, "a", clock)
    await first.acquire()
    await first.give_back()
    await candidate(kube, "b", clock).acquire()
    assert (holder(kube), clock.now) == ("b", 0.0)


async def test_a_lease_of_another_is_not_given_back() -> None:
    kube, clock = FakeKube(), Clock()
    await candidate(kube, "a", clock).acquire()
    await candidate(kube, "b", clock).give_back()
    assert holder(kube) == "a"


async def test_giving_back_without_an_api_server_is_no_error() -> None:
    await candidate(FakeKube(), "a", Clock()).give_back()


async def test_renewing_keeps_the_time_when_the_lease_was_acquired() -> None:
    kube, clock = FakeKube(), Clock(ends_after=3)
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    acquired = kube.of(LEASES)[NAME]["spec"]["acquireTime"]
    with pytest.raises(TimeoutError):
        await lease.keep()
    assert kube.of(LEASES)[NAME]["spec"]["acquireTime"] == acquired
    assert kube.calls.count(f"replace leases {NAME}") == 3


async def test_a_renewal_is_one_write() -> None:
    kube, clock = FakeKube(), Clock(ends_after=3)
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    kube.calls.clear()
    kube.reads.clear()
    with pytest.raises(TimeoutError):
        await lease.keep()
    assert (kube.calls, kube.reads) == ([f"replace leases {NAME}"] * 3, [])


@pytest.mark.parametrize("strike", ["annotate", "delete"])
async def test_lease_changed_by_others_is_read_and_renewed(strike: str) -> None:
    kube, clock = FakeKube(), Clock(ends_after=2)
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    if strike == "annotate":
        kube.put(LEASES, kube.of(LEASES)[NAME] | {"metadata": {"name": NAME, "namespace": "system", "annotations": {"a": "b"}}})
    else:
        kube.objects.clear()
    kube.calls.clear()
    kube.reads.clear()
    with pytest.raises(TimeoutError):
        await lease.keep()
    again = {"annotate": f"replace leases {NAME}", "delete": f"create leases {NAME}"}
    assert kube.calls == [f"replace leases {NAME}", again[strike], f"replace leases {NAME}"]
    assert kube.reads == [f"get leases {NAME}"]
    assert holder(kube) == "a"


async def test_a_leader_that_was_overtaken_stops() -> None:
    kube, clock = FakeKube(), Clock()
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    body = kube.of(LEASES)[NAME]
    kube.put(LEASES, body | {"spec": body["spec"] | {"holderIdentity": "b"}})
    with pytest.raises(LeaseLost, match="b leads now"):
        await lease.keep()


class DeafKube(FakeKube):
    """Answers the first calls, then none."""

    answers = 2

    def _record(self, *args: object, **kwargs: object) -> None:
        self.answers -= 1
        if self.answers < 0:
            raise Retry("no answer")


async def test_leader_that_cannot_renew_stops_before_expiry() -> None:
    kube, clock = DeafKube(), Clock()
    lease = candidate(kube, "a", clock)
    await lease.acquire()
    with pytest.raises(LeaseLost, match="not renewed"):
        await lease.keep()
    assert GIVE_UP_S < clock.now < LEASE_S


async def test_a_candidate_outlives_an_api_server_that_is_away() -> None:
    kube, clock = FakeKube(), Clock()
    kube.failures[f"get leases {NAME}"] = Retry("away")
    await candidate(kube, "a", clock).acquire()
    assert holder(kube) == "a"


class Hanging(FakeKube):
    """An API server that takes requests and never answers, once told so."""

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
    """Each pause uses up all the time that a leader has for renewing."""

    async def pause(self, seconds: float) -> None:
        await super().pause(GIVE_UP_S)


async def test_leader_with_unresponsive_api_server_stops() -> None:
    kube = Hanging()
    lease = candidate(kube, "a", LongPause())
    await lease.acquire()
    kube.hangs = True
    with pytest.raises(LeaseLost, match="does not respond"):
        await lease.keep()


@pytest.mark.parametrize(("lease_s", "told"), [(0.4, 1), (1.0, 1), (2.5, 3), (8.0, 8)])
async def test_lease_duration_is_rounded_up(lease_s: float, told: int) -> None:
    """In whole seconds, of which the API server takes no 0."""
    kube, clock = FakeKube(), Clock()
    await Lease(kube, "system", "a", lease_s=lease_s, clock=clock.read, pause=clock.pause).acquire()
    assert kube.of(LEASES)[NAME]["spec"]["leaseDurationSeconds"] == told


async def test_ending_process_does_not_wait_for_the_api_server() -> None:
    kube, clock = Hanging(), Clock()
    lease = Lease(kube, "system", "a", lease_s=LEASE_S / 100, clock=clock.read, pause=clock.pause)
    await lease.acquire()
    kube.hangs = True
    async with asyncio.timeout(30):
        await lease.give_back()
    assert holder(kube) == "a"
