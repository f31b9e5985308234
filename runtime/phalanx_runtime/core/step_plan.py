"""The contract between the scheduler and the ranks: one step's work, and its result.

A rank keeps, for each row, its page table and its sampling parameters; a plan carries differences only. One rank draws the
tokens, rank 0 gets them, and a later plan carries them, so no other rank needs them.
"""

import msgspec

from phalanx_api import wire


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A row starts anew: whatever it held before is forgotten.

    `history` are all tokens of the request so far, its prompt first, where its sampling depends on them (penalties, bad words,
    grammar), or where prompt logprobs are asked for; else empty. Tokens drawn later are known to the rank that draws them.
    """

    row: int
    sampling: wire.Sampling
    num_prompt: int = 0
    history: list[int] = []


class Growth(msgspec.Struct, frozen=True, array_like=True):
    """How far a tree may grow whose shape the proposer chooses, the likeliest proposals first.

    widths: the most children that proposals at each level have, those of the request's own token first; deeper ones have one.
    levels: the most proposals in a branch, so that a draft has as many passes.
    """

    widths: list[int]
    levels: int


class Path(msgspec.Struct, frozen=True, array_like=True):
    """Proposed tokens of one request: the last `depth` of those that it computes in this step, behind its own.

    request: its index into `rows`. With `is_drafted` the plan does not know them, and has a 0 for each: the proposer of the first
    stage fills them in. `parents`: the shape, see `trees`; empty is a chain. With `growth` the proposer fills it in, too.

    Proposal p lies in the slot of position q + p, where the request's own tokens end before q, and is computed as if it were at
    q + its level: it sees the request's own tokens and those of its branch.
    """

    request: int
    depth: int
    is_drafted: bool = False
    parents: list[int] = []
    growth: Growth | None = None


class CatchUp(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request that a draft model computes in this step, from position `start` on: it lacks them, nothing before.

    request: its index into `rows`. Where the request's path is drafted they end before its own tokens, which the draft computes
    as well; else they may end anywhere up to the end of these.
    """

    request: int
    start: int
    tokens: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One forward pass over packed tokens.

    rows, starts, counts and pages are parallel: request in row `rows[i]` has `starts[i]` tokens in its pages and computes
    the next `counts[i]`; `pages[i]` are appended to the row's page table before the pass. A row appears at most once.
    tokens: packed ids, sum(counts) of them. draws: pairs (i, j): after the pass draw output index j of request i (an index
    into `rows`) from the logits of its last computed token. copies: pairs (from, to) of pages; before the pass the second
    becomes a bit-copy of the first, in this order.

    paths: requests whose last tokens are proposals, each with a draw (i, j), in the order of the draws. There index j is drawn
    behind the last token before the proposals, j + 1 behind the one of them that is the token drawn, and so on; the drawing stops
    where none is. cuts: pairs (i, n): the row keeps the first n pages of its table before `pages[i]` are appended, for those
    after them were taken for proposals that came to nothing. strays: pairs (i, positions): what lies in these slots of row i
    belongs right before `starts[i]`, in this order, and is copied there before the pass: accepted proposals of a tree.
    catch_ups: at most one for each request. A draft model computes these tokens and those of drafted paths, and no others.
    """

    step: int
    admitted: list[NewRow]
    rows: list[int]
    starts: list[int]
    counts: list[int]
    pages: list[list[int]]
    tokens: list[int]
    draws: list[tuple[int, int]]
    copies: list[tuple[int, int]] = []
    paths: list[Path] = []
    cuts: list[tuple[int, int]] = []
    strays: list[tuple[int, list[int]]] = []
    catch_ups: list[CatchUp] = []

    @property
    def depths(self) -> list[int]:
        """How many proposals are looked at in each draw; parallel to `draws`."""
        depth_of = {path.request: path.depth for path in self.paths}
        return [depth_of.get(request, 0) for request, _ in self.draws]


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """Drawn tokens, parallel to the plan's `draws`; `details` too, or empty when no request asked for any.

    Where the plan has paths, draw d gave `runs[d]` tokens, at least one, at as many output indexes; tokens and details of all
    draws lie one after the other. `runs` is empty when each gave one. `taken`: pairs (d, proposals): those that draw d accepted,
    where they are not the first ones. `shapes`: parents of the proposals of each path with `growth`, in their order. `undrafted`:
    (p, proposals) of the p-th path with `is_drafted` for which there was no token.

    `ended`: positions in `draws` whose request is complete by its grammar. `prompt_details`: (i, start, details of the prompt
    tokens from `start` on) for request i of the plan. `failed`: positions in `draws` where no token could be drawn (the one in
    `tokens` is none), with the reason for the client; only such a request ends. `over`: positions whose request was complete by
    its grammar before, with the tokens that it came with; none was drawn. What is told of a draw with a run is told of its last
    token. `draft_s`: how long the ranks took to draft proposals. `lost`: why they cannot draft any more.
    """

    step: int
    tokens: list[int]
    details: list[wire.TokenDetail | None] = []
    ended: list[int] = []
    prompt_details: list[tuple[int, int, list[wire.TokenDetail]]] = []
    failed: list[tuple[int, str]] = []
    over: list[int] = []
    runs: list[int] = []
    draft_s: float = 0.0
    lost: str = ""
    taken: list[tuple[int, list[int]]] = []
    shapes: list[list[int]] = []
    undrafted: list[tuple[int, list[int]]] = []


class PoolShape(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 measured at start: number of pages and tokens per page."""

    num_pages: int
    page_size: int


# What rank 0 asks of the rank that draws, where that is another one, so that no step compiles a grammar. Records only.
# Compile(number)  rank 0 -> drawer     among the plans; the drawer compiles beside its steps Compiled(number) drawer -> rank
# 0     among the results; from now on the drawer holds the grammar, until its number is dropped


class CompileOrder(msgspec.Struct, frozen=True, array_like=True, tag="compile"):
    """Compile and hold this grammar; hold those of the `dropped` numbers no longer."""

    number: int
    grammar: wire.Grammar
    dropped: list[int] = []


class CompileResult(msgspec.Struct, frozen=True, array_like=True, tag="compiled"):
    """The grammar is held; or it is not, for the reason told. `is_bug`: not the grammar's fault; the drawer's log says more."""

    number: int
    why: str = ""
    is_bug: bool = False
