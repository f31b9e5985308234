"""Speculation types that the API server, the link and the engine share."""

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

Method = Literal["none", "ngram", "draft", "self_draft"]
"""Source of draft tokens."""
METHODS: tuple[Method, ...] = get_args(Method)
METHOD_OF: Mapping[str, Method] = {"None": "none", "NGram": "ngram", "Draft": "draft", "SelfDraft": "self_draft"}
"""Methods by their manifest names."""
MAX_DEPTH = 16
"""Maximum draft tokens of one request in a step."""
TreeShape = Literal["best_first", "static"]
"""Choice of branches: by the draft model's probabilities, or by the scheduler before it drafts."""
TREE_SHAPES: tuple[TreeShape, ...] = get_args(TreeShape)
SHAPE_OF: Mapping[str, TreeShape] = {"BestFirst": "best_first", "Static": "static"}
"""Shapes by their manifest names."""
MAX_WIDTH = 8
"""Maximum draft tokens of one position."""


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """Shape of a request's tree of draft tokens."""

    widths: list[int] = []  # maximum children of a node, by tree level; deeper levels have 1; empty: a chain
    shape: TreeShape = "best_first"


CHAIN = Tree()


class Speculation(msgspec.Struct, frozen=True, array_like=True):
    """Settings of a request; null fields take the service's."""

    method: Method | None = None
    num_tokens: int | None = None  # maximum draft tokens in a step
    tree: Tree | None = None


class SpeculationCounts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Counters since the start of an engine."""

    paths: int = 0  # requests with draft tokens, summed over steps
    drafted: list[int] = []  # draft tokens, by position in a path
    accepted: list[int] = []  # the same for accepted ones
    saved: int = 0  # output tokens beyond one per request and step
    draft_s: float = 0.0  # time of drafting
    verify_s: float = 0.0  # step time beyond that without draft tokens, drafting excluded
    draft_failure: str = ""  # why the ranks stopped drafting
    branched: int = 0  # accepted tokens that were not the first candidate of their position
