"""Loads a prompt's pages from host memory, and counts its lookups for the curves.

without parts    all pages in host memory after those on the device
with parts       pages and parts up to the last page after which a request could start: its window has parts, on the device
                 or in host memory
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api.cost import StepModel, StepWork, attention_work
from phalanx_runtime.core.kv.miss_ratio import MissRatioCurve
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.step_builder import StepBuilder
from phalanx_runtime.core.window_parts import NO_PART, WindowParts

MAX_PINNED_SHARE = 0.9
"""Of the slots, while a request starts."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A starting request. `keys`: of its full pages, of which the first `num_found` are on the device."""

    keys: Sequence[bytes]
    num_found: int
    is_counted: bool
    """Whether it is the request's first start."""
    num_running: int
    """Other requests, each of which may need a part."""


@dataclass(frozen=True, slots=True)
class _Loads:
    """What a request could load: `slots` of the pages after the found ones, and the parts of its pages at `parts`."""

    start: int
    """Pages after which it starts without the loads."""
    end: int
    """Pages after which it starts with them."""
    slots: list[int]
    parts: list[int]


def pays_to_load(num_tokens: int, start: int, model: StepModel | None, load_s: float | None) -> bool:
    """Returns whether loading the KV of `num_tokens` tokens after the first `start` takes at most the time of computing it.

    True without a measurement of both: loads are measured only if there are some.
    """
    if model is None or load_s is None:
        return True
    attention = attention_work(start + num_tokens, start)
    empty = model.predict(StepWork(0, 0, 0))
    return load_s <= model.predict(StepWork(num_tokens, 0, start + num_tokens, attention)) - empty


class HostLoads:
    """The lookups in the host tier of one pool."""

    def __init__(self, pool: PagePool, miss_ratio: MissRatioCurve) -> None:
        self._pool = pool
        self._miss_ratio = miss_ratio

    def count(self, keys: Sequence[bytes], num_found: int, num_own: int = 0, num_disk: int = 0, *, is_used: bool = True) -> None:
        """Counts the lookups of a prompt's full pages: those on the device, then those of the tiers, unless it computes these."""
        self._miss_ratio.look_up(keys, num_found)
        self._pool.host.hits.look_up(keys, num_found, num_own, num_disk, is_used=is_used)

    def start(self, request: Request, lookup: Lookup, builder: StepBuilder, model: StepModel | None) -> None:
        """Loads pages and parts if that is faster than computing them, and lets the request hold parts if pages have some."""
        parts, num_found = self._pool.parts, lookup.num_found
        slots = self._pool.host.match(lookup.keys[num_found:])
        loads = _Loads(num_found, num_found + len(slots), slots, [])
        if parts is not None:
            loads = self._with_parts(request, lookup, loads, parts, builder)
        num_own = self._pool.host.num_own(loads.slots)
        is_loaded = self._load(request, lookup, loads, builder, model=model)
        if lookup.is_counted:
            self.count(lookup.keys, num_found, num_own, len(loads.slots) - num_own, is_used=is_loaded or not loads.slots)
        if parts is not None and not request.pages.part_end:
            parts.start(request.pages, request.num_computed // self._pool.page_size)

    def _with_parts(self, request: Request, lookup: Lookup, loads: _Loads, parts: WindowParts, builder: StepBuilder) -> _Loads:
        """Returns the loads after which a request could start later than it would now, if any."""
        ids, size, num_found = request.pages.ids, self._pool.page_size, lookup.num_found
        num_ready = next((i for i in range(num_found) if not self._is_ready(ids[i], builder)), num_found)
        end = loads.end if num_ready == num_found else num_ready
        if loads.slots:
            parts.want(ids, loads.end)

        def has_part(index: int) -> bool:
            if parts.written(ids[index]) == size:
                return ids[index] not in builder.written_pages
            # Another request may compute a part that exists.
            return lookup.keys[index] in self._pool.host_parts and parts.part_of(ids[index]) == NO_PART

        start, end = request.num_computed // size, parts.window.longest_hit(has_part, end)
        if end <= start:
            return _Loads(start, start, [], [])
        window = range(parts.window.first_page(end * size), end)
        missing = [i for i in window if parts.written(ids[i]) < size]
        return _Loads(start, end, loads.slots[: max(0, end - num_found)], missing)

    def _load(self, request: Request, lookup: Lookup, loads: _Loads, builder: StepBuilder, *, model: StepModel | None) -> bool:
        """Returns whether it loads pages and parts, if there are any."""
        parts = self._pool.parts
        if not self._pays(loads, model):
            self._pool.host.decline(len(loads.slots))
            self._pool.host_parts.decline(len(loads.parts))
            return False
        if not (loads.slots or loads.parts) or not self._may_load(request, lookup.num_found, loads, builder):
            return False
        if parts is not None:
            return self._load_with_parts(request, lookup, loads, parts)
        self._load_pages(request, lookup.num_found, loads)
        return True

    def _pays(self, loads: _Loads, model: StepModel | None) -> bool:
        size, seconds = self._pool.page_size, 0.0
        for tier, count in ((self._pool.host, len(loads.slots)), (self._pool.host_parts, len(loads.parts))):
            load_s = tier.load_s(count) if count else 0.0
            if load_s is None:
                return True  # loads are measured only if there are some
            seconds += load_s
        return not seconds or pays_to_load((loads.end - loads.start) * size, loads.start * size, model, seconds)

    def _is_ready(self, page: int, builder: StepBuilder) -> bool:
        """Returns whether plans before this step write all of a page: this one may be taken back."""
        return self._pool.written(page) == self._pool.page_size and page not in builder.written_pages

    def _may_load(self, request: Request, num_found: int, loads: _Loads, builder: StepBuilder) -> bool:
        ids, parts = request.pages.ids, self._pool.parts
        if num_found and loads.slots and not self._is_ready(ids[num_found - 1], builder):
            return False  # another request computes the page before
        pages = ids[num_found : num_found + len(loads.slots)]
        # The step copies after the loads: they must not overwrite an evicted page or part that it copies.
        is_free = loads.parts and parts is not None and any(not parts.is_held(source) for source, _ in builder.copies)
        return not is_free and not any(source in pages for source, _ in builder.copies)

    def _load_pages(self, request: Request, num_found: int, loads: _Loads) -> None:
        pages = request.pages.ids[num_found : num_found + len(loads.slots)]
        self._pool.host.load(loads.slots, pages)
        for page in pages:
            self._pool.mark_written(page, self._pool.page_size)

    def _load_with_parts(self, request: Request, lookup: Lookup, loads: _Loads, parts: WindowParts) -> bool:
        """Loads pages and parts, and lets the request start after them; returns false if too few parts are free."""
        host, ids = self._pool.host_parts, request.pages.ids
        slots = host.pin([lookup.keys[i] for i in loads.parts], MAX_PINNED_SHARE)
        can_start = len(slots) == len(loads.parts) and parts.fits(request.pages, loads.end, lookup.num_running)
        if can_start:
            parts.start(request.pages, loads.end)  # evicts other parts, to slots
            request.num_computed = loads.end * self._pool.page_size
        host.unpin(slots)
        if can_start:
            self._load_pages(request, lookup.num_found, loads)
            host.load(slots, [parts.part_of(ids[i]) for i in loads.parts])
            for i in loads.parts:
                parts.mark_written(ids[i], self._pool.page_size)
        return can_start
