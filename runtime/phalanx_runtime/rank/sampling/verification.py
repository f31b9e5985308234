"""One draw of a step: the tokens that a row is given along its path, one where nothing is proposed.

    proposals       d1   d2   d3
    drawn      t0'  t1'  t2'           t0' = d1, t1' = d2, t2' is another than d3: the run is t0', t1', t2'

In a tree the path goes on to the child that is the token drawn. A token is looked at only if all before it in its branch are the
proposed ones, so it is what would be drawn without proposals.
"""

from collections.abc import Sequence

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import OWN, chain, levels
from phalanx_runtime.rank.sampling.row import SamplingRow


class VerificationNode:
    """Behind one proposal of a run: the row of the step's scores and the output index. `token` is what was drawn there."""

    __slots__ = ("index", "node", "place", "run", "token")

    def __init__(self, run: "VerificationRun", node: int, place: int, index: int) -> None:
        self.run = run
        self.node = node
        self.place = place
        self.index = index
        self.token = 0


class VerificationRun:
    """The draw of a row from output index `index` on, whose scores begin at `first`, along these proposals; `parents` empty is a
    chain."""

    __slots__ = (
        "_first",
        "_index",
        "_is_open",
        "_node",
        "_parents",
        "_path",
        "details",
        "failure",
        "is_complete",
        "row",
        "taken",
        "tokens",
        "wants_details",
    )

    def __init__(self, row: SamplingRow, index: int, first: int, path: Sequence[int], parents: Sequence[int] = ()) -> None:
        self.row = row
        self.tokens: list[int] = []
        self.details: list[wire.TokenDetail] = []
        self.wants_details = row.sampling.logprobs is not None or row.sampling.return_gaps
        self.failure: str | None = None
        """Why nothing was drawn; then the only token is none."""
        self.is_complete = False
        """Whether its grammar is complete with the last token."""
        self.taken: list[int] = []
        """The proposals that it accepted."""
        self._index = index
        self._first = first
        self._path = path
        self._parents = tuple(parents or chain(len(path)))
        self._node = OWN
        """The last of `taken`: behind it the next token is drawn."""
        self._is_open = True

    def next(self) -> list[VerificationNode]:
        """Where to draw now; nothing once the run has ended. All places at once where no draw depends on the one before."""
        if not self._is_open:
            return []
        if self.row.has_state:
            return [VerificationNode(self, self._node, self._first + 1 + self._node, self._index + len(self.tokens))]
        behind = [VerificationNode(self, OWN, self._first, self._index)]
        for node, level in enumerate(levels(self._parents)):
            behind.append(VerificationNode(self, node, self._first + 1 + node, self._index + 1 + level))
        return behind

    def take(self, spot: VerificationNode, token: int, failure: str | None) -> bool:
        """Whether the token that was drawn at this place belongs to the run: all before it are as proposed."""
        if not self._is_open or spot.node != self._node:
            return False
        if failure is not None:
            self._is_open = False
            if not self.tokens:  # further on the run just ends: the next step finds the same
                self.failure = failure
                self.tokens.append(token)
            return False
        spot.token = token
        self.tokens.append(token)
        if self.row.has_state:
            self.is_complete = self.row.drew(token)
        self._is_open = not self.is_complete and self._go_on(token)
        return True

    def _go_on(self, token: int) -> bool:
        """Whether this token was proposed behind the last one; then the next is drawn behind it."""
        for node in range(self._node + 1, len(self._path)):
            if self._parents[node] == self._node and self._path[node] == token:
                self._node = node
                self.taken.append(node)
                return True
        return False

    def all_details(self) -> Sequence[wire.TokenDetail | None]:
        """What was asked of each token, or None for each."""
        return self.details if len(self.details) == len(self.tokens) else [None] * len(self.tokens)
