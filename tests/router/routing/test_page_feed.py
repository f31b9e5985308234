"""Sequence check of page changes."""

from phalanx_api import wire
from phalanx_router.routing.prefixes import PageFeed

KEY = bytes(16)


def changes(first: int, count: int = 1) -> wire.PageChanges:
    return wire.PageChanges(first, [(True, KEY)] * count)


def snapshot(first: int) -> wire.PageChanges:
    return wire.PageChanges(first, [(True, KEY)] * 3, is_snapshot=True)


def test_changes_are_of_use_from_a_snapshot_on() -> None:
    feed = PageFeed()
    frames = [changes(5), snapshot(6), changes(6, 2), changes(8, 0), changes(8)]
    assert [feed.check(frame) for frame in frames] == ["drop", "apply", "apply", "apply", "apply"]


def test_gap_is_requested_once() -> None:
    feed = PageFeed()
    frames = [snapshot(0), changes(1), changes(2), snapshot(3), changes(2), snapshot(3), changes(3)]
    assert [feed.check(frame) for frame in frames] == ["apply", "resync", "drop", "apply", "resync", "apply", "apply"]


def test_an_incarnation_begins_with_no_pages_at_number_0() -> None:
    feed = PageFeed()
    assert feed.check(snapshot(9)) == "apply"
    feed.restart()
    assert [feed.check(frame) for frame in (changes(0, 4), changes(4))] == ["apply", "apply"]
