"""What an engine knows of one request that wants proposals."""

from dataclasses import dataclass, field

from phalanx_api.speculation import CHAIN, Method, Tree
from phalanx_runtime.core.acceptance import FADE_OF_REQUEST, Shares
from phalanx_runtime.core.ngram import Lookup


@dataclass(slots=True)
class Proposing:
    """By which method, how many at once at most, and how they may branch.

    num_drafted_pages: so many of its first pages a draft model has computed whole; see `catching_up`.
    """

    method: Method
    most: int
    tree: Tree = CHAIN
    lookup: Lookup = field(default_factory=Lookup)
    shares: Shares = field(default_factory=lambda: Shares(FADE_OF_REQUEST))
    num_drafted_pages: int = 0
    last_step: int = 0
