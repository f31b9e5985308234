"""Prefix sharing with snapshots: a request skips the tokens before the longest snapshot among the pages that it finds.

    [0, snapshot) skipped: the row loads the snapshot · [snapshot, found) shared pages, computed again for the state · own pages

With a host tier the pages up to a snapshot may come back from host memory, and so may the snapshot; with a disk both are read
from there into host memory first. The disk gets a snapshot once another one takes its slot on the device, or its last page
leaves the device.

Chunks end where a snapshot is worth a slot: after the last full page of a prompt, for equal and longer prompts, and after the
last page that the prompt shares with another one, for a third. Decodes keep one snapshot per request, of their last full page.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from phalanx_api.cost import StepModel
from phalanx_runtime.core.kv.disk_tier import DiskTier
from phalanx_runtime.core.kv.host_loads import MAX_PINNED_SHARE, Lookup
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.page_writes import PageWrites
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.kv.snapshots.slots import SnapshotSlots
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder


@dataclass(frozen=True, slots=True)
class _Unnamed:
    """A snapshot of the first `end` tokens of a request, which are not all known."""

    request: Request
    end: int
    slot: int
    step: int


class SnapshotWrites(PageWrites):
    """What plans write to pages, and to the snapshots of these."""

    def __init__(self, pool: PagePool, snapshots: SnapshotSlots, has_disk: bool) -> None:
        super().__init__(pool)
        self._snapshots, self._has_disk = snapshots, has_disk
        self._num_evicted = 0

    def add_pending(self, builder: StepBuilder) -> None:
        """See `PageWrites`. With a disk, also stores the snapshots whose pages have left the device since the last plan."""
        super().add_pending(builder)
        num_evicted = self._pool.counters.evicted
        if not self._has_disk or num_evicted == self._num_evicted:
            return
        self._num_evicted = num_evicted
        for key in self._snapshots.never_stored():
            if self._pool.find(key) is None:
                self._snapshots.store(key, builder.step)
        add_stores(self._snapshots, builder)


def add_stores(snapshots: SnapshotSlots, builder: StepBuilder) -> None:
    """Adds the stores of snapshots so far to the step."""
    stores, keys = snapshots.take_stores()
    builder.state_stores += stores
    builder.state_keys += keys


class SnapshotSharing(PrefixSharing):
    """Assigns the pages of a pool without windows and parts."""

    def __init__(
        self, pool: PagePool, model: str, num_snapshots: int, num_host_snapshots: int = 0, *, has_disk: bool = False
    ) -> None:
        super().__init__(pool, model)
        self.snapshots = SnapshotSlots(num_snapshots, num_host_snapshots, has_disk=has_disk)
        self.writes = SnapshotWrites(pool, self.snapshots, has_disk)
        self.disk = DiskTier(pool, snapshots=self.snapshots)
        self._unnamed: list[_Unnamed] = []

    def num_hit(self, found: list[int]) -> int:
        """See `PrefixSharing`. An estimate for requests that wait: the snapshot is looked up once they start."""
        return len(found)

    def must_defer(self, request: Request, found: list[int], builder: StepBuilder) -> bool:
        """Returns false: tails have no snapshot."""
        return False

    def start(
        self, request: Request, found: list[int], builder: StepBuilder, model: StepModel | None = None, num_running: int = 0
    ) -> None:
        """Assigns all pages of a request, and loads its snapshot."""
        pages, size, before = request.pages, self.pool.page_size, request.num_computed
        self._settle()
        full = self._keys(request)[: self._num_full(request)] if self._can_share(request) else []
        # Another request may have computed the tokens of a snapshot in pages without a key. Nor does a request skip what this
        # step writes: if its plan is taken back, a state takes no token back.
        num_written = next((i for i, page in enumerate(found) if self._written_before(page, builder) < size), len(found))
        self._hold(request, found, full)
        num_skipped, num_disk = self._load(request, Lookup(full, len(found), False, num_running), builder, model, num_written)
        pages.found_tokens = request.num_computed = num_skipped * size
        if not request.max_computed:
            self.queried_tokens += request.params.num_prompt
            self.hot_prefixes.add(self._keys(request)[: request.params.num_prompt // size], request.params.num_prompt)
            num_device = min(num_skipped, len(found))
            self._loads.count(full, num_device, num_skipped - num_device - num_disk, num_disk)
        if num_skipped:
            assert request.row is not None, "requests start in a row"
            builder.state_loads.append((request.row, self.snapshots.use(full[num_skipped - 1], builder.step)))
        pages.snapshots = sorted({index * size for index in (len(found), self._num_full(request)) if index > num_skipped})
        self._count_hits(request, before)
        self._publish(request, len(self._keys(request)))

    def skip_computed(self, request: Request, builder: StepBuilder) -> bool:
        """Returns true: what others computed lacks the state."""
        return True

    def grow(self, request: Request, start: int, count: int, rewrites: bool = False) -> int:
        """Returns how many tokens, of `count`, a request may compute from `start` on: up to its next snapshot."""
        return min([count, *(end - start for end in request.pages.snapshots if end > start)])

    def can_extend(self, chunk: ScheduledChunk) -> bool:
        """Returns whether the chunk ends at no snapshot."""
        return not self._is_saved(chunk.request, chunk.end)

    def record_written(self, chunk: ScheduledChunk, builder: StepBuilder) -> None:
        """Records that the step writes this chunk, and the snapshot at its end."""
        super().record_written(chunk, builder)
        request, end = chunk.request, chunk.end
        if not self._is_saved(request, end):
            return
        self._settle()
        if end <= len(request.tokens) and self.snapshots.has(self._key_before(request, end)):
            return
        slot = self.snapshots.take(builder.step)
        add_stores(self.snapshots, builder)
        if slot is not None:
            assert request.row is not None, "only running requests compute"
            builder.state_saves.append((request.row, slot))
            self._unnamed.append(_Unnamed(request, end, slot, builder.step))
            self._settle()

    def hold_written(self, request: Request, num_computed: int) -> list[int]:
        """See `PrefixSharing`. Holds no page beyond the `num_computed` tokens of the state that arrives."""
        held, limit = super().hold_written(request, num_computed), num_computed // self.pool.page_size
        self.pool.release(held[limit:])
        return held[:limit]

    def take_back(self, step: int, lost: Collection[int] = ()) -> None:
        """Drops the snapshots of a plan that no rank computed, and those in the slots `lost`."""
        self._settle()
        for unnamed in [unnamed for unnamed in self._unnamed if unnamed.step == step]:
            self._unnamed.remove(unnamed)
            self.snapshots.give_back(unnamed.slot)
        self.snapshots.take_back(step, lost)

    def _hold(self, request: Request, found: list[int], full: Sequence[bytes]) -> None:
        """Assigns the pages found, and new ones, which evict no page of the request from host memory."""
        pool, pages = self.pool, request.pages
        pages.ids, pages.num_keyed = list(found), len(found)
        pool.reuse(found, len(full))
        slots = pool.host.pin(full[len(found) :], MAX_PINNED_SHARE)
        own = pool.allocate(pool.pages_for(len(request.tokens)) - len(found))
        pool.host.unpin(reversed(slots))
        assert own is not None, "admission checked the free pages"
        pages.ids += own
        self.allocated_pages += len(own)

    def _load(
        self, request: Request, lookup: Lookup, builder: StepBuilder, model: StepModel | None, num_written: int
    ) -> tuple[int, int]:
        """Loads pages up to a snapshot beyond those on the device, if that pays.

        Returns how many pages the request skips, and how many of them were read from disk for a request.
        num_written: pages that earlier plans write.
        """
        full, num_found = lookup.keys, lookup.num_found
        if num_written == num_found:
            slots = self.pool.host.match(full[num_found:])
            end = self.snapshots.longest(full[: num_found + len(slots)], builder.step)
            if end > num_found:
                num_disk = end - num_found - self.pool.host.num_own(slots[: end - num_found])
                self._loads.start(request, replace(lookup, keys=full[:end]), builder, model)
                if self.pool.written(request.pages.ids[end - 1]) == self.pool.page_size:
                    return end, num_disk
        return self.snapshots.longest(full[:num_written], builder.step), 0

    def _is_saved(self, request: Request, end: int) -> bool:
        """Returns whether a chunk that ends there saves a snapshot."""
        is_full = end % self.pool.page_size == 0
        return is_full and (end > request.params.num_prompt or end in request.pages.snapshots)

    def _written_before(self, page: int, builder: StepBuilder) -> int:
        """Returns how many slots of a page the plans before this one write."""
        write = builder.written_pages.get(page)
        return self.writes.written(page) if write is None else write.slots

    def _settle(self) -> None:
        """Names the snapshots whose tokens are known by now; a plan may precede the token that it computes."""
        waiting, self._unnamed = self._unnamed, []
        for unnamed in waiting:
            request, pages = unnamed.request, unnamed.request.pages
            if unnamed.end <= len(request.tokens):
                key = self._key_before(request, unnamed.end)
                if self.snapshots.has(key):
                    self.snapshots.give_back(unnamed.slot)
                    continue
                if unnamed.end > request.params.num_prompt:
                    self.snapshots.drop(pages.output_snapshot)
                    pages.output_snapshot = key
                self.snapshots.name(unnamed.slot, key, unnamed.step, unnamed.end)
            elif request.has_ended and not request.in_flight:
                self.snapshots.give_back(unnamed.slot)
            else:
                self._unnamed.append(unnamed)

    def _key_before(self, request: Request, end: int) -> bytes:
        return self._keys(request)[end // self.pool.page_size - 1]
