"""The guard against attraction: a group that just gave requests away does not look free at once.

For 2 s what left is added to the group again when a newcomer's cost is reckoned, less and less. Without it a group that was
relieved draws new prompts, becomes hot again, and gives more away (balancing.md 3.4).
"""

from dataclasses import dataclass, replace

from phalanx_router.balancing.projection import pages_of
from phalanx_router.routing.view import GroupView

FADES_S = 2.0


@dataclass(frozen=True, slots=True)
class _Gone:
    context: int
    at: float


class AttractionGuard:
    """What left each group (by key) lately."""

    def __init__(self) -> None:
        self._gone: dict[str, list[_Gone]] = {}

    def left(self, key: str, context: int, now: float) -> None:
        """Notes a request that has left this group."""
        self._gone.setdefault(key, []).append(_Gone(context, now))

    def burdened(self, view: GroupView, now: float) -> GroupView:
        """The group as it should look to newcomers."""
        gone = self._gone.get(view.key)
        if gone is None:
            return view
        gone = self._gone[view.key] = [entry for entry in gone if now - entry.at < FADES_S]
        if not gone:
            del self._gone[view.key]
            return view
        shares = [1 - max(0.0, now - entry.at) / FADES_S for entry in gone]
        context = round(sum(share * entry.context for share, entry in zip(shares, gone, strict=True)))
        return replace(
            view,
            running=view.running + round(sum(shares)),
            context_tokens=view.context_tokens + context,
            used_pages=view.used_pages + pages_of(context, view),
        )
