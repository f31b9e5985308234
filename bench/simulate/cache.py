"""The page accounting of a simulated group: pages of requests, and a prefix cache of blocks, least recently used first to go.

    free = total - held by requests alone - blocks (held or idle) * pages of a block        idle blocks count as free

The rules are those of `core.kv.page_pool`, at the grain of the trace's blocks: a request shares the blocks that its
prompt begins with, publishes its own full ones, and needs its whole context in pages to start.
"""

from collections import OrderedDict

from bench.simulate.jobs import Job

PAGE = 16


class Pages:
    """Pages of one group. `changes`: blocks that became findable (True) or no longer are, in order, since somebody took them."""

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self.block_pages = block_tokens // PAGE
        self.own = 0
        self.reserved = 0
        self.evicted = 0
        self.changes: list[tuple[bool, int]] = []
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> int:
        """Pages that requests hold, each once."""
        return self.own + len(self._refs) * self.block_pages

    @property
    def free(self) -> int:
        """Pages that can be had, those of idle blocks included."""
        return self.total - self.held - self.reserved

    def hit_blocks(self, job: Job) -> int:
        """How many of the first blocks of a prompt are here; at least one token is left to compute."""
        count = 0
        for block in job.blocks[: (job.prompt_tokens - 1) // self.block_tokens]:
            if block not in self._refs and block not in self._idle:
                break
            count += 1
        return count

    def needed(self, job: Job, hits: int) -> int:
        """Pages off the free ones when a job starts: its own, and idle blocks that it takes hold of."""
        idle = sum(block in self._idle for block in job.blocks[:hits])
        return -(-job.tokens // PAGE) - hits * self.block_pages + idle * self.block_pages

    def begin(self, job: Job, hits: int) -> None:
        """Gives a job pages for all its tokens; the full blocks of its prompt that are new are published at once."""
        full = min(len(job.blocks), job.prompt_tokens // self.block_tokens)
        for place, block in enumerate(job.blocks[:full]):
            if block in self._idle:
                if place >= hits:
                    break
                del self._idle[block]
                self._refs[block] = 1
            elif block in self._refs:
                if place >= hits:
                    break
                self._refs[block] += 1
            else:
                self._make_room(self.block_pages)
                self._refs[block] = 1
                self.changes.append((True, block))
            job.held.append(block)
        job.own_pages = max(0, -(-job.tokens // PAGE) - len(job.held) * self.block_pages)
        self._make_room(job.own_pages)
        self.own += job.own_pages

    def grow(self, count: int) -> None:
        """Takes pages for decodes, which count them themselves."""
        self._make_room(count)
        self.own += count

    def end(self, job: Job, own_pages: int) -> None:
        """Takes a job's pages back; blocks that nobody holds any more can be found until they are evicted, the last one first."""
        self.own -= own_pages
        for block in reversed(job.held):
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
                self._idle[block] = None
        job.held = []
        job.own_pages = 0

    def _make_room(self, pages: int) -> None:
        """Evicts idle blocks until so many pages are free of everything."""
        while self._idle and self.total - self.held - self.reserved - len(self._idle) * self.block_pages < pages:
            block, _ = self._idle.popitem(last=False)
            self.evicted += 1
            self.changes.append((False, block))
