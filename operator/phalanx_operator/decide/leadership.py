"""Decides whether a candidate may take the Lease.

A lease holds as long as it keeps changing. Each candidate measures its age by its own clock, from the first observation of the
current version; clocks of different machines are never compared.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The observed lease."""

    holder: str
    resource_version: str
    unchanged_s: float
    """How long this candidate has observed this version."""
    lease_s: float = 0.0
    """Duration that the holder wrote."""


@dataclass(frozen=True, slots=True)
class TakeLease:
    """Write this candidate into the lease."""

    why: str


@dataclass(frozen=True, slots=True)
class WaitForLease:
    """Another candidate leads, for at least `left_s` seconds."""

    holder: str
    left_s: float = 0.0


def claim(me: str, held: HeldLease | None, lease_s: float) -> TakeLease | WaitForLease:
    """Returns the candidate's next step. `held` is None if the Lease does not exist.

    The longer of `lease_s` and the holder's duration counts: the holder may run another release, or have another flag.
    """
    if held is None:
        return TakeLease("there is no lease")
    if held.holder == me:
        return TakeLease("renewal")
    if not held.holder:
        return TakeLease("the lease was released")
    lasts_s = max(lease_s, held.lease_s)
    if held.unchanged_s > lasts_s:
        return TakeLease(f"{held.holder} did not renew for {lasts_s:.0f} s")
    return WaitForLease(held.holder, lasts_s - held.unchanged_s)
