"""How far a draft model has computed each row, and what it computes in a step: pure bookkeeping from the plans.

    tokens    |== in the draft's pages ==|-- waiting --|          positions that the target has computed, or computes now

    prompt chunks    computed in the step that brings them, for others may share them at once
    plain decodes    wait, and are computed together when a page may be full: pages that others may share are whole
    drafted paths    what waits, then the path's own token; of what was accepted then, what does not lie in its place waits

    moved pages      the plan tells the tokens that they may have come without; they are computed first

What a step rejected is forgotten when the row's next start is known, with `strays` where a tree's branches were accepted. A row
that skips ahead found pages that others wrote, and those the draft has computed as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from phalanx_runtime.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of request `request` of a plan that a draft computes, from position `start` on. `drawn`: it drafts behind them."""

    request: int
    start: int
    tokens: list[int]
    drawn: bool = False


@dataclass(slots=True)
class _Row:
    """`first`: where it began here; what lies before came with its pages. `proposed`: for it at last, behind what is computed and
    what waits; `slots`: which of these lie in the slots there."""

    first: int
    computed: int
    waiting: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def accept(self, start: int, strays: Sequence[int]) -> None:
        """What was proposed and lies before this start now was accepted: what lay in its place is computed, the rest waits."""
        first = self.computed + len(self.waiting)
        if 0 <= start - first <= len(self.proposed):
            nodes = [*range(start - first - len(strays)), *(at - first for at in strays)]
            same = 0
            while same < min(len(nodes), len(self.slots)) and nodes[same] == self.slots[same]:
                same += 1
            self.computed += same
            self.waiting += [self.proposed[node] for node in nodes[same:]]
        self.proposed, self.slots = [], []


class DraftRows:
    """All rows of a rank that drafts with a model of its own."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._rows: dict[int, _Row] = {}

    def pieces(self, plan: StepPlan) -> list[Piece]:
        """What the draft computes before the target computes this plan. It counts as computed from now on."""
        for new in plan.admitted:
            self._rows.pop(new.row, None)
        paths, indexes, strays = {path.request: path for path in plan.paths}, dict(plan.draws), dict(plan.strays)
        pieces = []
        for request, end in enumerate(accumulate(plan.counts)):
            path = paths.get(request)
            tokens = plan.tokens[end - plan.counts[request] : end]
            num_own = len(tokens) - (0 if path is None else path.depth)
            is_drafted = path is not None and path.is_drafted
            told = [] if path is None else path.behind
            row = self._caught_up(plan.rows[request], plan.starts[request], told, strays.get(request, []))
            row.waiting += tokens[:num_own]
            may_fill_page = row.computed // self._page_size < (plan.starts[request] + len(tokens)) // self._page_size
            is_plain_decode = num_own == 1 and indexes.get(request, 0) > 0
            if is_drafted or may_fill_page or not is_plain_decode:
                pieces.append(Piece(request, row.computed, row.waiting, is_drafted))
                row.computed += len(row.waiting)
                row.waiting = []
            row.proposed = tokens[num_own:]
        return pieces

    def drafted(self, row: int, proposed: Sequence[int], slots: Sequence[int]) -> None:
        """The draft proposed these behind what it had computed, and computed some of them, which lie in the slots there."""
        one = self._rows[row]
        one.proposed, one.slots = list(proposed), list(slots)

    def _caught_up(self, row: int, start: int, told: Sequence[int], strays: Sequence[int]) -> _Row:
        """The row, with what waits before this start and nothing else. `told`: tokens before it that may have come without.
        `strays`: where the last of them lie, if they lie elsewhere."""
        one = self._rows.setdefault(row, _Row(start, start))
        one.accept(start, strays)
        behind = start - one.computed
        if start - len(told) < one.first:
            one.first = one.computed = start - len(told)
            one.waiting = list(told)
        elif behind < 0 or behind > len(one.waiting):
            one.computed, one.waiting = start, []
        else:
            del one.waiting[behind:]
        return one
