"""A plan in the making: which request computes how many tokens, and the pages that this step writes."""

from dataclasses import dataclass, field

from phalanx_api.cost import StepWork, describe
from phalanx_runtime.core.plan import NewRow, StepPlan
from phalanx_runtime.core.request import Request, needs_history


@dataclass(slots=True)
class Chunk:
    """The next `count` tokens of a request from `start`."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.count


@dataclass(slots=True)
class Draft:
    """One step. `budget` counts tokens that prompts may still get, of `whole`; `others`: all but one with prompt tokens.

    `fresh`: pages that this step writes, which no copy before it may read.
    """

    step: int
    budget: int = 0
    whole: int = 0
    others: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[NewRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    draws: list[tuple[int, int]] = field(default_factory=list)
    work: StepWork = field(default_factory=lambda: StepWork(0, 0, 0))

    def add(self, request: Request, count: int) -> Chunk:
        """Puts the next tokens of a request into the step; a request that no rank knows yet is announced."""
        if not request.sent:
            assert request.row is not None, "only running requests compute"
            history = list(request.tokens) if needs_history(request.sampling) else []
            self.admitted.append(NewRow(request.row, request.sampling, request.num_prompt, history))
        chunk = Chunk(request, request.computed, count)
        self.chunks.append(chunk)
        request.in_flight = True
        return chunk

    def finish(self) -> StepPlan:
        """The plan. From now on its requests' pages are known to the ranks."""
        rows, pages, tokens = [], [], []
        decodes, prefills = [], []
        for i, chunk in enumerate(self.chunks):
            request = chunk.request
            assert request.row is not None, "only running requests compute"
            rows.append(request.row)
            pages.append(request.pages[request.sent :])
            request.sent = len(request.pages)
            tokens.extend(request.tokens[chunk.start : chunk.end])
            if chunk.end == len(request.tokens):
                self.draws.append((i, chunk.end - request.num_prompt))
            if chunk.count == 1 and chunk.start:
                decodes.append(chunk.end)
            else:
                prefills.append((chunk.start, chunk.count))
        self.work = describe(decodes, prefills)
        starts, counts = [chunk.start for chunk in self.chunks], [chunk.count for chunk in self.chunks]
        return StepPlan(self.step, self.admitted, rows, starts, counts, pages, tokens, self.draws, self.copies)
