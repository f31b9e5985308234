"""Random lives of requests over a small pool: pages are conserved, chains whole, events tell what is found, victims foretold."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.engine_config import EVICTION_POLICIES, EvictionPolicy
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.kv.page_pool import PagePool
from tests.runtime.core.reference_caches import SlowPolicy, make_slow

PAGE = 2
ROOT = root_key("model")


@dataclass
class Life:
    """One request: its tokens, its pages, how many tokens the plans made so far have written for it."""

    tokens: list[int]
    prefix: PrefixKeys
    pages: list[int]
    computed: int = 0


@dataclass
class World:
    """The pool, who lives on it, and a twin that foretells what is evicted."""

    pool: PagePool
    twin: SlowPolicy | None
    lives: list[Life] = field(default_factory=list)
    found: dict[bytes, bytes | None] = field(default_factory=dict)
    """What an observer of the events believes to be found: keys and their parents."""
    chains: dict[bytes, bytes | None] = field(default_factory=dict)
    """The key before each key that was ever published."""
    evicted: int = 0
    copied: int = 0
    replaced: int = 0

    def begin(self, tokens: list[int]) -> None:
        """A request comes in, if it fits."""
        prefix = PrefixKeys(ROOT, PAGE)
        keys = prefix.extend(tokens)
        run = self.pool.match(keys[: (len(tokens) - 1) // PAGE])
        wanted = self.pool.pages_for(len(tokens)) - len(run)
        if self.pool.free_pages - self.pool.unheld(run) < wanted:
            assert wanted > 0
            return
        self.pool.reuse(run, len(keys))
        self.tell_hits(run)
        new = self.pool.take(wanted)
        assert new is not None, "what counts as free can be taken"
        self.see_evictions()
        life = Life(tokens, prefix, run + new)
        self.publish(life, len(run))
        self.lives.append(life)

    def begin_inside(self, life: Life) -> None:
        """A request whose prefix ends inside a page of another begins with a copy of that page."""
        if life.computed < 2 * PAGE:
            return
        tokens = [*life.tokens[: 2 * PAGE - 1], 99]
        keys = PrefixKeys(ROOT, PAGE).extend(tokens)
        run = self.pool.match(keys[:1])
        if not run:
            return
        beginning = self.pool.match_beginning(run[0], tokens[PAGE:])
        if beginning is None or self.pool.free_pages - self.pool.unheld(run) < 1:
            return
        source, same = beginning
        assert self.tokens_of(self.key_of(source))[:same] == tokens[PAGE : PAGE + same]
        self.pool.reuse(run, 2)
        self.tell_hits(run)
        target = self.pool.take(1)
        assert target is not None
        self.see_evictions()
        self.copied += 1
        self.lives.append(Life(tokens, PrefixKeys(ROOT, PAGE), run + target, PAGE + same))

    def write(self, life: Life, count: int) -> None:
        """A chunk of the request is in the plan; what others wrote is skipped."""
        while count and life.computed < len(life.tokens):
            page = life.pages[life.computed // PAGE]
            written = life.computed // PAGE * PAGE + self.pool.written(page)
            if written > life.computed:
                life.computed = written
                continue
            life.computed += 1
            self.pool.mark_written(page, (life.computed - 1) % PAGE + 1)
            count -= 1

    def grow(self, life: Life, token: int) -> None:
        """The request draws a token, if it is wholly computed and a page is free."""
        if life.computed < len(life.tokens):
            return
        if len(life.tokens) == len(life.pages) * PAGE:
            new = self.pool.take(1)
            assert (new is None) == (self.pool.free_pages == 0) or new is not None
            if new is None:
                return
            self.see_evictions()
            life.pages += new
        life.tokens = [*life.tokens, token]
        if life.prefix.keys:
            self.publish(life, len(life.prefix.keys))

    def publish(self, life: Life, start: int) -> None:
        keys = life.prefix.extend(life.tokens)
        self.chains.update(zip(keys, [None, *keys], strict=False))
        for i in range(start, len(keys)):
            tokens = life.tokens[i * PAGE : (i + 1) * PAGE]
            published = self.pool.publish(life.pages[i], keys[i], life.pages[i - 1] if i else None, tokens)
            replaced = self.apply_events()
            assert published or not replaced
            if self.twin is not None:
                for key in replaced:
                    self.twin.remove(key)
                if published:
                    self.twin.insert(keys[i])
            self.replaced += len(replaced)

    def end(self, life: Life) -> None:
        """The request ends or is aborted, at whatever point."""
        self.lives.remove(life)
        self.pool.give_back(life.pages)
        events = self.apply_events()
        if self.twin is not None:
            for key in events:
                self.twin.remove(key)
            for page in reversed(life.pages):
                if self.pool._published[page] and not self.pool._refs[page]:
                    self.twin.release(self.key_of(page))

    def see_evictions(self) -> None:
        """The pages evicted since were each the twin's choice, and no cached page followed them."""
        refs, published = self.pool._refs, self.pool._published
        held = {self.pool._keys[page] for page in range(self.pool.num_pages) if refs[page] and published[page]}
        for is_added, evicted in self.pool.take_changes().changes:
            assert not is_added
            assert evicted not in self.found.values(), "leaf pages first"
            if self.twin is not None:
                parents = set(self.found.values())
                assert self.twin.victim(lambda key: key not in held and key not in parents) == evicted  # noqa: B023
                self.twin.remove(evicted)
            del self.found[evicted]
            self.evicted += 1

    def apply_events(self) -> list[bytes]:
        """Keys removed since; whoever follows the events knows what is found."""
        removed = []
        for is_added, key in self.pool.take_changes().changes:
            if is_added:
                assert key not in self.found
                self.found[key] = self.chains[key]
            else:
                del self.found[key]
                removed.append(key)
        return removed

    def tell_hits(self, run: list[int]) -> None:
        if self.twin is not None:
            for page in run:
                self.twin.hit(self.key_of(page))

    def key_of(self, page: int) -> bytes:
        key = self.pool._keys[page]
        assert key is not None
        return key

    def tokens_of(self, key: bytes) -> list[int]:
        """The page's tokens as the pool keeps them."""
        page = self.pool.match([key])[0]
        return list(self.pool._beginnings._tokens[page * PAGE : (page + 1) * PAGE])

    def check(self) -> None:
        pool = self.pool
        held = [life.pages for life in self.lives]
        assert pool.check(held) == []
        assert len({page for pages in held for page in pages}) <= pool.num_pages - pool.free_pages
        keys = pool.keys()
        assert set(keys) == set(self.found) and len(keys) == len(self.found)
        for key in keys:
            parent = self.found[key]
            assert parent is None or parent in self.found, "every page that is found follows pages that are found"
        for life in self.lives:
            assert pool.match(life.prefix.keys)[: len(life.prefix.keys)] == [pool._page_of[key] for key in self.run_of(life)]

    def run_of(self, life: Life) -> list[bytes]:
        """The longest run of keys that the observer of events finds."""
        keys = life.prefix.keys
        return keys[: next((i for i, key in enumerate(keys) if key not in self.found), len(keys))]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), PROMPTS),
        st.tuples(st.just("inside"), st.integers(0, 9)),
        st.tuples(st.just("write"), st.integers(0, 9), st.integers(1, 6)),
        st.tuples(st.just("grow"), st.integers(0, 9), st.integers(0, 1)),
        st.tuples(st.just("end"), st.integers(0, 9)),
    ),
    min_size=5,
    max_size=60,
)


def live(policy: EvictionPolicy, num_pages: int, actions: list[tuple[object, ...]]) -> World:
    """The world after all actions, checked after each."""
    pool = PagePool(num_pages, PAGE, policy)
    world = World(pool, None if policy == "adaptive" else make_slow(policy, num_pages))
    for action in actions:
        match action:
            case ("begin", list(tokens)):
                world.begin(tokens)
            case (kind, int(who), *rest) if world.lives:
                life = world.lives[who % len(world.lives)]
                match kind, rest:
                    case "inside", _:
                        world.begin_inside(life)
                    case "write", [int(count)]:
                        world.write(life, count)
                    case "grow", [int(token)]:
                        world.grow(life, token)
                    case _:
                        world.end(life)
        world.check()
    for life in list(world.lives):
        world.end(life)
    world.check()
    assert pool.free_pages == num_pages, "at rest every page is free"
    return world


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@settings(max_examples=80, deadline=None)
@given(num_pages=st.integers(2, 10), actions=ACTIONS)
def test_pages_are_conserved_and_chains_whole(policy: EvictionPolicy, num_pages: int, actions: list[tuple[object, ...]]) -> None:
    live(policy, num_pages, actions)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_paths_that_the_property_walks_are_taken(policy: EvictionPolicy) -> None:
    actions: list[tuple[object, ...]] = []
    for i in range(30):
        actions += [("begin", [i % 2, 1, 0, i % 3 % 2, 1, 1, i % 2]), ("write", 0, 9), ("grow", 0, i % 2), ("inside", 0)]
        actions += [("begin", [i % 2, 1, 0, 0, 1]), ("end", 1), ("write", 0, 9), ("end", 0)]
    actions += [("end", 0)] * 5 + [("begin", [1, 1, 1, 1]), ("write", 0, 9), ("end", 0)] * 2
    world = live(policy, 9, actions)
    assert world.evicted > 0 and world.copied > 0 and world.replaced > 0 and world.pool.counters.hits > 0


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=5), st.integers(1, 5))
def test_keys_do_not_depend_on_how_tokens_arrive(tokens: list[int], ends: list[int], page_size: int) -> None:
    prefix = PrefixKeys(ROOT, page_size)
    for end in sorted(ends):
        prefix.extend(tokens[:end])
    assert prefix.extend(tokens) == PrefixKeys(ROOT, page_size).extend(tokens)
    assert len(prefix.keys) == len(tokens) // page_size
