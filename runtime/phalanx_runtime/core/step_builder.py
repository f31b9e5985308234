"""Builds the plan of one step: which request computes how many tokens, its draft tokens, and the pages that it writes."""

from dataclasses import dataclass, field

from phalanx_api.cost import StepWork, describe
from phalanx_runtime.core.draft_tree import is_chain, levels
from phalanx_runtime.core.request import Request, needs_history
from phalanx_runtime.core.step_plan import CatchUp, Growth, NewRow, Path, StepPlan


@dataclass(slots=True, kw_only=True)
class ScheduledChunk:
    """The next `count` tokens of a request from `start`, and `depth` draft tokens after them."""

    request: Request
    start: int
    count: int
    depth: int = 0
    proposed: list[int] = field(default_factory=list)
    """Draft tokens; empty if the ranks draft them."""
    grades: list[int] = field(default_factory=list)
    """Acceptance grade of each draft token."""
    is_drafted: bool = False
    behind: range = range(0)
    """Positions that a draft model backfills."""
    parents: list[int] = field(default_factory=list)
    """Parent of each draft token; empty for a chain."""
    growth: Growth | None = None
    """Bounds of a tree whose shape the ranks choose."""
    strays: list[int] = field(default_factory=list)
    """See `StepPlan.strays`."""
    num_pages: int = 0
    """Pages of the request without those for draft tokens."""
    gained: int = 0
    """Tokens that it got, once the plan is finished."""
    undrafted: frozenset[int] = frozenset()
    """Draft positions for which the ranks had no token."""

    @property
    def end(self) -> int:
        """Position after its last own token."""
        return self.start + self.count

    @property
    def num_levels(self) -> int:
        """Draft tokens of its longest branch, as far as there are tokens."""
        found = enumerate(levels(tuple(self.parents)))
        return max((level for node, level in found if node not in self.undrafted), default=-1) + 1

    @property
    def has_branches(self) -> bool:
        """Whether its draft tokens form a tree, or may."""
        return self.growth is not None or not is_chain(self.parents)

    @property
    def is_decode(self) -> bool:
        """Whether it is one token after others."""
        return self.count == 1 and self.start > 0


@dataclass(slots=True, kw_only=True)
class StepBuilder:
    """One step."""

    step: int
    budget: int = 0
    """Prefill tokens left of `whole`."""
    whole: int = 0
    others: int = 0
    """Number of prompts in the step minus one."""
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[NewRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    """Pages that this step writes; copies before the step must not read them."""
    drafted: set[int] = field(default_factory=set)
    """Pages that a draft model writes in this step, so a copy lacks its values."""
    draft_room: int = 0
    """Tokens that a draft model may still backfill."""
    draws: list[tuple[int, int]] = field(default_factory=list)
    work: StepWork = field(default_factory=lambda: StepWork(0, 0, 0))
    plain: StepWork = field(default_factory=lambda: StepWork(0, 0, 0))
    """The work without draft tokens."""
    _described: tuple[int, int] = (0, 0)
    """Chunks and tokens without draft tokens that `plain` describes."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, draft tokens included."""
        return sum(chunk.count + chunk.depth for chunk in self.chunks)

    def add(self, request: Request, count: int) -> ScheduledChunk:
        """Adds the next tokens of a request to the step; announces a request that is new to the ranks."""
        if not request.sent:
            assert request.row is not None, "only running requests compute"
            history = list(request.tokens) if needs_history(request.sampling) else []
            self.admitted.append(NewRow(request.row, request.sampling, request.num_prompt, history))
        chunk = ScheduledChunk(request=request, start=request.computed, count=count, strays=request.strays)
        self.chunks.append(chunk)
        request.in_flight = True
        return chunk

    def describe_plain(self) -> StepWork:
        """Returns the current work without draft tokens; cached for the same chunks."""
        chunks = len(self.chunks), sum(chunk.count for chunk in self.chunks)
        if chunks != self._described:
            self._described, self.plain = chunks, self._describe(with_proposals=False)
        return self.plain

    def _describe(self, with_proposals: bool) -> StepWork:
        decodes = [chunk for chunk in self.chunks if chunk.is_decode]
        prompts = [(chunk.start, chunk.count) for chunk in self.chunks if not chunk.is_decode]
        proposals = [(chunk.end, chunk.depth) for chunk in decodes if chunk.depth and with_proposals]
        return describe([chunk.end for chunk in decodes], prompts, proposals)

    def finish(self) -> StepPlan:
        """Returns the plan. From now on the ranks know its requests' pages."""
        rows, pages, tokens = [], [], []
        paths: list[Path] = []
        cuts: list[tuple[int, int]] = []
        strays: list[tuple[int, list[int]]] = []
        catch_ups: list[CatchUp] = []
        for i, chunk in enumerate(self.chunks):
            request = chunk.request
            assert request.row is not None, "only running requests compute"
            rows.append(request.row)
            pages.append(request.pages[request.sent :])
            if request.is_cut:
                cuts.append((i, request.sent))
                request.is_cut = False
            request.sent = len(request.pages)
            tokens.extend(request.tokens[chunk.start : chunk.end])
            if chunk.end == len(request.tokens):
                self.draws.append((i, chunk.end - request.num_prompt))
            if chunk.depth:
                tokens.extend(chunk.proposed or [0] * chunk.depth)
                parents = [] if chunk.growth is not None or is_chain(chunk.parents) else chunk.parents
                paths.append(
                    Path(request=i, depth=chunk.depth, is_drafted=chunk.is_drafted, parents=parents, growth=chunk.growth)
                )
            if chunk.strays:
                strays.append((i, chunk.strays))
            if chunk.behind:
                catch_ups.append(CatchUp(i, chunk.behind.start, request.tokens[chunk.behind.start : chunk.behind.stop]))
        plain = self.describe_plain()
        self.work = self._describe(with_proposals=True) if any(chunk.depth for chunk in self.chunks) else plain
        starts, counts = [chunk.start for chunk in self.chunks], [chunk.count + chunk.depth for chunk in self.chunks]
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
            paths=paths,
            cuts=cuts,
            strays=strays,
            catch_ups=catch_ups,
        )
