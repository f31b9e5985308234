"""Who leads: the answer that a Lease object gives to one candidate.

A lease is held as long as it keeps changing. How old it is, each candidate measures by its own clock, from when it first saw
the lease as it is: clocks of different machines are never compared.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The lease as it is: by whom, its version, how long we have seen that version, and how long its holder says it lasts."""

    holder: str
    resource_version: str
    unchanged_s: float
    lease_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TakeLease:
    """Write our name into the lease."""

    why: str


@dataclass(frozen=True, slots=True)
class WaitForLease:
    """Someone else leads, for so many seconds at least."""

    holder: str
    left_s: float = 0.0


def claim(me: str, held: HeldLease | None, lease_s: float) -> TakeLease | WaitForLease:
    """What a candidate does now. `held` is None when there is no lease.

    `lease_s`: how long ours last. The holder may be of a release, or have a flag, that makes it stop later: the
    longer one counts.
    """
    if held is None:
        return TakeLease("there is no lease")
    if held.holder == me:
        return TakeLease("renewal")
    if not held.holder:
        return TakeLease("the lease was given back")
    lasts_s = max(lease_s, held.lease_s)
    if held.unchanged_s > lasts_s:
        return TakeLease(f"{held.holder} did not renew for {lasts_s:.0f} s")
    return WaitForLease(held.holder, lasts_s - held.unchanged_s)
