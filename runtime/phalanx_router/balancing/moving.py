"""Moves that are under way, and the groups as they will be when those have ended. A stream whose move failed rests a while."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx_router.balancing.projection import pages_of, without
from phalanx_router.balancing.records import Proposal
from phalanx_router.routing.view import GroupView

REST_S = 1.0


class Moving:
    """Proposals that were made and have not ended, by stream."""

    def __init__(self) -> None:
        self._proposals: dict[str, Proposal] = {}
        self._resting: dict[str, float] = {}

    def keeps(self, stream: str, now: float) -> bool:
        """Whether this stream is moving, or rests."""
        return stream in self._proposals or now < self._resting.get(stream, now)

    def begin(self, proposal: Proposal) -> None:
        """Notes a move."""
        self._proposals[proposal.stream] = proposal

    def end(self, stream: str, is_moved: bool, now: float) -> Proposal | None:
        """Forgets a move, and gives it back; None when there was none."""
        proposal = self._proposals.pop(stream, None)
        if proposal is not None and not is_moved:
            self._resting = {name: until for name, until in self._resting.items() if until > now}
            self._resting[stream] = now + REST_S
        return proposal

    def settled(self, views: Sequence[GroupView]) -> dict[str, GroupView]:
        """The groups by key, as if all moves had succeeded. What a target says it reserved is not counted twice."""
        after = {view.key: view for view in views}
        coming: dict[str, int] = {}
        for proposal in self._proposals.values():
            if (source := after.get(proposal.source)) is not None:
                after[source.key] = without(source, proposal.context)
            if (target := after.get(proposal.target)) is not None:
                coming[target.key] = coming.get(target.key, 0) + pages_of(proposal.context, target)
                after[target.key] = replace(
                    target, running=target.running + 1, context_tokens=target.context_tokens + proposal.context
                )
        for key, pages in coming.items():
            after[key] = replace(after[key], reserved_pages=max(after[key].reserved_pages, pages))
        return after
