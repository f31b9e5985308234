"""Page accounting of a simulated group: pages of requests, and an LRU prefix cache of blocks.

    free = total - pages of requests - blocks (in use or idle) * pages per block        idle blocks count as free

The rules are those of `core.kv.page_pool` with the trace's blocks as units: a request shares the blocks that its prompt starts
with, publishes its own full ones, and needs pages for its whole context to start.
"""

from collections import OrderedDict

from bench.simulate.jobs import Job

PAGE = 16


class Pages:
    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self.block_pages = block_tokens // PAGE
        self.own = 0
        self.reserved = 0
        self.evicted = 0
        self.changes: list[tuple[bool, int]] = []  # blocks added (True) or evicted since the last report, in order
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Pages that requests use, each counted once."""
        return self.own + len(self._refs) * self.block_pages

    @property
    def free(self) -> int:
        """Pages that can be allocated, idle blocks included."""
        return self.total - self.used - self.reserved

    def hit_blocks(self, job: Job) -> int:
        """Returns the number of leading prompt blocks that are cached; at least one token remains to compute."""
        count = 0
        for block in job.blocks[: (job.prompt_tokens - 1) // self.block_tokens]:
            if block not in self._refs and block not in self._idle:
                break
            count += 1
        return count

    def needed(self, job: Job, hits: int) -> int:
        """Returns the free pages that a new job takes: its own, and the idle blocks that it reuses."""
        idle = sum(block in self._idle for block in job.blocks[:hits])
        return -(-job.tokens // PAGE) - hits * self.block_pages + idle * self.block_pages

    def allocate(self, job: Job, hits: int) -> None:
        """Allocates pages for all tokens of a job, and publishes the new full blocks of its prompt."""
        full = min(len(job.blocks), job.prompt_tokens // self.block_tokens)
        for index, block in enumerate(job.blocks[:full]):
            if block in self._idle:
                if index >= hits:
                    break
                del self._idle[block]
                self._refs[block] = 1
            elif block in self._refs:
                if index >= hits:
                    break
                self._refs[block] += 1
            else:
                self._make_room(self.block_pages)
                self._refs[block] = 1
                self.changes.append((True, block))
            job.shared_blocks.append(block)
        job.own_pages = max(0, -(-job.tokens // PAGE) - len(job.shared_blocks) * self.block_pages)
        self._make_room(job.own_pages)
        self.own += job.own_pages

    def grow(self, count: int) -> None:
        """Allocates pages for decodes, which count them."""
        self._make_room(count)
        self.own += count

    def release(self, job: Job, own_pages: int) -> None:
        """Releases a job's pages; unused blocks stay cached until eviction, the last block first."""
        self.own -= own_pages
        for block in reversed(job.shared_blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
                self._idle[block] = None
        job.shared_blocks = []
        job.own_pages = 0

    def _make_room(self, pages: int) -> None:
        """Evicts idle blocks until `pages` are free."""
        while self._idle and self.total - self.used - self.reserved - len(self._idle) * self.block_pages < pages:
            block, _ = self._idle.popitem(last=False)
            self.evicted += 1
            self.changes.append((False, block))
