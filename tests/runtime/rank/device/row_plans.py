"""Random valid plans: rows are admitted, compute chunks, decode, lose rejected pages and are reused."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.step_plan import LAST_SAMPLED, NewRow, StepPlan

PAGE = 4
NUM_ROWS = 6
MAX_MODEL_LEN = 50
Action = Literal["admit", "chunk", "decode", "given", "cut"]
Move = tuple[int, Action, int]
"""Row, what it does, and how much."""

moves: st.SearchStrategy[list[list[Move]]] = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, NUM_ROWS - 1), st.sampled_from(["admit", "chunk", "decode", "given", "cut"]), st.integers(1, 13)
        ),
        min_size=1,
        max_size=NUM_ROWS,
        unique_by=lambda move: move[0],
    ),
    min_size=1,
    max_size=8,
)
"""Steps of moves."""
decodes: st.SearchStrategy[list[Move]] = st.lists(
    st.tuples(st.integers(0, NUM_ROWS - 1), st.sampled_from(["decode", "given"]), st.integers(1, 13)),
    max_size=NUM_ROWS,
    unique_by=lambda move: move[0],
)
"""A step of decodes."""


def new_row(row: int) -> NewRow:
    """Returns a row without special sampling."""
    return NewRow(row, wire.Sampling(max_tokens=1, seed=0, temperature=0.0))


@dataclass(slots=True)
class RowState:
    """What a row holds."""

    pages: list[int] = field(default_factory=list)
    computed: int = 0
    last_token: int = 0


class Rows:
    """Makes plans from moves and keeps the expected state of each row."""

    def __init__(self) -> None:
        self.states: dict[int, RowState] = {}
        self._step = 0
        self._next_page = 0

    def plan(self, step: list[Move]) -> StepPlan:
        """Returns the plan of these moves; decodes of unknown tokens have LAST_SAMPLED."""
        admitted, truncations, starts, counts, pages, tokens = [], [], [], [], [], list[int]()
        for at, (row, action, amount) in enumerate(step):
            state = self.states.get(row)
            count = amount if action in ("admit", "chunk") else 1
            if state is None or action == "admit" or state.computed + count > MAX_MODEL_LEN:
                state = self.states[row] = RowState()
                admitted.append(new_row(row))
            elif action == "cut":
                state.computed = max(1, state.computed - amount)
                kept = -(-state.computed // PAGE)
                truncations.append((at, kept))
                del state.pages[kept:]
            starts.append(state.computed)
            counts.append(count)
            state.computed += count
            pages.append(self._new_pages(state, spare=amount % 3 == 0))
            given = [(7 * self._step + 5 * at + i) % 97 for i in range(count)]
            if action == "decode" and admitted[-1:] != [new_row(row)]:
                given = [LAST_SAMPLED]
            elif count == 1:
                state.last_token = given[0]
            tokens += given
        self._step += 1
        return StepPlan(
            step=self._step,
            admitted=admitted,
            rows=[row for row, _, _ in step],
            starts=starts,
            counts=counts,
            pages=pages,
            tokens=tokens,
            draws=[(at, 0) for at in range(len(step))],
            truncations=truncations,
        )

    def known(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with the tokens in place of LAST_SAMPLED."""
        last = [self.states[row].last_token for row, count in zip(plan.rows, plan.counts, strict=True) for _ in range(count)]
        tokens = [known if token == LAST_SAMPLED else token for token, known in zip(plan.tokens, last, strict=True)]
        return msgspec.structs.replace(plan, tokens=tokens)

    def sample(self, plan: StepPlan) -> list[int]:
        """Returns new last tokens of the plan's rows."""
        sampled = [(31 * self._step + 3 * row) % 89 for row in plan.rows]
        for row, token in zip(plan.rows, sampled, strict=True):
            self.states[row].last_token = token
        return sampled

    def probe(self) -> StepPlan:
        """Returns a plan that computes the last token of all rows again and changes nothing."""
        rows = sorted(self.states)
        return StepPlan(
            step=0,
            admitted=[],
            rows=rows,
            starts=[self.states[row].computed - 1 for row in rows],
            counts=[1] * len(rows),
            pages=[[] for _ in rows],
            tokens=[self.states[row].last_token for row in rows],
            draws=[(at, 0) for at in range(len(rows))],
        )

    def _new_pages(self, state: RowState, spare: bool) -> list[int]:
        needed = -(-state.computed // PAGE) - len(state.pages)
        room = -(-MAX_MODEL_LEN // PAGE) - len(state.pages)
        pages = list(range(self._next_page, self._next_page + min(room, max(0, needed) + spare)))
        self._next_page += len(pages)
        state.pages += pages
        return pages
