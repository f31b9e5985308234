"""Random requests over a small pool: pages are conserved, chains complete, events exact, and victims those of the reference."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.engine_config import EVICTION_POLICIES, EvictionPolicy
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.kv.page_pool import PagePool
from tests.examples import examples
from tests.runtime.core.reference_caches import SlowPolicy, make_slow

PAGE = 2
ROOT = root_key("model")


@dataclass
class PoolRequest:
    """One request. `computed`: its tokens that the plans so far write."""

    tokens: list[int]
    prefix: PrefixKeys
    pages: list[int]
    computed: int = 0


@dataclass
class World:
    """The pool, its requests, and a reference policy that predicts victims."""

    pool: PagePool
    reference: SlowPolicy | None
    requests: list[PoolRequest] = field(default_factory=list)
    found: dict[bytes, bytes | None] = field(default_factory=dict)
    """Keys and their parents, by the events."""
    chains: dict[bytes, bytes | None] = field(default_factory=dict)
    """The parent of each key ever published."""
    page_tokens: dict[bytes, list[int]] = field(default_factory=dict)
    """The tokens of each page, by key."""
    evicted: int = 0
    copied: int = 0
    replaced: int = 0

    def start(self, tokens: list[int]) -> None:
        """Starts a request, if it fits."""
        prefix = PrefixKeys(ROOT, PAGE)
        keys = prefix.extend(tokens)
        found = self.pool.match(keys[: (len(tokens) - 1) // PAGE])
        needed = self.pool.pages_for(len(tokens)) - len(found)
        if self.pool.free_pages - self.pool.num_unheld(found) < needed:
            assert needed > 0
            return
        self.pool.reuse(found, len(keys))
        self.record_hits(found)
        new = self.pool.allocate(needed)
        assert new is not None, "free pages can be allocated"
        self.check_evictions()
        request = PoolRequest(tokens, prefix, found + new)
        self.publish(request, len(found))
        self.requests.append(request)

    def start_inside(self, request: PoolRequest) -> None:
        """Starts a request with a prefix that ends inside a page of another: it copies the page."""
        if request.computed < 2 * PAGE:
            return
        tokens = [*request.tokens[: 2 * PAGE - 1], 99]
        keys = PrefixKeys(ROOT, PAGE).extend(tokens)
        found = self.pool.match(keys[:1])
        if not found:
            return
        partial = self.pool.match_partial(found[0], tokens[PAGE:])
        if partial is None or self.pool.free_pages - self.pool.num_unheld(found) < 1:
            return
        source, same = partial
        assert self.page_tokens[self.key_of(source)][:same] == tokens[PAGE : PAGE + same]
        self.pool.reuse(found, 2)
        self.record_hits(found)
        target = self.pool.allocate(1)
        assert target is not None
        self.check_evictions()
        self.copied += 1
        self.requests.append(PoolRequest(tokens, PrefixKeys(ROOT, PAGE), found + target, PAGE + same))

    def write(self, request: PoolRequest, count: int) -> None:
        """Writes a chunk of the request; skips slots that others wrote."""
        while count and request.computed < len(request.tokens):
            page = request.pages[request.computed // PAGE]
            written = request.computed // PAGE * PAGE + self.pool.written(page)
            if written > request.computed:
                request.computed = written
                continue
            request.computed += 1
            self.pool.mark_written(page, (request.computed - 1) % PAGE + 1)
            count -= 1

    def grow(self, request: PoolRequest, token: int) -> None:
        """Appends a token, if all are computed and a page is free."""
        if request.computed < len(request.tokens):
            return
        if len(request.tokens) == len(request.pages) * PAGE:
            new = self.pool.allocate(1)
            assert (new is None) == (self.pool.free_pages == 0) or new is not None
            if new is None:
                return
            self.check_evictions()
            request.pages += new
        request.tokens = [*request.tokens, token]
        if request.prefix.keys:
            self.publish(request, len(request.prefix.keys))

    def publish(self, request: PoolRequest, start: int) -> None:
        keys = request.prefix.extend(request.tokens)
        self.chains.update(zip(keys, [None, *keys], strict=False))
        for i in range(start, len(keys)):
            tokens = self.page_tokens[keys[i]] = request.tokens[i * PAGE : (i + 1) * PAGE]
            published = self.pool.publish(request.pages[i], keys[i], request.pages[i - 1] if i else None, tokens)
            replaced = self.apply_events()
            assert published or not replaced
            if self.reference is not None:
                for key in replaced:
                    self.reference.remove(key)
                if published:
                    self.reference.insert(keys[i])
            self.replaced += len(replaced)

    def end(self, request: PoolRequest) -> None:
        """Ends a request at any point."""
        self.requests.remove(request)
        self.pool.release(request.pages)
        events = self.apply_events()
        if self.reference is not None:
            for key in events:
                self.reference.remove(key)
            state = self.pool.state()
            for page in reversed(request.pages):
                if state.published[page] and not state.refs[page]:
                    self.reference.release(self.key_of(page))

    def check_evictions(self) -> None:
        """Checks that the evicted pages were the reference's victims, and had no cached child."""
        state = self.pool.state()
        held = {state.keys[page] for page in range(self.pool.num_pages) if state.refs[page] and state.published[page]}
        for is_added, evicted in self.pool.take_changes().changes:
            assert not is_added
            assert evicted not in self.found.values(), "leaf pages first"
            if self.reference is not None:
                parents = set(self.found.values())
                assert self.reference.victim(lambda key: key not in held and key not in parents) == evicted  # noqa: B023
                self.reference.remove(evicted)
            del self.found[evicted]
            self.evicted += 1

    def apply_events(self) -> list[bytes]:
        """Applies the events. Returns the removed keys."""
        removed = []
        for is_added, key in self.pool.take_changes().changes:
            if is_added:
                assert key not in self.found
                self.found[key] = self.chains[key]
            else:
                del self.found[key]
                removed.append(key)
        return removed

    def record_hits(self, found: list[int]) -> None:
        if self.reference is not None:
            for page in found:
                self.reference.hit(self.key_of(page))

    def key_of(self, page: int) -> bytes:
        key = self.pool.state().keys[page]
        assert key is not None
        return key

    def check(self) -> None:
        pool = self.pool
        held = [request.pages for request in self.requests]
        assert pool.check(held) == []
        assert len({page for pages in held for page in pages}) <= pool.num_pages - pool.free_pages
        keys = pool.keys()
        assert set(keys) == set(self.found) and len(keys) == len(self.found)
        for key in keys:
            parent = self.found[key]
            assert parent is None or parent in self.found, "the parents of a found page are found"
        page_of = pool.state().page_of
        for request in self.requests:
            assert pool.match(request.prefix.keys) == [page_of[key] for key in self.found_prefix(request)]

    def found_prefix(self, request: PoolRequest) -> list[bytes]:
        """Returns the longest prefix of the keys that the events list."""
        keys = request.prefix.keys
        return keys[: next((i for i, key in enumerate(keys) if key not in self.found), len(keys))]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), PROMPTS),
        st.tuples(st.just("inside"), st.integers(0, 9)),
        st.tuples(st.just("write"), st.integers(0, 9), st.integers(1, 6)),
        st.tuples(st.just("grow"), st.integers(0, 9), st.integers(0, 1)),
        st.tuples(st.just("end"), st.integers(0, 9)),
    ),
    min_size=5,
    max_size=60,
)


def run_actions(policy: EvictionPolicy, num_pages: int, actions: list[tuple[object, ...]]) -> World:
    """Returns the world after all actions, checked after each."""
    pool = PagePool(num_pages, PAGE, policy)
    world = World(pool, None if policy == "adaptive" else make_slow(policy, num_pages))
    for action in actions:
        match action:
            case ("start", list(tokens)):
                world.start(tokens)
            case (kind, int(index), *rest) if world.requests:
                request = world.requests[index % len(world.requests)]
                match kind, rest:
                    case "inside", _:
                        world.start_inside(request)
                    case "write", [int(count)]:
                        world.write(request, count)
                    case "grow", [int(token)]:
                        world.grow(request, token)
                    case _:
                        world.end(request)
        world.check()
    for request in list(world.requests):
        world.end(request)
    world.check()
    assert pool.free_pages == num_pages, "all pages are free at the end"
    return world


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@settings(max_examples=examples(80), deadline=None)
@given(num_pages=st.integers(2, 10), actions=ACTIONS)
def test_pages_are_conserved_and_chains_whole(policy: EvictionPolicy, num_pages: int, actions: list[tuple[object, ...]]) -> None:
    run_actions(policy, num_pages, actions)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_the_property_covers_all_paths(policy: EvictionPolicy) -> None:
    actions: list[tuple[object, ...]] = []
    for i in range(30):
        actions += [("start", [i % 2, 1, 0, i % 3 % 2, 1, 1, i % 2]), ("write", 0, 9), ("grow", 0, i % 2), ("inside", 0)]
        actions += [("start", [i % 2, 1, 0, 0, 1]), ("end", 1), ("write", 0, 9), ("end", 0)]
    actions += [("end", 0)] * 5 + [("start", [1, 1, 1, 1]), ("write", 0, 9), ("end", 0)] * 2
    world = run_actions(policy, 9, actions)
    assert world.evicted > 0 and world.copied > 0 and world.replaced > 0 and world.pool.counters.hits > 0


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 40), max_size=5), st.integers(1, 5))
def test_keys_do_not_depend_on_how_tokens_arrive(tokens: list[int], ends: list[int], page_size: int) -> None:
    prefix = PrefixKeys(ROOT, page_size)
    for end in sorted(ends):
        prefix.extend(tokens[:end])
    assert prefix.extend(tokens) == PrefixKeys(ROOT, page_size).extend(tokens)
    assert len(prefix.keys) == len(tokens) // page_size
