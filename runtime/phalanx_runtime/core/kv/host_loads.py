"""Loads a prompt's pages from host memory, and counts its lookups for the curves."""

from collections.abc import Sequence

from phalanx_api.cost import StepModel
from phalanx_runtime.core.kv.host_tier import pays_to_load
from phalanx_runtime.core.kv.miss_ratio import MissRatioCurve
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.step_builder import StepBuilder


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
        keys: Sequence[bytes],
        pages: Sequence[int],
        *,
        num_found: int,
        is_counted: bool,
        builder: StepBuilder,
        model: StepModel | None,
    ) -> None:
        """Loads pages after the first `num_found`, if that is faster than computing them.

        keys: those of the full pages. pages: all pages of the request.
        """
        host, size = self._pool.host, self._pool.page_size
        slots = host.match(keys[num_found:])
        pays = not slots or pays_to_load(len(slots) * size, num_found * size, model, host.load_s(len(slots)))
        if is_counted:
            self.count(keys, num_found, slots, pays=pays)
        if not pays:
            host.decline(len(slots))
        elif slots:
            self._load(slots, pages[num_found : num_found + len(slots)], pages[num_found - 1] if num_found else None, builder)

    def _load(self, slots: list[int], pages: Sequence[int], before: int | None, builder: StepBuilder) -> None:
        size = self._pool.page_size
        if before is not None and (self._pool.written(before) < size or before in builder.written_pages):
            return  # another request computes the page before, maybe in a plan that is taken back
        if any(source in pages for source, _ in builder.copies):
            return  # the step copies an evicted page, after the loads
        self._pool.host.load(slots, pages)
        for page in pages:
            self._pool.mark_written(page, size)
