"""Builds the plan of one step from chunks of requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx_api.cost import StepWork, step_work
from phalanx_runtime.core.draft_tree import is_chain, levels
from phalanx_runtime.core.request import Request, needs_history
from phalanx_runtime.core.step_plan import (
    LAST_SAMPLED,
    DraftBackfill,
    DraftPath,
    HostCopy,
    HostResize,
    NewRow,
    StepPlan,
    TreeBounds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDraft:
    """Draft tokens of one chunk."""

    depth: int = 0
    """Number of draft tokens."""
    tokens: Sequence[int] = ()
    """Empty if the ranks draft them."""
    parents: Sequence[int] = ()
    grades: Sequence[int] = ()
    """Acceptance grade of each draft token."""
    is_drafted: bool = False
    """By a draft model, not the n-gram proposer."""
    tree_bounds: TreeBounds | None = None
    """Set if the ranks choose the shape."""
    undrafted: frozenset[int] = frozenset()
    """Nodes without a token, known after the step."""

    @property
    def num_levels(self) -> int:
        """Length of the longest branch."""
        nodes = enumerate(levels(tuple(self.parents)))
        return max((level for node, level in nodes if node not in self.undrafted), default=-1) + 1

    @property
    def has_branches(self) -> bool:
        """Whether the tokens form a tree, or may."""
        return self.tree_bounds is not None or not is_chain(self.parents)


NO_DRAFT = ChunkDraft()


@dataclass(slots=True, kw_only=True)
class ScheduledChunk:
    """The next `count` tokens of a request, with draft tokens after them."""

    request: Request
    start: int
    count: int
    draft: ChunkDraft = NO_DRAFT
    backfill: range = range(0)
    """Positions that a draft model backfills."""
    misplaced: Sequence[int] = ()
    """Positions in `StepPlan.relocations`."""
    num_own_pages: int = 0
    """Pages of the request without those for draft tokens."""
    num_gained: int = 0
    """Output tokens, known after the step."""

    @property
    def end(self) -> int:
        """Position after its last own token."""
        return self.start + self.count

    @property
    def is_decode(self) -> bool:
        """Whether it is one token after computed ones."""
        return self.count == 1 and self.start > 0


class FirstWrite(NamedTuple):
    """The first write of a step into a page."""

    slots: int
    """Slots that earlier steps write, in the page and in its part."""
    order: int
    """`RequestParams.order` of the request."""
    page_slots: int
    """Slots of the page alone."""


@dataclass(slots=True, kw_only=True)
class StepBuilder:
    """One step, from composition to commit."""

    step: int
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[NewRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    part_copies: list[tuple[int, int]] = field(default_factory=list)
    written_pages: dict[int, FirstWrite] = field(default_factory=dict)
    """Pages that this step writes; its copies, which come first, must not read them."""
    drafted_pages: set[int] = field(default_factory=set)
    """Pages that a draft model writes; a copy lacks that KV."""
    backfill_budget: int = 0
    """Tokens that may still be backfilled."""
    host_copies: list[HostCopy] = field(default_factory=list)
    host_keys: list[bytes] = field(default_factory=list)
    part_host_copies: list[HostCopy] = field(default_factory=list)
    part_host_keys: list[bytes] = field(default_factory=list)
    awaits_host_copies: bool = False
    host_resize: HostResize | None = None
    part_host_resize: HostResize | None = None
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    state_stores: list[tuple[int, int]] = field(default_factory=list)
    state_keys: list[tuple[bytes, int]] = field(default_factory=list)
    draws: list[tuple[int, int]] = field(default_factory=list)
    work: StepWork = field(default_factory=lambda: StepWork(0, 0, 0))
    plain_work: StepWork = field(default_factory=lambda: StepWork(0, 0, 0))
    """The work without draft tokens."""
    image_tiles: int = 0
    """See `StepPlan`."""
    _measured: tuple[int, int] = (0, 0)
    """Chunks and own tokens that `plain_work` covers."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, draft tokens included."""
        return sum(chunk.count + chunk.draft.depth for chunk in self.chunks)

    def add(self, request: Request, count: int) -> ScheduledChunk:
        """Adds the next tokens of a request, and its row if that is new to the ranks."""
        pages = request.pages
        if not pages.num_sent:
            assert request.row is not None, "only running requests compute"
            sampling = request.params.sampling
            history = list(request.tokens) if needs_history(sampling) else []
            params, computed = request.params, request.num_computed
            images = [image for image in params.images if image.stop > computed]
            self.admitted.append(
                NewRow(
                    request.row,
                    sampling,
                    params.num_prompt,
                    history,
                    params.pooling,
                    adapter=params.adapter,
                    images=images,
                    pair_start=params.pair_start,
                    image_scope=pages.keys.root if images else b"",
                    position_shift=sum(image.shift for image in params.images if image.stop <= computed),
                )
            )
        chunk = ScheduledChunk(request=request, start=request.num_computed, count=count, misplaced=pages.misplaced)
        for image in request.params.images:
            self.image_tiles += image.work if image.start < chunk.end and image.stop > chunk.start else 0
        self.chunks.append(chunk)
        request.in_flight += 1
        return chunk

    def measure_plain_work(self) -> StepWork:
        """Updates and returns `plain_work`."""
        measured = len(self.chunks), sum(chunk.count for chunk in self.chunks)
        if measured != self._measured:
            self._measured, self.plain_work = measured, self._measure_work(with_drafts=False)
        return self.plain_work

    def _measure_work(self, with_drafts: bool) -> StepWork:
        decodes = [chunk for chunk in self.chunks if chunk.is_decode]
        prompts = [(chunk.start, chunk.count) for chunk in self.chunks if not chunk.is_decode]
        drafts = [(chunk.end, chunk.draft.depth) for chunk in decodes if chunk.draft.depth and with_drafts]
        return step_work([chunk.end for chunk in decodes], prompts, drafts)

    def finish(self, left_rows: list[int]) -> StepPlan:
        """Returns the plan; its pages count as sent, its tokens as computed. `left_rows`: see `StepPlan`."""
        starts, counts = [chunk.start for chunk in self.chunks], [chunk.count + chunk.draft.depth for chunk in self.chunks]
        rows, tokens, pages, truncations = list[int](), list[int](), list[list[int]](), list[tuple[int, int]]()
        paths, backfills, relocations = list[DraftPath](), list[DraftBackfill](), list[tuple[int, list[int]]]()
        for i, chunk in enumerate(self.chunks):
            request, draft = chunk.request, chunk.draft
            assert request.row is not None, "only running requests compute"
            rows.append(request.row)
            pages.append(_take_unsent(request, i, truncations))
            tokens.extend(request.tokens[chunk.start : chunk.end])
            tokens.extend([LAST_SAMPLED] * (chunk.end - max(chunk.start, len(request.tokens))))
            if draft.depth:
                tokens.extend(draft.tokens or [0] * draft.depth)
                paths.append(_path(i, draft))
            relocations += [(i, list(chunk.misplaced))] if chunk.misplaced else []
            backfills += [_backfill(i, chunk)] if chunk.backfill else []
            self._record_planned(i, chunk)
        self.measure_plain_work()
        self.work = self._measure_work(with_drafts=True) if paths else self.plain_work
        return StepPlan(
            step=self.step,
            admitted=self.admitted,
            rows=rows,
            starts=starts,
            counts=counts,
            pages=pages,
            tokens=tokens,
            draws=self.draws,
            copies=self.copies,
            parts=self.parts,
            part_copies=self.part_copies,
            paths=paths,
            truncations=truncations,
            relocations=relocations,
            backfills=backfills,
            host_copies=self.host_copies,
            host_keys=self.host_keys,
            part_host_copies=self.part_host_copies,
            part_host_keys=self.part_host_keys,
            awaits_host_copies=self.awaits_host_copies,
            host_resize=self.host_resize,
            part_host_resize=self.part_host_resize,
            state_loads=self.state_loads,
            state_saves=self.state_saves,
            state_stores=self.state_stores,
            state_keys=self.state_keys,
            image_tiles=self.image_tiles,
            left_rows=left_rows,
        )

    def _record_planned(self, i: int, chunk: ScheduledChunk) -> None:
        """Adds the draw of chunk i, if it ends with the last token and the request samples; counts its tokens as computed."""
        request = chunk.request
        if chunk.end == request.num_tokens and request.params.pooling is None:
            self.draws.append((i, chunk.end - request.params.num_prompt))
            request.num_pending += 1
        request.num_computed, request.pages.misplaced = chunk.end, []


def _take_unsent(request: Request, i: int, truncations: list[tuple[int, int]]) -> list[int]:
    pages = request.pages
    unsent = pages.ids[pages.num_sent :]
    num_null = pages.num_dropped - pages.num_sent
    if num_null > 0:
        unsent[:num_null] = [pages.ids[pages.num_dropped]] * num_null  # in their place, any page that is the request's
    if pages.must_truncate:
        truncations.append((i, pages.num_sent))
        pages.must_truncate = False
    pages.num_sent = len(pages.ids)
    return unsent


def _backfill(i: int, chunk: ScheduledChunk) -> DraftBackfill:
    positions = chunk.backfill
    return DraftBackfill(i, positions.start, chunk.request.tokens[positions.start : positions.stop])


def _path(i: int, draft: ChunkDraft) -> DraftPath:
    has_fixed_tree = draft.tree_bounds is None and not is_chain(draft.parents)
    return DraftPath(
        request=i,
        depth=draft.depth,
        is_drafted=draft.is_drafted,
        parents=list(draft.parents) if has_fixed_tree else [],
        tree_bounds=draft.tree_bounds,
    )
