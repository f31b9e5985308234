"""Loads a prompt's pages from host memory, and counts its lookups for the curves.

without parts    all pages in host memory after those on the device
with parts       pages and parts up to the last page after which a request could start: its window has parts, on the device
                 or in host memory
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api.cost import StepModel
from phalanx_runtime.core.kv.host_tier import pays_to_load
from phalanx_runtime.core.kv.miss_ratio import MissRatioCurve
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.step_builder import StepBuilder
from phalanx_runtime.core.window_parts import WindowParts


@dataclass(frozen=True, slots=True)
class _Loads:
    """What a request could load: `slots` of the pages after the found ones, and the parts of its pages at `parts`."""

    start: int
    """Pages before which nothing needs to be computed without it."""
    end: int
    """The same with it."""
    slots: list[int]
    parts: list[int]


class HostLoads:
    """The lookups in the host tier of one pool."""

    def __init__(self, pool: PagePool, miss_ratio: MissRatioCurve) -> None:
        self._pool = pool
        self._miss_ratio = miss_ratio

    def count(self, keys: Sequence[bytes], num_found: int, slots: Sequence[int] = (), *, pays: bool = True) -> None:
        """Counts the lookups of a prompt's full pages, of which the first `num_found` are on the device, the next in `slots`."""
        self._miss_ratio.look_up(keys, num_found)
        host = self._pool.host
        num_own = host.num_own(slots)
        host.hits.look_up(keys, num_found, num_own, len(slots) - num_own, pays=pays)

    def start(
        self,
        request: Request,
        keys: Sequence[bytes],
        *,
        num_found: int,
        is_counted: bool,
        builder: StepBuilder,
        model: StepModel | None,
    ) -> None:
        """Loads pages after the first `num_found`, and parts, if that is faster than computing them.

        keys: those of the full pages.
        """
        host, size, parts = self._pool.host, self._pool.page_size, self._pool.parts
        slots = host.match(keys[num_found:])
        loads = _Loads(num_found, num_found + len(slots), slots, [])
        if parts is not None:
            loads = self._with_parts(request, keys, loads, parts, builder)
        num_copies = len(loads.slots) + len(loads.parts)
        num_tokens = (loads.end - loads.start) * size
        pays = not num_copies or pays_to_load(num_tokens, loads.start * size, model, host.load_s(num_copies))
        if is_counted:
            self.count(keys, num_found, loads.slots, pays=pays)
        if not pays:
            host.decline(num_copies)
        elif num_copies and self._may_load(request, num_found, loads, builder):
            self._load(request, keys, num_found, loads)

    def _with_parts(
        self, request: Request, keys: Sequence[bytes], loads: _Loads, parts: WindowParts, builder: StepBuilder
    ) -> _Loads:
        """Returns the loads after which a request could start later than it would now, if any."""
        pages, size, num_found = request.pages, self._pool.page_size, loads.start
        num_ready = next((i for i in range(num_found) if not self._is_ready(pages.ids[i], builder)), num_found)
        end = loads.end if num_ready == num_found else num_ready

        parts.want(pages.ids, end)

        def has_part(index: int) -> bool:
            page = pages.ids[index]
            if parts.written(page) == size:
                return page not in builder.written_pages
            return keys[index] in self._pool.host_parts and parts.can_load(pages, index)

        start, end = request.num_computed // size, parts.window.longest_hit(has_part, end)
        if end <= start:
            return _Loads(start, start, [], [])
        window = range(parts.window.first_page(end * size), end)
        return _Loads(
            start, end, loads.slots[: max(0, end - num_found)], [i for i in window if parts.written(pages.ids[i]) < size]
        )

    def _is_ready(self, page: int, builder: StepBuilder) -> bool:
        """Returns whether plans before this step write all of a page: this one may be taken back."""
        return self._pool.written(page) == self._pool.page_size and page not in builder.written_pages

    def _may_load(self, request: Request, num_found: int, loads: _Loads, builder: StepBuilder) -> bool:
        ids = request.pages.ids
        if num_found and loads.slots and not self._is_ready(ids[num_found - 1], builder):
            return False  # another request computes the page before
        pages = ids[num_found : num_found + len(loads.slots)]
        # The step copies after the loads: they must not overwrite an evicted page or part that it copies.
        return not any(source in pages for source, _ in builder.copies) and not (loads.parts and builder.part_copies)

    def _load(self, request: Request, keys: Sequence[bytes], num_found: int, loads: _Loads) -> None:
        pool, ids = self._pool, request.pages.ids
        parts = pool.parts
        if parts is not None and not self._load_parts(request, keys, loads, parts):
            return
        pages = ids[num_found : num_found + len(loads.slots)]
        pool.host.load(loads.slots, pages)
        for page in pages:
            pool.mark_written(page, pool.page_size)
        if parts is not None:
            for i in loads.parts:
                parts.mark_written(ids[i], pool.page_size)

    def _load_parts(self, request: Request, keys: Sequence[bytes], loads: _Loads, parts: WindowParts) -> bool:
        """Loads the parts, and lets the request start after them. Returns false, and does nothing, if it can not."""
        host, wanted = self._pool.host_parts, [keys[i] for i in loads.parts]
        slots = host.pin(wanted, 0.5)  # the parts that the request gets evict others, to slots
        is_held = len(slots) == len(wanted) and parts.start_later(request.pages, loads.end)
        host.unpin(slots)
        if is_held:
            host.load(slots, [parts.part_of(request.pages.ids[i]) for i in loads.parts])
            request.num_computed = loads.end * self._pool.page_size
        return is_held
