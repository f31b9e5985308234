"""Decides whether a candidate may take the Lease.

A Lease is valid while its version changes. Each candidate measures a version's age by its own clock.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """The Lease as observed."""

    holder: str
    resource_version: str
    unchanged_s: float
    """Since the first observation of this version."""
    lease_s: float = 0.0
    """Duration that the holder wrote."""


@dataclass(frozen=True, slots=True)
class TakeLease:
    """Write this candidate into the Lease."""

    why: str


@dataclass(frozen=True, slots=True)
class WaitForLease:
    """Another candidate leads, for at least `left_s`."""

    holder: str
    left_s: float = 0.0


def claim(identity: str, lease: ObservedLease | None, lease_s: float) -> TakeLease | WaitForLease:
    """Returns the next step. The longer of `lease_s` and the holder's duration applies."""
    if lease is None:
        return TakeLease("there is no lease")
    if lease.holder == identity:
        return TakeLease("renewal")
    if not lease.holder:
        return TakeLease("the lease was released")
    duration_s = max(lease_s, lease.lease_s)
    if lease.unchanged_s > duration_s:
        return TakeLease(f"{lease.holder} did not renew for {duration_s:.0f} s")
    return WaitForLease(lease.holder, duration_s - lease.unchanged_s)
