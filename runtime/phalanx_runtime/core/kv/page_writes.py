"""What plans write to pages and their parts: slots by page, writes of the step that is being built, copies."""

from itertools import chain

from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.step_builder import FirstWrite, StepBuilder


class PageWrites:
    """The writes to the pages of one pool."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._parts = pool.parts

    def written(self, page: int) -> int:
        """Returns how many slots of a page, and of its part, the plans so far write."""
        return self._pool.written(page) if self._parts is None else self._parts.written(page)

    def mark(self, page: int, slots: int) -> None:
        """Records that the plans so far write the first `slots` slots."""
        self._pool.mark_written(page, slots)
        if self._parts is not None:
            self._parts.mark_written(page, slots)

    def mark_in_step(self, request: Request, page: int, slots: int, builder: StepBuilder) -> None:
        """Records that the step writes them for a request."""
        write = FirstWrite(self.written(page), request.params.order, self._pool.written(page))
        builder.written_pages.setdefault(page, write)
        self.mark(page, slots)

    def copy(self, source: int, target: int, count: int, builder: StepBuilder) -> None:
        """Adds the copy of `count` slots to the step."""
        builder.copies.append((source, target))
        if self._parts is not None:
            builder.part_copies.append((self._parts.part_of(source), self._parts.part_of(target)))
        self._pool.record_copy(source, target, count, is_drafted=source not in builder.drafted_pages)

    def take_back(self, request: Request, builder: StepBuilder) -> None:
        """Lets a request compute what it would have found in pages that this step does not write after all.

        The ranks get its row again: they have no image whose tokens were computed when they got it (`NewRow.images`).
        """
        pages = request.pages
        for i, page in enumerate(pages.ids):
            write = builder.written_pages.get(page)
            if write is None or write.order == request.params.order:
                continue
            end = i * self._pool.page_size + write.slots
            if end < request.num_computed:
                request.num_computed, pages.num_sent, pages.must_truncate = end, 0, False

    def unmark(self, builder: StepBuilder) -> None:
        """Records that the step, which was taken back, writes no page."""
        for page, write in builder.written_pages.items():
            self._pool.unmark_written(page, write.page_slots)
            if self._parts is not None:
                self._parts.unmark_written(page, write.slots)

    def add_pending(self, builder: StepBuilder) -> None:
        """Adds the pending copies between device and host memory to the step, and the parts that pages got."""
        if self._parts is not None:
            builder.parts = self._parts.take_unsent()
        used = (page for chunk in builder.chunks for page in chunk.request.pages.ids)
        builder.awaits_host_copies = self._pool.host.is_copying(chain(used, *builder.copies))
        builder.host_copies, builder.host_keys = self._pool.host.take()
        if self._parts is not None:
            read = (part for chunk in builder.chunks for part in self._parts.held(chunk.request.pages))
            builder.awaits_host_copies |= self._pool.host_parts.is_copying(chain(read, *builder.part_copies))
            builder.part_host_copies, builder.part_host_keys = self._pool.host_parts.take()
        builder.host_resize, builder.part_host_resize = self._pool.resize_host()

    def has_loads(self) -> bool:
        """Returns whether the next plan loads anything from host memory: it must follow at once."""
        return self._pool.host.has_loads or self._pool.host_parts.has_loads

    def is_loading(self, request: Request) -> bool:
        """Returns whether the next plan loads pages of a request from host memory, or their parts."""
        pool, pages = self._pool, request.pages
        loads_parts = self._parts is not None and pool.host_parts.is_loading(self._parts.held(pages))
        return loads_parts or pool.host.is_loading(pages.ids)
