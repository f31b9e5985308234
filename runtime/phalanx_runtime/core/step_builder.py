"""A plan in the making: which request computes how many tokens, what is proposed behind them, and which pages it writes."""

from dataclasses import dataclass, field

from phalanx_api.cost import StepWork, describe
from phalanx_runtime.core.draft_tree import is_chain, levels
from phalanx_runtime.core.request import Request, needs_history
from phalanx_runtime.core.step_plan import CatchUp, Growth, NewRow, Path, StepPlan


@dataclass(slots=True)
class ScheduledChunk:
    """The next `count` tokens of a request from `start`, and behind them `depth` proposals.

    `proposed` is empty where the ranks draft them. `grades` say how likely each is, `parents` behind which each is; with `growth`
    the ranks choose that. `behind`: positions that a draft model catches up with. `strays`: see `plan.StepPlan`. `num_pages`:
    pages that the request had before it got some for proposals. Once the plan is finished, `gained`: tokens that it was given;
    `undrafted`: proposals that got no token from the ranks.
    """

    request: Request
    start: int
    count: int
    depth: int = 0
    proposed: list[int] = field(default_factory=list)
    grades: list[int] = field(default_factory=list)
    is_drafted: bool = False
    behind: range = range(0)
    parents: list[int] = field(default_factory=list)
    growth: Growth | None = None
    strays: list[int] = field(default_factory=list)
    num_pages: int = 0
    gained: int = 0
    undrafted: frozenset[int] = frozenset()

    @property
    def end(self) -> int:
        """Position after the last token of its own."""
        return self.start + self.count

    @property
    def num_levels(self) -> int:
        """How many proposals its longest branch has, as far as there are tokens."""
        found = enumerate(levels(tuple(self.parents)))
        return max((level for node, level in found if node not in self.undrafted), default=-1) + 1

    @property
    def has_branches(self) -> bool:
        """Whether its proposals are no chain, or need not be."""
        return self.growth is not None or not is_chain(self.parents)

    @property
    def is_decode(self) -> bool:
        """Whether it is one token behind others."""
        return self.count == 1 and self.start > 0


@dataclass(slots=True)
class StepBuilder:
    """One step. `budget` counts tokens that prompts may still get, of `whole`; `others`: all but one with prompt tokens.

    `fresh`: pages that this step writes, which no copy before it may read; `drafted`: those that a draft model writes, so that a
    copy lacks what it computes. `draft_room`: tokens that it may still catch up with. `plain`: the work without proposals.
    """

    step: int
    budget: int = 0
    whole: int = 0
    others: int = 0
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[NewRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    drafted: set[int] = field(default_factory=set)
    draft_room: int = 0
    draws: list[tuple[int, int]] = field(default_factory=list)
    work: StepWork = field(default_factory=lambda: StepWork(0, 0, 0))
    plain: StepWork = field(default_factory=lambda: StepWork(0, 0, 0))
    _described: tuple[int, int] = (0, 0)
    """Chunks and tokens, without proposals, of which `plain` is the work."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, proposals included."""
        return sum(chunk.count + chunk.depth for chunk in self.chunks)

    def add(self, request: Request, count: int) -> ScheduledChunk:
        """Puts the next tokens of a request into the step; a request that no rank knows yet is announced."""
        if not request.sent:
            assert request.row is not None, "only running requests compute"
            history = list(request.tokens) if needs_history(request.sampling) else []
            self.admitted.append(NewRow(request.row, request.sampling, request.num_prompt, history))
        chunk = ScheduledChunk(request, request.computed, count, strays=request.strays)
        self.chunks.append(chunk)
        request.in_flight = True
        return chunk

    def describe_plain(self) -> StepWork:
        """What the step computes without proposals, as of now; found once for the same chunks."""
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
        """The plan. From now on its requests' pages are known to the ranks."""
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
                paths.append(Path(i, chunk.depth, chunk.is_drafted, parents, chunk.growth))
            if chunk.strays:
                strays.append((i, chunk.strays))
            if chunk.behind:
                catch_ups.append(CatchUp(i, chunk.behind.start, request.tokens[chunk.behind.start : chunk.behind.stop]))
        plain = self.describe_plain()
        self.work = self._describe(with_proposals=True) if any(chunk.depth for chunk in self.chunks) else plain
        starts, counts = [chunk.start for chunk in self.chunks], [chunk.count + chunk.depth for chunk in self.chunks]
        return StepPlan(
            self.step,
            self.admitted,
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
