"""The contract between scheduler and ranks: the work of one step and its result.

A rank keeps page table and sampling parameters of each row; a plan contains changes.
"""

import msgspec

from phalanx_api import wire

LAST_SAMPLED = -2
"""In a plan: the token that the row samples in the previous plan, which is in flight. Only the last token of a row."""


HostCopy = tuple[bool, int, int]
"""(is_load, device page or part, slot)"""


class HostResize(msgspec.Struct, frozen=True, array_like=True):
    """Gives the host tier another number of slots, the first ones."""

    num_slots: int
    moves: list[tuple[int, int]] = []
    """(source, target): pages that move from slots to be removed, in any order; no slot occurs twice."""


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """Assigns a row to a new request, and drops the row's state."""

    row: int
    sampling: wire.Sampling
    num_prompt: int = 0
    history: list[int] = []
    """All tokens so far, if `core.request.needs_history`; else empty. The sampling rank appends later ones."""
    pooling: wire.Pooling | None = None
    """The step with the last of `num_prompt` tokens gives a vector instead of a token."""
    adapter: int = 0
    """Slot of its adapter, from 1; 0: none."""
    images: list[wire.Image] = []
    """Of the prompt, without those whose tokens are all computed."""
    pair_start: int = 0
    """See `wire.Request`."""
    image_scope: bytes = b""
    """Key before its first page: requests share encoded images as they share pages."""
    position_shift: int = 0
    """`wire.Image.shift` of all images that are not in `images`."""


class TreeBounds(msgspec.Struct, frozen=True, array_like=True):
    """Bounds of a draft tree with a shape that the proposer chooses."""

    widths: list[int]
    """Maximum children per node, by level; 1 at deeper levels."""
    levels: int
    """Maximum branch length; the number of draft passes."""


class DraftPath(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Draft tokens of one request: the last `depth` tokens that it computes.

    With own tokens before q, draft token p has the slot of position q + p and the position q + its level, and attends to the own
    tokens and its branch.
    """

    request: int
    """Index into `rows`."""
    depth: int
    is_drafted: bool = False
    """The plan has zeros, which the proposer of the first stage replaces."""
    parents: list[int] = []
    """See `core.draft_tree`; empty for a chain."""
    tree_bounds: TreeBounds | None = None
    """Set if the proposer also chooses the shape."""


class DraftBackfill(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request that a draft model lacks and computes in this step; it has all before `start`.

    They may include the request's tokens of this step, except those of a drafted path, which the draft model computes anyway.
    """

    request: int
    """Index into `rows`."""
    start: int
    tokens: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan", kw_only=True):
    """One forward pass over packed tokens. `rows`, which are unique, `starts`, `counts` and `pages` are parallel."""

    step: int
    admitted: list[NewRow]
    rows: list[int]
    starts: list[int]
    """Computed tokens of each row."""
    counts: list[int]
    """Tokens to compute, by row."""
    pages: list[list[int]]
    """Pages to append to the row's page table before the pass."""
    tokens: list[int]
    """Packed, sum(counts) of them, or `LAST_SAMPLED`."""
    draws: list[tuple[int, int]]
    """(i, j): sample output index j of request i from the logits of its last computed token."""
    copies: list[tuple[int, int]] = []
    """(source, target): pages to copy in this order before the pass."""
    parts: list[tuple[int, int]] = []
    """(page, part) in this order, before all other changes: layers with a window use this part instead of the page, if pages have
    parts (`core.window_parts`)."""
    part_copies: list[tuple[int, int]] = []
    """(source, target): parts to copy, beside `copies`."""
    paths: list[DraftPath] = []
    """In the order of their draws (i, j): index j is sampled at the last own token, j + 1 at the draft token equal to that
    sample, and so on until no draft token matches."""
    truncations: list[tuple[int, int]] = []
    """(i, n): before `pages[i]` are appended, request i keeps the first n pages of its table; the rest was for rejected
    tokens."""
    relocations: list[tuple[int, list[int]]] = []
    """(i, positions): slots of accepted tree tokens, copied to those right before `starts[i]` before the pass."""
    backfills: list[DraftBackfill] = []
    """At most one per request. A draft model computes only these and drafted paths."""
    host_copies: list[HostCopy] = []
    """Between device and host memory, in this order, before `copies` and beside the pass; complete before the next plan."""
    host_keys: list[bytes] = []
    """Keys of the stored pages, in order, if a disk keeps them too; else empty."""
    part_host_copies: list[HostCopy] = []
    """The same for parts of pages, with slots of their own."""
    part_host_keys: list[bytes] = []
    """Keys of the pages of the stored parts, as `host_keys`."""
    awaits_host_copies: bool = False
    """The pass, `copies` and `part_copies` use their device pages or parts, so they wait."""
    host_resize: HostResize | None = None
    """After `host_copies`; complete before the next plan."""
    part_host_resize: HostResize | None = None
    """The same for parts of pages."""
    state_loads: list[tuple[int, int]] = []
    """(row, slot): snapshots of states that rows get before the pass."""
    state_saves: list[tuple[int, int]] = []
    """(row, slot): snapshots of rows after the pass, in order."""
    image_tiles: int = 0
    """`wire.Image.work` of the images with tokens in this step, which may have to be encoded."""
    state_stores: list[tuple[int, int]] = []
    """(slot, slot in host memory): snapshots that are copied before the pass, after `state_loads`, in order."""
    state_keys: list[tuple[bytes, int]] = []
    """Of each of `state_stores`, if a disk keeps them too: the key of the page at its end, and its tokens; else empty."""
    left_rows: list[int] = []
    """Rows that their requests left since the previous plan, before any is in `admitted` again."""

    @property
    def depths(self) -> list[int]:
        """Number of draft tokens of each draw."""
        depth_of = {path.request: path.depth for path in self.paths}
        return [depth_of.get(request, 0) for request, _ in self.draws]


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result", kw_only=True):
    """Sampled tokens and verified draft tokens. A draw is an index into the plan's `draws`."""

    step: int
    tokens: list[int]
    """Of all draws, in order."""
    details: list[wire.TokenDetail | None] = []
    """Logprobs, parallel to `tokens`; empty if not requested."""
    complete: list[int] = []
    """Draws that complete their request's grammar with the last token."""
    prompt_details: list[tuple[int, int, list[wire.TokenDetail]]] = []
    """(i, start, logprobs of prompt tokens from `start` on) of request i."""
    failed: list[tuple[int, str]] = []
    """(draw, reason for the client): no token could be sampled, so the request ends; the value is invalid."""
    already_complete: list[int] = []
    """Draws with a grammar that was complete before; the value is invalid."""
    run_lengths: list[int] = []
    """Number of tokens of each draw, at consecutive output indices; empty if one each."""
    draft_s: float = 0.0
    """Time of draft passes."""
    draft_failure: str = ""
    """Reason if the ranks can no longer draft."""
    accepted: list[tuple[int, list[int]]] = []
    """(draw, accepted nodes), if they are not the first nodes."""
    shapes: list[list[int]] = []
    """Parents of each path with `tree_bounds`, in order."""
    undrafted: list[tuple[int, list[int]]] = []
    """(p, nodes without a token) of drafted path p."""
    busy_s: float = 0.0
    """Time of rank 0's device in the step; on CPU the time of its computation, without waits for copies."""
    loaded_pages: int = 0
    """Pages that rank 0 loaded from host memory since its previous result."""
    load_s: float = 0.0
    """Time of these loads."""
    loaded_parts: int = 0
    """The same for parts of pages."""
    part_load_s: float = 0.0
    copy_wait_s: float = 0.0
    """Time of rank 0 or of the sampling rank, whichever is longer, in waits for copies since the previous result."""
    vectors: list[tuple[int, bytes]] = []
    """(i, float32 numbers) of each pooled request i whose prompt ends in this step."""


class PoolShape(msgspec.Struct, frozen=True, array_like=True):
    """Size of the page pool."""

    num_pages: int
    page_size: int
    num_host_pages: int = 0
    """Slots for pages in host memory; their largest number if `min_host_pages` is set."""
    min_host_pages: int | None = None
    """Slots at first and at least, if their number is adaptive."""
    has_disk: bool = False
    """Whether a disk keeps pages, and parts or snapshots, that were stored in host memory."""
    window: int = 0
    """Tokens whose pages a request keeps, see `core.page_window`; 0: all."""
    num_parts: int = 0
    """With a window: parts of layers with a window (`core.window_parts`); requests keep the pages of the other layers."""
    num_host_parts: int = 0
    """Slots for parts in host memory, beside `num_host_pages`; their largest number if `min_host_pages` is set."""
    has_states: bool = False
    """Whether layers keep a state per request, which pages lack."""
    num_snapshots: int = 0
    """Slots for snapshots of these states."""
    state_pages: int = 0
    """Pages as large as the states of a request, on all ranks."""
    num_host_snapshots: int = 0
    """Slots for snapshots in host memory, after `num_snapshots`."""
    has_blocks: bool = False
    """With a window: see `PageGroups`."""

    @property
    def host_floor(self) -> int:
        """Slots at first and at least. If all layers have a window it is fixed: the curve that decides is of whole prefixes."""
        if self.min_host_pages is None or (self.window and not self.num_parts):
            return self.num_host_pages
        return min(self.min_host_pages, self.num_host_pages)

    @property
    def host_part_floor(self) -> int:
        """The same of slots for parts: as many per page as the limits, and those of two windows."""
        share = self.num_host_parts * self.host_floor // max(1, self.num_host_pages)
        return min(self.num_host_parts, max(share, 2 * (self.window // self.page_size + 1)))


# Grammar compilation in a thread of a sampling rank that is not rank 0.


class CompileOrder(msgspec.Struct, frozen=True, array_like=True, tag="compile"):
    """Compile and keep this grammar; drop those in `dropped`."""

    number: int
    grammar: wire.Grammar
    dropped: list[int] = []


class AdapterOrder(msgspec.Struct, frozen=True, array_like=True, tag="adapter"):
    """Load an adapter into a slot that no row has."""

    slot: int
    path: str
    content_hash: str


class AdapterResult(msgspec.Struct, frozen=True, array_like=True, tag="adapted"):
    """Result of loading an adapter on all ranks; `why` is empty on success."""

    why: str = ""


class CompileResult(msgspec.Struct, frozen=True, array_like=True, tag="compiled"):
    """Result of a compilation; `why` is empty on success."""

    number: int
    why: str = ""
    is_bug: bool = False
    """An internal error, logged by the sampling rank."""
