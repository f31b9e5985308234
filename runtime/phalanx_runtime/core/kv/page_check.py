"""Checks a page pool: every page is free, held or cached, reference counts match the holders, chains are complete."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """Arrays of a `PagePool`, by page."""

    page_size: int
    free: Sequence[int]
    refs: Sequence[int]
    written: Sequence[int]
    keys: Sequence[bytes | None]
    page_of: dict[bytes, int]
    published: bytearray
    parents: Sequence[int | None]
    num_children: Sequence[int]
    idle: bytearray
    num_cached: int


def find_errors(state: PoolState, held: Iterable[Iterable[int]]) -> list[str]:
    """Returns the errors, given the pages of every holder."""
    return [*_holder_errors(state, held), *_free_list_errors(state), *_chain_errors(state), *_key_errors(state)]


def _holder_errors(state: PoolState, held: Iterable[Iterable[int]]) -> Iterator[str]:
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


def _free_list_errors(state: PoolState) -> Iterator[str]:
    free = set(state.free)
    if len(free) != len(state.free):
        yield f"{len(state.free) - len(free)} pages are in the free list twice"
    for page in sorted(free):
        if state.refs[page]:
            yield f"page {page} is free and held"
        if state.published[page]:
            yield f"page {page} is free and cached"
    num_cached = sum(1 for count, is_published in zip(state.refs, state.published, strict=True) if is_published and not count)
    if num_cached != state.num_cached:
        yield f"{num_cached} pages are cached, expected {state.num_cached}"
    num_leaked = len(state.refs) - len(free) - num_cached - sum(1 for count in state.refs if count)
    if num_leaked > 0:
        yield f"{num_leaked} pages are neither free nor held"


def _chain_errors(state: PoolState) -> Iterator[str]:
    num_children = array("q", bytes(8 * len(state.refs)))
    for page, parent in enumerate(state.parents):
        if parent is not None:
            num_children[parent] += 1
            if not state.published[parent]:
                yield f"page {page} follows page {parent}, which no key finds"
            if state.refs[page] > state.refs[parent]:
                yield f"page {page} has {state.refs[page]} holders and page {parent} before it {state.refs[parent]}"
    for page, (count, want) in enumerate(zip(state.num_children, num_children, strict=True)):
        if count != want:
            yield f"page {page} has {count} followers, expected {want}"
        is_cached = bool(state.published[page]) and not state.refs[page]
        if bool(state.idle[page]) != (is_cached and not want):
            yield f"page {page} is {'' if state.idle[page] else 'not '}idle, with {state.refs[page]} holders and {want} followers"
        if is_cached and state.written[page] < state.page_size:
            yield f"page {page} is cached with {state.written[page]} slots written"


def _key_errors(state: PoolState) -> Iterator[str]:
    for key, page in state.page_of.items():
        if state.keys[page] != key or not state.published[page]:
            yield f"key {key.hex()} finds page {page}, which has another key"
    if sum(state.published) != len(state.page_of):
        yield f"{sum(state.published)} pages are published and {len(state.page_of)} keys find one"
