"""Shares pages between requests: a request skips tokens that a page holds, or will hold after this step.

    [0, run) pages found by key · [run, full) own pages, published at once · tail: own, partly filled

A page found by key may not be written yet. The first request with a chunk there writes it; all others skip to the slots that the
plans so far write (a step writes all keys and values of a layer before attention). If a writer leaves, the next request continues
in its place. The tail of a prompt (the tokens after the last full page, without the last token) has no key; while its first owner
or a copy of it runs, equal requests copy its page. Copies happen before the pass, so only from pages that earlier plans wrote: a
request whose tail is written in this step waits for the next one. A page that begins with the same tokens but continues
differently is copied too. At least the last token is always computed, for its logits. Requests for prompt logprobs compute the
whole prompt, unless they already have output: then the logprobs were delivered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder

# Hot prefixes: the heaviest by their share of recent prompt tokens.
# Space-saving (Metwally et al. 2005) over page keys: `COUNTERS` counters; a new key replaces the lightest one and takes its
# weight as
# error. A key stands for its whole prefix, so a prompt is counted at depths of 1, 2, 3, 4, 6, 8, 12 ... pages, as far as they
# have counters,
# and one step deeper. A prefix reaches its depth after as many prompts as there are steps to it; a unique prompt costs one
# counter. The
# reported weight is reduced by the error, so it is never too high. Weights halve in `HALF_LIFE_S`.

COUNTERS = 64
TOLD = 8
HALF_LIFE_S = 30.0
DECAY_EVERY_S = 1.0
SAME_SHARE = 0.8
"""A prefix is omitted when a longer one has this share of its weight."""
LEAST_SHARE = 0.01


@dataclass(slots=True)
class _Counter:
    """`parent`: key at the depth before, if it had a counter."""

    pages: int
    weight: float
    error: float
    parent: bytes | None


def depths(pages: int) -> Iterator[int]:
    """Yields the depths at which a prompt of this many full pages is counted."""
    depth = 1
    while depth <= pages:
        yield depth
        if depth + depth // 2 <= pages and depth > 1:
            yield depth + depth // 2
        depth *= 2


class HotPrefixes:
    """Counts prompts by their prefixes."""

    def __init__(self) -> None:
        self._counters: dict[bytes, _Counter] = {}
        self._total = 0.0
        self._decayed_s: float | None = None

    def add(self, keys: Sequence[bytes], num_tokens: int) -> None:
        """Counts a prompt of `num_tokens` tokens whose full pages have these keys."""
        self._total += num_tokens
        parent: bytes | None = None
        for depth in depths(len(keys)):
            key = keys[depth - 1]
            counter = self._counters.get(key)
            if counter is None:
                self._begin(key, depth, num_tokens, parent)
                return
            counter.weight += num_tokens
            parent = key

    def heaviest(self) -> list[wire.HeavyPrefix]:
        """Returns the heaviest prefixes in order, each with at least `LEAST_SHARE`, without those that a longer one covers."""
        least = LEAST_SHARE * self._total
        sure = {key: c.weight - c.error for key, c in self._counters.items() if c.weight - c.error > least}
        covered = {
            counter.parent
            for key, counter in self._counters.items()
            if key in sure and counter.parent in sure and sure[key] >= SAME_SHARE * sure[counter.parent]
        }
        told = sorted((key for key in sure if key not in covered), key=lambda key: -sure[key])[:TOLD]
        return [wire.HeavyPrefix(key, self._counters[key].pages, sure[key] / self._total) for key in told]

    def _begin(self, key: bytes, pages: int, num_tokens: int, parent: bytes | None) -> None:
        """Assigns a counter to a key, the lightest one if all are in use."""
        error = 0.0
        if len(self._counters) >= COUNTERS:
            lightest = min(self._counters, key=lambda other: self._counters[other].weight)
            error = self._counters.pop(lightest).weight
        self._counters[key] = _Counter(pages, error + num_tokens, error, parent)

    def decay(self, now: float) -> None:
        """Decays the weights by the time since the last call."""
        if self._decayed_s is None:
            self._decayed_s = now
        passed = now - self._decayed_s
        if passed < DECAY_EVERY_S:
            return
        self._decayed_s = now
        factor: float = 0.5 ** (passed / HALF_LIFE_S)
        self._total *= factor
        for counter in self._counters.values():
            counter.weight *= factor
            counter.error *= factor


Tail = tuple[bytes, tuple[int, ...]]
"""Key before the page, and its tokens."""


class PrefixSharing:
    """The pages of requests over one pool. Counts prompt tokens that were queried and found."""

    def __init__(self, pool: PagePool, model: str, is_on: bool = True) -> None:
        self.pool = pool
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.taken_pages = 0
        """Pages allocated at the start of requests, since the start."""
        self.heavy = HotPrefixes()
        self._model = model
        self._is_on = is_on
        self._tails: dict[Tail, list[int]] = {}
        """Pages of each tail: its first owner's, then copies."""
        self._tail_of: dict[int, Tail] = {}

    def begin(self, request: Request, asked: wire.Request) -> None:
        """Prepares the keys of a new request."""
        root = root_key(self._model, "", asked.tenant, asked.cache_salt)
        request.keys = PrefixKeys(root, self.pool.page_size)

    def find(self, request: Request) -> list[int]:
        """Returns the pages that a waiting request would share now."""
        if not self._shares(request):
            return []
        return self.pool.match(self._keys(request)[: self._full(request)])

    def must_wait(self, request: Request, run: list[int], making: StepBuilder) -> bool:
        """Returns whether everything except the tail of a waiting request is written, and this step writes the tail."""
        if len(run) < self._full(request) or not self._shares(request):
            return False
        pages = self._tails.get(self._tail(request))
        return pages is not None and pages[0] in making.fresh and (not run or self.pool.written(run[-1]) == self.pool.page_size)

    def take(self, request: Request, run: list[int], making: StepBuilder) -> None:
        """Allocates all pages of a request: the run that `find` just returned, and new ones, which are published."""
        pool, keys = self.pool, self._keys(request)
        pool.reuse(run, self._full(request))
        own = pool.take(pool.pages_for(len(request.tokens)) - len(run))
        assert own is not None, "admission checked the free pages"
        self.taken_pages += len(own)
        request.pages = run + own
        request.keyed = len(run)
        request.found = len(run) * pool.page_size
        if not request.farthest:
            self.queried_tokens += request.num_prompt
            self.heavy.add(keys[: request.num_prompt // pool.page_size], request.num_prompt)
        before = request.computed
        self.skip(request, making)
        if request.computed == len(run) * pool.page_size and self._shares(request):
            self._copy_beginning(request, len(run), making)
        self._note_hits(request, before)
        self._publish(request, keys)
        self._offer_tail(request)

    def hold(self, request: Request) -> list[int]:
        """Holds and returns the fully written pages that a request would share now; the others arrive with its move."""
        run = self.find(request)
        size = self.pool.page_size
        written = next((i for i, page in enumerate(run) if self.pool.written(page) < size), len(run))
        self.pool.share(run[:written])
        return run[:written]

    def adopt(self, request: Request, pages: list[int], num_held: int, computed: int) -> None:
        """Assigns pages with the first `computed` tokens to a request; pages after the first `num_held` are published now."""
        request.pages, request.keyed = pages, num_held
        request.computed = request.farthest = computed
        full = computed // self.pool.page_size
        self._publish(request, self._keys(request), full)
        for page in pages[num_held:full]:
            self.pool.mark_written(page, self.pool.page_size)

    def skip(self, request: Request, making: StepBuilder) -> bool:
        """Advances a request over written tokens. Returns False when it must wait for the next step to copy its tail."""
        if not self._shares(request) or request.missing <= 1:
            return True
        before = request.computed
        size, last = self.pool.page_size, len(request.tokens) - 1
        full = self._full(request)
        while request.computed < full * size:
            page = request.pages[request.computed // size]
            end = request.computed // size * size + self.pool.written(page)
            if end <= request.computed:
                break
            request.computed = end
        ready = True
        if request.computed == full * size < last:
            ready = self._take_tail(request, full, making)
        self._note_hits(request, before)
        return ready

    def note_written(self, chunk: ScheduledChunk, making: StepBuilder) -> None:
        """Records that this chunk writes its tokens: full pages get their key, and others may read them from this step on."""
        request, size = chunk.request, self.pool.page_size
        if request.is_chained and chunk.end // size > request.keyed:
            self._publish(request, self._keys(request), chunk.end // size)
        is_decode = chunk.count == 1 and chunk.end == len(request.tokens)  # a growing page is shared only when it is full
        for i in range((chunk.start - len(chunk.strays)) // size, chunk.end // size if is_decode else -(-chunk.end // size)):
            page = request.pages[i]
            self.pool.mark_written(page, min(size, chunk.end - i * size))
            making.fresh.add(page)
        if chunk.count > 1:
            self._offer_tail(request)

    def note_accepted(self, chunk: ScheduledChunk) -> None:
        """Records accepted draft tokens as computed: pages that became full get their key, as far as the tokens are in their
        slots."""
        request, size = chunk.request, self.pool.page_size
        full = request.placed // size
        if request.is_chained and full > request.keyed:
            self._publish(request, self._keys(request), full)
        for page in request.pages[chunk.start // size : full]:
            self.pool.mark_written(page, size)

    def goes_on(self, chunk: ScheduledChunk) -> bool:
        """Returns whether no chunk writes what follows this one, so that it may be extended."""
        size = self.pool.page_size
        return self.pool.written(chunk.request.pages[chunk.end // size]) <= chunk.end % size

    def let_go(self, request: Request) -> None:
        """Frees all pages of a request."""
        for page in request.pages:
            tail = self._tail_of.pop(page, None) if self._tail_of else None
            if tail is not None:
                self._tails[tail].remove(page)
                if not self._tails[tail]:
                    del self._tails[tail]
        self.pool.give_back(request.pages)
        request.pages = []
        request.farthest = max(request.farthest, request.computed)
        request.computed = request.keyed = request.sent = request.found = 0
        request.is_chained = True
        request.is_cut = False
        request.strays = []
        if request.proposing is not None:
            request.proposing.num_drafted_pages = 0

    def _shares(self, request: Request) -> bool:
        return self._is_on and (request.sampling.prompt_logprobs is None or request.num_output > 0)

    def _full(self, request: Request) -> int:
        """How many full pages may come from others, so that the last token is computed."""
        return (len(request.tokens) - 1) // self.pool.page_size

    def _keys(self, request: Request) -> list[bytes]:
        assert request.keys is not None, "the scheduler prepares keys when a request comes"
        return request.keys.extend(request.tokens) if self._is_on else []

    def _tail(self, request: Request) -> Tail:
        full = self._full(request)
        assert request.keys is not None, "the scheduler prepares keys when a request comes"
        before = request.keys.keys[full - 1] if full else request.keys.root
        return before, tuple(request.tokens[full * self.pool.page_size : -1])

    def _take_tail(self, request: Request, full: int, making: StepBuilder) -> bool:
        """Copies the tail from a page that holds it, or makes this request the one that others copy from.

        The page that is copied to may have other sharers: when the prompt ends with a page, that page has a key already. They
        share it for equal tokens after equal tokens, so the copy puts there what is there or what they wait for.
        """
        tail, own = self._tail(request), request.pages[full]
        pages = self._tails.get(tail, [])
        if own in pages:
            return True
        if pages and pages[0] in making.fresh:
            return False
        if pages and self.pool.written(pages[0]) >= len(tail[1]):
            self._copy(pages[0], own, len(tail[1]), making)
            request.computed += len(tail[1])
            self.pool.mark_written(own, len(tail[1]))
            making.fresh.add(own)
            self._offer(own, tail)
            return True
        for page in pages:
            del self._tail_of[page]
        self._tails.pop(tail, None)
        self._offer_tail(request)
        return True

    def _offer_tail(self, request: Request) -> None:
        """Lets equal requests copy the tail of this one, unless they have one to copy already."""
        full = self._full(request)
        if self._is_on and full * self.pool.page_size < len(request.tokens) - 1:
            tail, own = self._tail(request), request.pages[full]
            if tail not in self._tails:
                self._offer(own, tail)

    def _offer(self, page: int, tail: Tail) -> None:
        if page not in self._tail_of:
            self._tails.setdefault(tail, []).append(page)
            self._tail_of[page] = tail

    def _copy_beginning(self, request: Request, position: int, making: StepBuilder) -> None:
        """Copies what a cached page has in common with the first page that was not found."""
        if not position or request.missing <= 1:
            return
        start = position * self.pool.page_size
        found = self.pool.match_beginning(request.pages[position - 1], request.tokens[start : start + self.pool.page_size])
        if found is None or found[0] in making.fresh or found[0] == request.pages[position]:
            return
        same = min(found[1], request.missing - 1)
        if same:
            self._copy(found[0], request.pages[position], same, making)
            request.computed += same

    def _copy(self, source: int, target: int, count: int, making: StepBuilder) -> None:
        """Copies happen before the pass: what a draft computes in this very step is not among them."""
        making.copies.append((source, target))
        self.pool.copied(source, target, count, is_drafted=source not in making.drafted)

    def _publish(self, request: Request, keys: list[bytes], end: int | None = None) -> None:
        """Offers full pages of a request to the cache, those not written yet included.

        Stops for good at a page that the cache has already: what came after would keep that page held beside the request's own,
        and a request that fits the pool alone might not fit any more.
        """
        size = self.pool.page_size
        for i in range(request.keyed, len(keys) if end is None else min(end, len(keys))):
            if not request.is_chained:
                return
            parent = request.pages[i - 1] if i else None
            own = request.tokens[i * size : (i + 1) * size]
            request.is_chained = self.pool.publish(request.pages[i], keys[i], parent, own)
            request.keyed = i + 1

    def _note_hits(self, request: Request, before: int) -> None:
        """Counts prompt tokens that were skipped, except those that this request had computed before it was preempted."""
        hits = min(request.computed, request.num_prompt) - max(before, request.farthest)
        if hits > 0:
            request.cached_tokens += hits
            self.hit_tokens += hits
        request.farthest = max(request.farthest, request.computed)
