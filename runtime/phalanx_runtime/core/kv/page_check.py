"""Checks a page pool: every page is free, held or cached, reference counts match their holders, chains are complete.

Reads only and never raises: the caller counts and logs errors.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The pool's arrays, by page."""

    page_size: int
    free: Sequence[int]
    refs: Sequence[int]
    written: Sequence[int]
    keys: Sequence[bytes | None]
    page_of: dict[bytes, int]
    published: bytearray
    parents: Sequence[int | None]
    children: Sequence[int]
    idle: bytearray
    num_cached: int


def find_wrong(state: PoolState, held: Iterable[Iterable[int]]) -> list[str]:
    """Returns one sentence per error, given the pages of every holder."""
    return [*_wrong_holders(state, held), *_wrong_free(state), *_wrong_chains(state), *_wrong_keys(state)]


def _wrong_holders(state: PoolState, held: Iterable[Iterable[int]]) -> Iterator[str]:
    """Pages whose count differs from their holders."""
    num_pages = len(state.refs)
    expected = array("q", bytes(8 * num_pages))
    for pages in held:
        for page in pages:
            if 0 <= page < num_pages:
                expected[page] += 1
            else:
                yield f"page {page} is held and does not exist"
    for page, (count, want) in enumerate(zip(state.refs, expected, strict=True)):
        if count != want:
            yield f"page {page} has {count} holders, expected {want}"


def _wrong_free(state: PoolState) -> Iterator[str]:
    """Wrong pages in the free list, and lost pages."""
    free = set(state.free)
    if len(free) != len(state.free):
        yield f"{len(state.free) - len(free)} pages are in the free list twice"
    for page in sorted(free):
        if state.refs[page]:
            yield f"page {page} is free and held"
        if state.published[page]:
            yield f"page {page} is free and cached"
    cached = sum(1 for count, found in zip(state.refs, state.published, strict=True) if found and not count)
    if cached != state.num_cached:
        yield f"{cached} pages are cached, expected {state.num_cached}"
    lost = len(state.refs) - len(free) - cached - sum(1 for count in state.refs if count)
    if lost > 0:
        yield f"{lost} pages are neither free nor held"


def _wrong_chains(state: PoolState) -> Iterator[str]:
    """Pages with a wrong child count, with an unpublished parent, or with a wrong idle flag."""
    children = array("q", bytes(8 * len(state.refs)))
    for page, parent in enumerate(state.parents):
        if parent is not None:
            children[parent] += 1
            if not state.published[parent]:
                yield f"page {page} follows page {parent}, which no key finds"
            if state.refs[page] > state.refs[parent]:
                yield f"page {page} has {state.refs[page]} holders and page {parent} before it {state.refs[parent]}"
    for page, (count, want) in enumerate(zip(state.children, children, strict=True)):
        if count != want:
            yield f"page {page} has {count} followers, expected {want}"
        cached = bool(state.published[page]) and not state.refs[page]
        if bool(state.idle[page]) != (cached and not want):
            yield f"page {page} is {'' if state.idle[page] else 'not '}idle, with {state.refs[page]} holders and {want} followers"
        if cached and state.written[page] < state.page_size:
            yield f"page {page} is cached with {state.written[page]} slots written"


def _wrong_keys(state: PoolState) -> Iterator[str]:
    """Keys of another page, and published pages without a key."""
    for key, page in state.page_of.items():
        if state.keys[page] != key or not state.published[page]:
            yield f"key {key.hex()} finds page {page}, which is not of that key"
    if sum(state.published) != len(state.page_of):
        yield f"{sum(state.published)} pages are published and {len(state.page_of)} keys find one"
