"""Which group takes a request: of those that can, the one with the least outstanding tokens.

Groups that just failed or refused this request are left out. Ties are broken by a draw that the caller gives, so that
several routers that see the same loads do not all pick the same group.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx_router.route.view import GroupView


@dataclass(frozen=True, slots=True)
class Choice:
    """The group with this key, and why."""

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class NoChoice:
    """No group can take the request now, and why."""

    why: str


def choose(groups: Sequence[GroupView], excluded: Collection[str], draw: float) -> Choice | NoChoice:
    """The group for a request. `draw` is uniform in [0, 1)."""
    if not groups:
        return NoChoice("no group is ready")
    left = [group for group in groups if group.key not in excluded]
    if not left:
        return NoChoice(f"each of {len(groups)} ready groups failed or refused this request")
    least = min(group.outstanding_tokens for group in left)
    tied = [group for group in left if group.outstanding_tokens == least]
    chosen = tied[int(draw * len(tied))]
    return Choice(chosen.key, f"least outstanding tokens ({least}) of {len(left)} groups")
