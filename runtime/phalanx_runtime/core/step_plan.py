"""The contract between the scheduler and the ranks: the work of one step and its result.

A rank keeps the page table and the sampling parameters of each row; a plan has differences only. The sampling rank samples the
tokens, rank 0 receives them, and a later plan carries them.
"""

import msgspec

from phalanx_api import wire


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A row starts with a new request; its former state is dropped."""

    row: int
    sampling: wire.Sampling
    num_prompt: int = 0
    history: list[int] = []
    """All tokens of the request, prompt first, if sampling depends on them (penalties, bad words, grammar) or prompt logprobs are
    requested; else empty. The sampling rank adds later tokens itself."""


class Growth(msgspec.Struct, frozen=True, array_like=True):
    """Bounds of a tree whose shape the proposer chooses, most probable draft tokens first."""

    widths: list[int]
    """Most children per node, by level from the request's own token; deeper levels have one."""
    levels: int
    """Most draft tokens in a branch, which is the number of draft passes."""


class Path(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Draft tokens of one request: the last `depth` of the tokens that it computes in this step.

    Draft token p has the slot of position q + p, where the request's own tokens end before q, and the position q + its level; it
    attends to the request's own tokens and to its branch.
    """

    request: int
    """Index into `rows`."""
    depth: int
    is_drafted: bool = False
    """The plan has a 0 for each draft token; the proposer of the first stage fills them in."""
    parents: list[int] = []
    """Shape of the tree, see `core.draft_tree`; empty for a chain."""
    growth: Growth | None = None
    """The proposer also fills in the shape."""


class CatchUp(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request that a draft model backfills in this step, from position `start` on; it has all before.

    For a request with a drafted path they end before its own tokens, which the draft model computes as well; else they may end
    anywhere up to the end of these.
    """

    request: int
    """Index into `rows`."""
    start: int
    tokens: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan", kw_only=True):
    """One forward pass over packed tokens. rows, starts, counts and pages are parallel; a row appears at most once."""

    step: int
    admitted: list[NewRow]
    rows: list[int]
    starts: list[int]
    """Tokens in the row's pages."""
    counts: list[int]
    """Tokens that the row computes."""
    pages: list[list[int]]
    """Pages appended to the row's page table before the pass."""
    tokens: list[int]
    """Packed ids, sum(counts) of them."""
    draws: list[tuple[int, int]]
    """Pairs (i, j): sample output index j of request i (an index into `rows`) from the logits of its last computed token."""
    copies: list[tuple[int, int]] = []
    """Pairs (from, to) of pages, copied in this order before the pass."""
    paths: list[Path] = []
    """Requests with draft tokens, each with a draw (i, j), in the order of the draws. Index j is sampled at the last own token, j
    + 1 at the draft token that equals the sampled one, and so on, until no draft token matches."""
    cuts: list[tuple[int, int]] = []
    """Pairs (i, n): the row keeps the first n pages of its table before `pages[i]` are appended; the others were for rejected
    tokens."""
    strays: list[tuple[int, list[int]]] = []
    """Pairs (i, positions): the contents of these slots of row i belong right before `starts[i]`, in this order, and are copied
    there before the pass: accepted tokens of a tree."""
    catch_ups: list[CatchUp] = []
    """At most one per request. A draft model computes these tokens and those of drafted paths, and no others."""

    @property
    def depths(self) -> list[int]:
        """Number of draft tokens of each draw, parallel to `draws`."""
        depth_of = {path.request: path.depth for path in self.paths}
        return [depth_of.get(request, 0) for request, _ in self.draws]


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result", kw_only=True):
    """Sampled tokens and the results of draft tokens. `tokens` is parallel to the plan's `draws`."""

    step: int
    tokens: list[int]
    details: list[wire.TokenDetail | None] = []
    """Logprobs, parallel to `tokens`; empty if no request asked for them."""
    ended: list[int] = []
    """Positions in `draws` whose request is complete by its grammar."""
    prompt_details: list[tuple[int, int, list[wire.TokenDetail]]] = []
    """(i, start, details of the prompt tokens from `start` on) for request i of the plan."""
    failed: list[tuple[int, str]] = []
    """Positions in `draws` where no token could be sampled (the value in `tokens` is invalid), with the reason for the client.
    Only such a request ends."""
    over: list[int] = []
    """Positions whose request was complete by its grammar before this step; no token was sampled."""
    runs: list[int] = []
    """With paths: draw d gave `runs[d]` tokens, at least one, at consecutive output indexes; tokens and details are concatenated.
    Empty if each draw gave one. `ended`, `failed` and `over` then refer to the last token of the draw."""
    draft_s: float = 0.0
    """Time of the draft passes."""
    lost: str = ""
    """Why the ranks can no longer draft."""
    taken: list[tuple[int, list[int]]] = []
    """Pairs (d, accepted draft tokens) where they are not the first ones."""
    shapes: list[list[int]] = []
    """Parents of the draft tokens of each path with `growth`, in order."""
    undrafted: list[tuple[int, list[int]]] = []
    """(p, draft positions) of the p-th drafted path for which there was no token."""


class PoolShape(msgspec.Struct, frozen=True, array_like=True):
    """Page pool as measured by rank 0 at its start."""

    num_pages: int
    page_size: int


# Grammar compilation on the sampling rank, where that is not rank 0, so that no step compiles a grammar.
#     CompileOrder    rank 0 -> sampling rank    among the plans; compiled in a thread
#     CompileResult   sampling rank -> rank 0    among the results; the grammar is kept until its number is dropped


class CompileOrder(msgspec.Struct, frozen=True, array_like=True, tag="compile"):
    """Compile and keep this grammar; drop those of the numbers in `dropped`."""

    number: int
    grammar: wire.Grammar
    dropped: list[int] = []


class CompileResult(msgspec.Struct, frozen=True, array_like=True, tag="compiled"):
    """The grammar is compiled; or `why` it is not. `is_bug`: an internal error; see the log of the sampling rank."""

    number: int
    why: str = ""
    is_bug: bool = False
