"""What an engine knows of one request that wants proposals."""

from dataclasses import dataclass, field

from phalanx_api.speculation import CHAIN, Method, Tree
from phalanx_runtime.core.acceptance import FADE_OF_REQUEST, Shares
from phalanx_runtime.core.lookup import Lookup


@dataclass(slots=True)
class Proposing:
    """By which method, how many at once at most, and how they may branch.

    missing_from: from this position on a draft model may have computed nothing, for the pages came by a move; None: it has
    what plans brought.
    """

    method: Method
    most: int
    tree: Tree = CHAIN
    lookup: Lookup = field(default_factory=Lookup)
    shares: Shares = field(default_factory=lambda: Shares(FADE_OF_REQUEST))
    missing_from: int | None = None
    last_step: int = 0
