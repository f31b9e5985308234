"""What a router tells at /v1/health and /v1/metrics: the door's `Vitals`, with what its groups last told of themselves."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx_api.account import MemoryAccount
from phalanx_api.speculation import SpeculationCounts
from phalanx_frontend.vitals import Health, Totals, Vitals
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import Links


class FleetVitals:
    """Implements the door's `Vitals`. Requests are those of this router; what was proposed is so for the requests of all."""

    def __init__(self, door: Vitals, links: Links) -> None:
        self._door = door
        self._links = links

    def health(self) -> Health:
        """That of the door."""
        return self._door.health()

    def totals(self) -> Totals:
        """The door's requests, and what became of proposals in the engines of all groups."""
        counts = [_counts(link) for link in self._links.all()]
        proposed, accepted = sum(sum(one.proposed) for one in counts), sum(sum(one.accepted) for one in counts)
        return replace(self._door.totals(), proposed=proposed, accepted=accepted)

    def memory(self) -> Sequence[MemoryAccount]:
        """Nothing: a router has no rank. Each runtime tells of its own."""
        return ()

    def kv_bytes_per_token(self) -> int | None:
        """That of the group where it is most: groups of two revisions may differ."""
        told = [link.told for link in self._links.all()]
        return max((one.served.page_bytes // one.page_size for one in told), default=0) or None


def _counts(link: LeaderLink) -> SpeculationCounts:
    return link.told.load.speculation if link.told.load is not None else SpeculationCounts()
