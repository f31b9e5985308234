"""Verification: the tokens that a draw gives along its draft tokens.

    draft tokens       d1   d2   d3
    sampled       t0   t1   t2            t0 = d1, t1 = d2, t2 != d3: the run is t0, t1, t2

In a tree the run continues at the child that equals the sampled token. Each token equals the one sampled without speculation.
"""

from collections.abc import Sequence

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import ROOT, chain, levels
from phalanx_runtime.rank.sampling.row import SamplingRow


class VerificationNode:
    """Position after a draft token, or after the own tokens."""

    __slots__ = ("index", "logits_row", "node", "run", "token")

    def __init__(self, run: "VerificationRun", node: int, logits_row: int, index: int) -> None:
        self.run = run
        self.node = node
        self.logits_row = logits_row
        """Of the step."""
        self.index = index
        """Output index."""
        self.token = 0
        """Sampled here."""


class VerificationRun:
    """One draw from output index `index` on, with logits from row `first` on."""

    __slots__ = (
        "_draft_tokens",
        "_first",
        "_index",
        "_is_open",
        "_node",
        "_parents",
        "accepted",
        "details",
        "failure",
        "is_complete",
        "row",
        "tokens",
        "wants_details",
    )

    def __init__(
        self, row: SamplingRow, index: int, first: int, draft_tokens: Sequence[int], parents: Sequence[int] = ()
    ) -> None:
        self.row = row
        self.tokens: list[int] = []
        self.details: list[wire.TokenDetail] = []
        self.wants_details = row.sampling.logprobs is not None or row.sampling.return_gaps
        self.failure: str | None = None
        """Why no token was sampled; `tokens` then has one invalid token."""
        self.is_complete = False
        """Whether the grammar is complete."""
        self.accepted: list[int] = []
        """Nodes of the path."""
        self._index = index
        self._first = first
        self._draft_tokens = draft_tokens
        self._parents = tuple(parents or chain(len(draft_tokens)))
        self._node = ROOT
        """The last accepted node."""
        self._is_open = True

    def next_nodes(self) -> list[VerificationNode]:
        """Returns the nodes to sample at next: all at once without state, empty at the end."""
        if not self._is_open:
            return []
        if self.row.has_state:
            return [VerificationNode(self, self._node, self._first + 1 + self._node, self._index + len(self.tokens))]
        nodes = [VerificationNode(self, ROOT, self._first, self._index)]
        for node, level in enumerate(levels(self._parents)):
            nodes.append(VerificationNode(self, node, self._first + 1 + node, self._index + 1 + level))
        return nodes

    def add(self, at: VerificationNode, token: int, failure: str | None) -> bool:
        """Adds the token sampled at a node. Returns whether all draft tokens before it were accepted."""
        if not self._is_open or at.node != self._node:
            return False
        if failure is not None:
            self._is_open = False
            if not self.tokens:  # later in the run it only ends the run: the next step fails again
                self.failure = failure
                self.tokens.append(token)
            return False
        at.token = token
        self.tokens.append(token)
        if self.row.has_state:
            self.is_complete = self.row.append(token)
        self._is_open = not self.is_complete and self._accept_child(token)
        return True

    def _accept_child(self, token: int) -> bool:
        """Accepts the child that equals `token`, if any."""
        for node in range(self._node + 1, len(self._draft_tokens)):
            if self._parents[node] == self._node and self._draft_tokens[node] == token:
                self._node = node
                self.accepted.append(node)
                return True
        return False

    def all_details(self) -> Sequence[wire.TokenDetail | None]:
        """Details parallel to `tokens`."""
        return self.details if len(self.details) == len(self.tokens) else [None] * len(self.tokens)
