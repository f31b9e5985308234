"""Who leads: the answer that a Lease object gives to one candidate.

A lease is held as long as it keeps changing. How old it is, each candidate measures by its own clock, from when it first saw
the lease as it is: clocks of different machines are never compared.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """The lease as it is: by whom, its version, and how long that version has been seen by us."""

    holder: str
    resource_version: str
    unchanged_s: float


@dataclass(frozen=True, slots=True)
class Take:
    """Write our name into the lease."""

    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Someone else leads, for so many seconds at least."""

    holder: str
    left_s: float = 0.0


def claim(me: str, held: Held | None, lease_s: float) -> Take | Wait:
    """What a candidate does now. `held` is None when there is no lease."""
    if held is None:
        return Take("there is no lease")
    if held.holder == me:
        return Take("renewal")
    if not held.holder:
        return Take("the lease was given back")
    if held.unchanged_s > lease_s:
        return Take(f"{held.holder} did not renew for {lease_s:.0f} s")
    return Wait(held.holder, lease_s - held.unchanged_s)
