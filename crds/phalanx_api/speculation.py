"""Words of speculation that the door, the link and the engine share: how tokens are proposed, and what became of them."""

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

Method = Literal["none", "ngram", "draft", "self_draft"]
"""Who proposes: nobody; earlier occurrences of the last tokens; a draft model; the target's first layers."""
METHODS: tuple[Method, ...] = get_args(Method)
METHOD_OF: Mapping[str, Method] = {"None": "none", "NGram": "ngram", "Draft": "draft", "SelfDraft": "self_draft"}
"""By the names that a service's manifest has for them."""
MAX_DEPTH = 16
"""Most tokens that are proposed for one request in a step."""
TreeShape = Literal["best_first", "static"]
"""Who chooses which branches there are: the draft, or the scheduler before it."""
TREE_SHAPES: tuple[TreeShape, ...] = get_args(TreeShape)
SHAPE_OF: Mapping[str, TreeShape] = {"BestFirst": "best_first", "Static": "static"}
"""By the names that a service's manifest has for them."""
MAX_WIDTH = 8
"""Most tokens that are proposed for one place."""


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """How proposals branch.

    widths: the most tokens proposed behind the request's own, then behind each of those, and so on; behind deeper ones one.
    Empty is a chain. shape: best_first lets a draft choose which, by its own shares; static chooses before it drafts, by what was
    accepted of late.
    """

    widths: list[int] = []
    shape: TreeShape = "best_first"


CHAIN = Tree()
"""One token behind the other."""


class Speculation(msgspec.Struct, frozen=True, array_like=True):
    """What a request wants of speculation. None is what the service does. It changes times, never tokens."""

    method: Method | None = None
    num_tokens: int | None = None
    """Most tokens that are proposed for it in a step."""
    tree: Tree | None = None


class SpeculationCounts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What became of proposals since the start of an engine.

    `paths`: requests for which tokens were proposed in a step, one for each such step. `proposed[p]` and `accepted[p]` count
    tokens at position p of a path. `saved`: tokens that were told beyond one for each step and request. `draft_s`: time of the
    ranks in drafts; `verify_s`: by how much steps with proposals took longer than their fitted time without, drafts not counted.
    """

    paths: int = 0
    proposed: list[int] = []
    accepted: list[int] = []
    saved: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    lost: str = ""
    """Why the ranks draft no more; empty while they can, or never could."""
    branched: int = 0
    """Accepted tokens that were not the first ones proposed for their place."""
