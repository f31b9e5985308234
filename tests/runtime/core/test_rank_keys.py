"""Keys that all ranks have: the same as a set per rank gives."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx_runtime.core.kv.page_index import RankKeys

KEYS = st.lists(st.integers(0, 9).map(lambda number: b"%d" % number), max_size=10, unique=True)
CHANGES = st.lists(st.tuples(st.integers(0, 3), KEYS, KEYS, st.integers(1, 3)), max_size=30)
"""Rank, added and dropped keys, and the number of pieces."""


def change(keys: RankKeys, rank: int, added: list[bytes], dropped: list[bytes], num_pieces: int) -> list[bytes]:
    """Returns the keys that all ranks have or lack from now on, once the last piece is there."""
    changed = list[bytes]()
    for piece in range(num_pieces):
        assert not changed, "the change is not complete"
        has_more = piece < num_pieces - 1
        changed = keys.change(rank, added[piece::num_pieces], dropped[piece::num_pieces], has_more=has_more)
    return changed


@given(CHANGES)
def test_keys_are_those_of_all_ranks(changes: list[tuple[int, list[bytes], list[bytes], int]]) -> None:
    keys, reported = RankKeys(), dict[int, set[bytes]]()
    common = keys.common
    for rank, added, dropped, num_pieces in changes:
        before = set(common)
        own = reported.setdefault(rank, set())
        own.update(added)
        own.difference_update(dropped)
        changed = change(keys, rank, added, dropped, num_pieces)
        assert common == set.intersection(*reported.values())
        assert set(changed) >= before ^ common, "routers learn of each"
        assert set(changed) <= {*(before ^ common), *dropped}, "and of no others, but those added and dropped at once"


def test_a_change_in_pieces_counts_when_complete() -> None:
    keys = RankKeys()
    assert keys.change(0, [b"a", b"b", b"c"], []) == [b"a", b"b", b"c"]
    assert keys.change(1, [b"a"], [], has_more=True) == []
    assert keys.common == {b"a", b"b", b"c"}, "rank 1 may have all of them"
    assert keys.change(1, [b"b"], []) == [b"c"]
    assert keys.common == {b"a", b"b"}
