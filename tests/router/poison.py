"""A request that kills every group that runs it."""

from phalanx_api import wire
from tests.router.fakes import FakeLeader, Script

POISON = [6, 6, 6]
"""Its prompt."""


def is_poison(request: wire.Request) -> bool:
    return request.prompt == POISON


def poisoned_leaders(names: str) -> list[FakeLeader]:
    """Leaders that die of the request, one for each character."""
    return [FakeLeader(name, Script(kills=is_poison)) for name in names]
