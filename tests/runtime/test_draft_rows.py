"""How far a draft model has computed each row: before a pass that drafts its pages hold the request's tokens and no others."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.plan import NewRow, Path, StepPlan
from phalanx_runtime.rank.draft_rows import DraftRows, Piece

PAGE = 4
SAMPLING = wire.Sampling(1, 0)


def plan(
    start: int, tokens: list[int], depth: int = 0, is_drafted: bool = True, is_new: bool = False, is_prompt: bool = False
) -> StepPlan:
    """One request with these tokens of its own, then so many proposals."""
    whole = tokens + ([0] * depth if is_drafted else [900 + i for i in range(depth)])
    paths = [Path(0, depth, is_drafted)] if depth else []
    new = [NewRow(0, SAMPLING)] if is_new else []
    return StepPlan(0, new, [0], [start], [len(whole)], [[]], whole, [] if is_prompt else [(0, 1)], [], paths)


def test_a_prompt_is_computed_as_it_comes() -> None:
    rows = DraftRows(PAGE)
    assert rows.pieces(plan(0, [1, 2, 3], is_new=True)) == [Piece(0, 0, [1, 2, 3])]
    assert rows.pieces(plan(3, [4, 5])) == [Piece(0, 3, [4, 5])]
    assert rows.pieces(plan(5, [6], is_prompt=True)) == [Piece(0, 5, [6])], "a chunk of one token too"


def test_plain_decodes_wait_until_they_fill_a_page() -> None:
    rows = DraftRows(PAGE)
    rows.pieces(plan(0, [1, 2], is_new=True))
    assert rows.pieces(plan(2, [3])) == []
    assert rows.pieces(plan(3, [4])) == [Piece(0, 2, [3, 4])]
    assert rows.pieces(plan(4, [5])) == []


def test_a_drafted_path_computes_what_waits_first() -> None:
    rows = DraftRows(PAGE)
    rows.pieces(plan(0, [1, 2, 3, 4, 5], is_new=True))
    assert rows.pieces(plan(5, [6])) == []
    assert rows.pieces(plan(6, [7], depth=2)) == [Piece(0, 5, [6, 7], drawn=True)]


@pytest.mark.parametrize(
    ("accepted", "piece"),
    [(0, Piece(0, 6, [20], True)), (1, Piece(0, 7, [20], True)), (2, Piece(0, 8, [20], True)), (3, Piece(0, 8, [13, 20], True))],
    ids=["none", "one", "two", "all: the last was computed by nobody"],
)
def test_what_was_rejected_is_forgotten(accepted: int, piece: Piece) -> None:
    rows = DraftRows(PAGE)
    rows.pieces(plan(0, [1, 2, 3, 4, 5], is_new=True))
    rows.pieces(plan(5, [6], depth=3))
    rows.drafted(0, [11, 12, 13], [0, 1])
    assert rows.pieces(plan(6 + accepted, [20], depth=1)) == [piece]


def test_what_a_lookup_proposed_waits_as_far_as_it_was_accepted() -> None:
    rows = DraftRows(PAGE)
    rows.pieces(plan(0, [1, 2, 3, 4], is_new=True))
    assert rows.pieces(plan(4, [5], depth=2, is_drafted=False)) == []
    assert rows.pieces(plan(6, [6], depth=1)) == [Piece(0, 4, [5, 900, 6], drawn=True)]
    assert rows.pieces(plan(7, [7], depth=3, is_drafted=False)) == [Piece(0, 7, [7])], "the page may be full after it"


def test_a_row_that_skips_ahead_or_starts_anew_computes_from_there() -> None:
    rows = DraftRows(PAGE)
    rows.pieces(plan(0, [1, 2], is_new=True))
    assert rows.pieces(plan(8, [9, 10])) == [Piece(0, 8, [9, 10])]
    assert rows.pieces(plan(4, [5, 6], is_new=True)) == [Piece(0, 4, [5, 6])]


def test_what_came_by_a_move_is_computed_first_and_once() -> None:
    rows = DraftRows(PAGE)
    moved = plan(6, [7], depth=2, is_new=True)
    assert rows.pieces(msgspec.structs.replace(moved, paths=[Path(0, 2, True, [3, 4, 5, 6])])) == [
        Piece(0, 2, [3, 4, 5, 6, 7], True)
    ]
    rows.drafted(0, [8, 9], [0])
    again = plan(8, [10], depth=2)
    assert rows.pieces(msgspec.structs.replace(again, paths=[Path(0, 2, True, [3, 4, 5, 6, 7, 8])])) == [Piece(0, 8, [10], True)]


@dataclass
class Draft:
    """A draft that is nothing but pages: what it would read at each position."""

    rows: DraftRows = field(default_factory=lambda: DraftRows(PAGE))
    pages: dict[int, int] = field(default_factory=dict)

    def step(self, made: StepPlan, tokens: list[int], proposed: list[int]) -> bool:
        """Computes a step of a request that has these tokens; whether it drafted on them all."""
        pieces = self.rows.pieces(made)
        for piece in pieces:
            self.pages |= {piece.start + at: token for at, token in enumerate(piece.tokens)}
        if not proposed:
            return False
        end = made.starts[0] + 1
        assert pieces and pieces[0].drawn and pieces[0].start + len(pieces[0].tokens) == end
        assert [self.pages.get(at) for at in range(end)] == tokens[:end], "it drafts behind the request's own tokens"
        self.pages |= {end + at: token for at, token in enumerate(proposed[:-1])}
        self.rows.drafted(0, proposed, range(len(proposed) - 1))
        return True


@given(st.integers(1, 20), st.integers(1, 7), st.randoms(use_true_random=False))
def test_a_draft_always_continues_the_requests_own_tokens(num_prompt: int, chunk: int, chance: random.Random) -> None:
    tokens, draft = [chance.randrange(100) for _ in range(num_prompt)], Draft()
    done, is_new = 0, True
    while done < num_prompt:
        part = tokens[done : done + chunk]
        draft.step(plan(done, part, is_new=is_new, is_prompt=True), tokens, [])
        done, is_new = done + len(part), False
    tokens.append(chance.randrange(100))
    for _ in range(30):
        depth, kind = chance.randrange(4), chance.choice(["draft", "lookup"])
        proposed = [chance.randrange(100) for _ in range(depth)]
        made = plan(len(tokens) - 1, tokens[-1:], depth, kind == "draft")
        if kind == "lookup":
            made.tokens[1:] = proposed
        drafted = draft.step(made, tokens, proposed if kind == "draft" else [])
        assert drafted == (kind == "draft" and depth > 0)
        accepted = chance.randint(0, depth)
        tokens += [*proposed[:accepted], chance.randrange(100, 200)]
        full = (len(tokens) - 1) // PAGE * PAGE  # the last token is in nobody's pages
        missing = [at for at in range(full) if draft.pages.get(at) != tokens[at]]
        assert len(missing) <= depth, "a full page was computed, but for proposals that the last step accepted"
