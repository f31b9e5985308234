"""Estimates the hit rate that the prefix cache would have with other numbers of pages: an online miss-ratio curve.

A lookup hits in an LRU cache of C pages if fewer than C other pages were used since the page's last use. That number is the
page's depth in a stack ordered by last use, so one pass over the lookups gives the hit rate at every size (Mattson et al. 1970).

A page of a chain counts as a hit only if all pages before it are hits. A prompt's pages are therefore used from the last to the
first, as the page pool releases them: each use of a page is followed by a use of its parent, so a parent is always less deep than
its children, and every cache that holds a page holds the pages before it. Depths are read before the prompt's own uses.

Depths are measured for a sample of keys, those below a bound, and scaled by its rate (SHARDS, Waldspurger et al., FAST 2015). The
rate starts at 1, where the curve is exact, and halves when the sample exceeds its limit. Pages deeper than the largest size of
interest are dropped: lookups of them miss at every such size. So the memory is bounded, and the rate too: it stays above half of
limit / largest size, whatever the number of distinct pages.

Whether the pool found a page is known for all lookups, sampled or not. Found and missed lookups are therefore estimated apart and
weighted by their true numbers (post-stratification): what the pool finds is exact, what another size changes is estimated.

A sample has few or no keys of a few pages. So lookups of the first depths are counted without it: after a prompt the top of the
stack is that prompt, so its keys need a list per prompt and no tree. Only deeper lookups are estimated.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, islice, takewhile

from phalanx_api.cache_curve import NO_CURVE, SIZES, CacheCurve

MAX_SAMPLES = 8192
EXACT_PAGES = 256
"""Largest size without a sample."""
HALF_LIFE_PAGES = 64
"""Counts halve whenever this many lookups per page of the cache were counted."""
MIN_HALF_LIFE = 16_384
"""Fewest lookups before that."""
KEY_BITS = 128
_BLOCK_BITS = 512
REFRESH_SHARE = 0.05
"""A reported curve is kept until the number of lookups changes by this share: computing one takes up to 0.5 ms."""


class RecencyStack:
    """Keys ordered by last use.

    Use t sets bit t, and clears the bit of the key's previous use: the depth of a key is the number of bits above its own. Bits
    are in integers of `_BLOCK_BITS` bits, with the number of set bits of each. When no bit is left, keys get the lowest in order.
    """

    def __init__(self, max_keys: int) -> None:
        self._bit_of: OrderedDict[bytes, int] = OrderedDict()
        """The least recently used key first."""
        self._blocks = [0] * (-(-2 * (max_keys + 1) // _BLOCK_BITS))
        self._counts = [0] * len(self._blocks)
        self._next_bit = 0

    def __len__(self) -> int:
        return len(self._bit_of)

    def depth(self, key: bytes) -> int | None:
        """Returns the number of keys used after this one, if it is in the stack."""
        bit = self._bit_of.get(key)
        if bit is None:
            return None
        block, offset = divmod(bit, _BLOCK_BITS)
        return sum(self._counts[block + 1 :]) + (self._blocks[block] >> offset).bit_count() - 1

    def use(self, key: bytes) -> None:
        """Moves or adds a key to the top."""
        if self._next_bit == len(self._blocks) * _BLOCK_BITS:
            self._renumber()
        former = self._bit_of.get(key)
        if former is not None:
            self._flip(former, -1)
        self._flip(self._next_bit, 1)
        self._bit_of[key] = self._next_bit
        self._bit_of.move_to_end(key)
        self._next_bit += 1

    def drop_oldest(self) -> None:
        """Removes the least recently used key."""
        self._flip(self._bit_of.popitem(last=False)[1], -1)

    def newest(self, count: int) -> list[bytes]:
        """Returns up to `count` keys, the last used one first."""
        return list(islice(reversed(self._bit_of), count))

    def keep_below(self, bound: bytes) -> None:
        """Removes all keys that are not less than `bound`."""
        for key in [key for key in self._bit_of if key >= bound]:
            self._flip(self._bit_of.pop(key), -1)

    def _flip(self, bit: int, change: int) -> None:
        block, offset = divmod(bit, _BLOCK_BITS)
        self._blocks[block] ^= 1 << offset
        self._counts[block] += change

    def _renumber(self) -> None:
        self._blocks = [0] * len(self._blocks)
        self._counts = [0] * len(self._blocks)
        for bit, key in enumerate(self._bit_of):
            self._bit_of[key] = bit
            self._flip(bit, 1)
        self._next_bit = len(self._bit_of)


class StackTop:
    """The first `max_keys` keys of the stack, sampled or not, if prompts use all their pages."""

    def __init__(self, max_keys: int, keys: Sequence[bytes] = ()) -> None:
        """keys: the last used one first."""
        self.max_keys = max_keys
        self._keys = list(keys)

    def depths(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the depths of a prompt's pages up to the first one that is not there: those after it are deeper."""
        depth_of = {key: depth for depth, key in enumerate(self._keys)}
        return list(takewhile(lambda depth: depth >= 0, (depth_of.get(key, -1) for key in islice(keys, self.max_keys))))

    def use(self, keys: Sequence[bytes]) -> None:
        """Moves or adds a prompt's pages to the top, the first one last."""
        first = list(keys[: self.max_keys])
        if self._keys[: len(first)] != first:
            used = set(first)
            self._keys = (first + [key for key in self._keys if key not in used])[: self.max_keys]


class _Lookups:
    """Lookups with one outcome in the pool: their number, that of the sampled ones, and these by depth in the sample."""

    __slots__ = ("at_top", "by_depth", "num_sampled", "total")

    def __init__(self, num_depths: int) -> None:
        self.total = 0.0
        self.num_sampled = 0.0
        self.by_depth = array("d", bytes(8 * num_depths))
        self.at_top = array("d")
        """Of all keys, by depth; empty while all are sampled."""

    def num_within(self, reaches: Sequence[float]) -> list[float]:
        """Returns how many sampled lookups are less deep than each reach, in keys of the sample; depth 0 always is."""
        sums = list(accumulate(self.by_depth, initial=0.0))
        counts = []
        for reach in reaches:
            num_full = min(max(int(reach), 1), len(self.by_depth))
            is_partly = num_full < len(self.by_depth) and reach > num_full
            counts.append(sums[num_full] + (self.by_depth[num_full] * (reach - num_full) if is_partly else 0.0))
        return counts

    def hits(self, sizes: Sequence[float], rate: float) -> list[float]:
        """Returns the lookups that hit at each size: those at the top are counted, of the deeper ones the share is estimated."""
        num_top, top = sum(self.at_top), len(self.at_top)
        sampled_top, *within = self.num_within([top * rate, *(size * rate for size in sizes)])
        sampled_top = sampled_top if top else 0.0
        num_deep = self.num_sampled - sampled_top
        share = (self.total - num_top) / num_deep if num_deep > 0 else 0.0
        return [
            num_top + share * (count - sampled_top) if size > top else sum(self.at_top[: int(size)])
            for size, count in zip(sizes, within, strict=True)
        ]

    def hits_adjusted(self, sizes: Sequence[float], rate: float) -> list[float]:
        """Returns the same, as all lookups but the misses of each size, scaled by the rate (SHARDS-adj).

        Popular keys, sampled or not by chance, are not among the misses of large sizes, but among those of small ones. Those of
        the top are known: the estimate's error there corrects larger sizes, by less the fewer misses they have.
        """
        top, deep = len(self.at_top), self.total - sum(self.at_top)
        sampled_top, *within = self.num_within([top * rate, *(size * rate for size in sizes)])
        estimated = (self.num_sampled - sampled_top) / rate if top else deep
        power = 2 if 2 * deep >= estimated else 1  # a square would not fall with the size
        hits = []
        for size, count in zip(sizes, within, strict=True):
            lost = (self.num_sampled - count) / rate
            lost += (deep - estimated) * (lost / estimated) ** power if estimated > 0 else 0.0
            hits.append(self.total - lost if size > top else sum(self.at_top[: int(size)]))
        return hits

    def halve(self) -> None:
        """Halves all counts."""
        self.total /= 2
        self.num_sampled /= 2
        for depth, count in enumerate(self.by_depth):
            self.by_depth[depth] = count / 2
        self.at_top = array("d", (count / 2 for count in self.at_top))

    def lower_rate(self) -> None:
        """Counts as if half the keys had been sampled: depths halve too."""
        former, self.by_depth = self.by_depth, array("d", bytes(8 * len(self.by_depth)))
        for depth, count in enumerate(former):
            self.by_depth[depth // 2] += count / 2
        self.num_sampled /= 2


class MissRatioCurve:
    """The curve for sizes up to `max_pages`. Keys are uniform hashes of `KEY_BITS` bits."""

    def __init__(
        self,
        max_pages: int,
        *,
        max_samples: int = MAX_SAMPLES,
        half_life: int | None = None,
        exact_pages: int = EXACT_PAGES,
    ) -> None:
        """exact_pages: largest size without a sample; 0 if prompts do not use all their pages."""
        self._max_pages, self._exact_pages = max_pages, exact_pages
        self._max_samples = max_samples
        self._max_keys = min(max_pages, max_samples)
        """Keys in the stack: deeper ones miss at every size."""
        self._half_life = half_life or max(MIN_HALF_LIFE, HALF_LIFE_PAGES * max_pages // round(SIZES[-1]))
        self._stack = RecencyStack(self._max_keys)
        self.rate = 1.0
        """Share of the keys that are sampled."""
        self._bound = b""
        """Keys below it are sampled; empty: all."""
        self._top = StackTop(0)
        """Without keys while all are sampled."""
        self._found = _Lookups(self._max_keys)
        self._missed = _Lookups(self._max_keys)
        self._reported = NO_CURVE

    @property
    def lookups(self) -> int:
        """Lookups that the curve counts; old ones count less."""
        return round(self._found.total + self._missed.total)

    def look_up(self, keys: Sequence[bytes], num_found: int, *, uses_missed: bool = True) -> None:
        """Counts the lookups of a prompt's pages, in chain order, and uses them. `num_found`: pages that the pool had."""
        found, missed = self._sampled(keys[:num_found]), self._sampled(keys[num_found:])
        self._found.total += num_found
        self._missed.total += len(keys) - num_found
        for lookups, sampled in ((self._found, found), (self._missed, missed)):
            lookups.num_sampled += len(sampled)
            for key in sampled:
                depth = self._stack.depth(key)
                if depth is not None:
                    lookups.by_depth[depth] += 1
        for i, depth in enumerate(self._top.depths(keys) if self._top.max_keys else ()):
            (self._found if i < num_found else self._missed).at_top[depth] += 1
        if uses_missed:
            self._use(missed)
        self._use(found)
        self._top.use(keys)
        self._age()

    def count_misses(self, keys: Sequence[bytes]) -> None:
        """Counts lookups that miss at every size, without a use."""
        self._missed.total += len(keys)
        self._missed.num_sampled += len(self._sampled(keys))
        self._age()

    def use(self, keys: Sequence[bytes]) -> None:
        """Uses pages without a lookup: a request that ends leaves its pages, in chain order, to the cache."""
        self._use(self._sampled(keys))
        self._top.use(keys)

    def hit_rate(self, num_pages: float) -> float:
        """Returns the estimated hit rate of a cache of at most `max_pages` pages; 0 without lookups."""
        return self.hit_rates([num_pages])[0]

    def hit_rates(self, sizes: Sequence[float]) -> list[float]:
        """Returns the estimated hit rate of each size of at most `max_pages` pages; 0 without lookups, and without pages."""
        found, missed = self._found, self._missed
        total = found.total + missed.total
        if not total:
            return [0.0] * len(sizes)
        hits = zip(sizes, found.hits_adjusted(sizes, self.rate), missed.hits(sizes, self.rate), strict=True)
        return [min(max((old + new) / total, 0.0), 1.0) if size else 0.0 for size, old, new in hits]

    def reuse_pages(self, share: float) -> float:
        """Returns the number of pages used between two uses of a page: the quantile `share` of lookups of pages in the stack."""
        missed_weight = self._missed.total / self._missed.num_sampled if self._missed.num_sampled else 0.0
        counts = [
            found / self.rate + missed * missed_weight
            for found, missed in zip(self._found.by_depth, self._missed.by_depth, strict=True)
        ]
        wanted, reached = share * sum(counts), 0.0
        for depth, count in enumerate(counts):
            reached += count
            if count and reached >= wanted:
                return depth / self.rate
        return 0.0

    def report(self, num_pages: int) -> CacheCurve:
        """Returns the curve at `SIZES` of a cache of `num_pages` pages, at most `REFRESH_SHARE` out of date."""
        lookups, reported = self.lookups, self._reported.lookups
        if abs(lookups - reported) > REFRESH_SHARE * reported:
            self._reported = CacheCurve(lookups, self.hit_rates([size * num_pages for size in SIZES]))
        return self._reported

    def halve(self) -> None:
        """Lets all lookups so far count half."""
        self._found.halve()
        self._missed.halve()
        self._reported = NO_CURVE  # else a curve of as many earlier lookups could be kept

    def _age(self) -> None:
        if self._found.total + self._missed.total >= self._half_life:
            self.halve()

    def _sampled(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        bound = self._bound
        return [key for key in keys if key < bound] if bound else keys

    def _use(self, sampled: Sequence[bytes]) -> None:
        stack = self._stack
        for key in reversed(sampled):
            if self._bound and key >= self._bound:
                continue  # the rate was lowered in this loop
            stack.use(key)
            while len(stack) > self._max_keys:
                if self._max_pages * self.rate > self._max_samples:
                    self._lower_rate()
                else:
                    stack.drop_oldest()

    def _lower_rate(self) -> None:
        if self.rate == 1:
            num_exact = min(self._exact_pages, self._max_keys)
            self._top = StackTop(num_exact, self._stack.newest(num_exact))
            for lookups in (self._found, self._missed):
                lookups.at_top = lookups.by_depth[:num_exact]
        self.rate /= 2
        self._max_keys = min(math.ceil(self._max_pages * self.rate), self._max_samples)
        self._bound = int(2**KEY_BITS * self.rate).to_bytes(KEY_BITS // 8, "big")
        self._stack.keep_below(self._bound)
        self._found.lower_rate()
        self._missed.lower_rate()
