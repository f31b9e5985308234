"""Declared adapters in a group: which one leaves a full group, and what a router learns of each."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from phalanx_api import wire
from phalanx_frontend.backend import BackendError
from phalanx_runtime.engine.adapters.on_demand import (
    ABANDONED_S,
    FINAL_RETRY_S,
    RETRY_S,
    RETURN_S,
    SLOT_WAIT_S,
    UNUSED_S,
    YIELD_S,
    AdapterUse,
    OnDemandAdapters,
    choose_eviction,
    choose_yielding,
    withdrawn,
)
from phalanx_runtime.engine.adapters.relay import AdapterRefused, AdapterRelay, LocalAdapter
from tests.polling import until


def declared(name: str, uri: str = "") -> wire.DeclaredAdapter:
    return wire.DeclaredAdapter(name, uri or f"file:///{name}")


def use(name: str, used_at: float | None = 1.0, *, loaded_at: float = 0.0, requests: int = 0, ours: bool = True) -> AdapterUse:
    return AdapterUse(name=name, is_declared=ours, num_requests=requests, used_at=used_at, loaded_at=loaded_at)


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([], ""),
        ([use("a", 2.0), use("b", 1.0)], "b"),
        ([use("a", 2.0), use("b", 1.0, requests=1)], "a"),
        ([use("a", 1.0), use("b", 1.0)], "a"),
        ([use("a", 1.0, ours=False)], ""),
        ([use("a", None, loaded_at=99.0)], ""),
        ([use("a", None, loaded_at=100.0 - UNUSED_S)], "a"),
        ([use("a", None, loaded_at=10.0), use("b", 5.0)], "b"),
    ],
)
def test_least_recently_used_idle_adapter_leaves(uses: list[AdapterUse], expected: str) -> None:
    """One of flags never does, and one that was just loaded waits for its first request."""
    assert choose_eviction(uses, now=100.0) == expected


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([], ""),
        ([use("a", requests=3), use("b", requests=2)], "b"),
        ([use("a", requests=2, loaded_at=9.0), use("b", requests=2, loaded_at=8.0)], "b"),
        ([use("a", requests=3), use("b", requests=2, ours=False)], "a"),
        ([use("a", requests=3), use("b", requests=2, loaded_at=100.1 - YIELD_S)], "a"),
    ],
)
def test_adapter_with_the_fewest_requests_yields(uses: list[AdapterUse], expected: str) -> None:
    """One of flags never does, nor one that was loaded a moment ago."""
    assert choose_yielding(uses, now=100.0) == expected


def test_changed_fields_withdraw_an_adapter() -> None:
    before = {"a": declared("a"), "b": declared("b"), "c": declared("c")}
    assert withdrawn(before, {"a": declared("a"), "b": declared("b", "file:///other")}) == ["b", "c"]


@dataclass
class Group:
    """A group with some slots whose engine answers each load at once."""

    slots: int = 1
    now: float = 0.0
    refusals: dict[str, str] = field(default_factory=dict)
    in_use: Counter[wire.Adapter] = field(default_factory=Counter)
    fetched: list[str] = field(default_factory=list)
    fetch_error: AdapterRefused | None = None
    published: list[wire.AdapterSlots] = field(default_factory=list)
    loaded: set[wire.Adapter] = field(default_factory=set)
    is_silent: bool = False
    num_sent: int = 0
    is_final: bool = True
    gate: threading.Event | None = None
    content: str = ""
    is_serving: bool = True
    is_draining: bool = False  # unloaded adapters keep their slots, as requests run with them

    def __post_init__(self) -> None:
        self.relay = AdapterRelay(self.send, lambda: None, self.check_serving, clock=lambda: self.now)
        self.adapters = OnDemandAdapters(
            self.relay, self.slots, self.fetch, lambda: self.in_use, self.published.append, clock=lambda: self.now
        )

    def check_serving(self) -> None:
        if not self.is_serving:
            raise BackendError(503, "group_restarting", "rank 0 died")

    def fetch(self, adapter: wire.DeclaredAdapter) -> LocalAdapter:
        self.fetched.append(adapter.name)
        if self.gate is not None:
            self.gate.wait(10)
        if self.fetch_error is not None:
            raise self.fetch_error
        return LocalAdapter(wire.Adapter(adapter.name, self.content or f"hash of {adapter.uri}"), adapter.uri)

    def send(self, frame: wire.LoadAdapter | wire.UnloadAdapter) -> None:
        if isinstance(frame, wire.UnloadAdapter):
            if not self.is_draining:
                self.loaded.discard(frame.adapter)
            return
        self.num_sent += 1
        is_full = len(self.loaded) == self.slots and frame.adapter not in self.loaded
        why = "all slots hold adapters" if is_full else self.refusals.get(frame.adapter.name, "")
        if not why:
            self.loaded.add(frame.adapter)
        if not self.is_silent:
            asyncio.get_running_loop().call_soon(
                self.relay.deliver, wire.AdapterLoaded(frame.adapter, why, is_full, self.is_final)
            )

    @property
    def names(self) -> set[str]:
        return {adapter.name for adapter in self.relay.adapters}

    @property
    def last(self) -> wire.AdapterSlots:
        return self.published[-1]

    def declare(self, number: int, *adapters: wire.DeclaredAdapter) -> None:
        self.adapters.declare(wire.DeclareAdapters(number, list(adapters)))

    def wait(self, seconds: float, *names: str) -> None:
        """Lets time pass in which routers require these adapters."""
        self.now += seconds
        for name in names:
            self.adapters.require(name)

    def end_requests(self, name: str) -> None:
        """Ends the requests of an adapter that has been unloaded, which frees its slot."""
        (adapter,) = [adapter for adapter in self.in_use if adapter.name == name]
        del self.in_use[adapter]
        self.loaded.discard(adapter)

    async def load(self, *names: str) -> None:
        """Requires adapters one after the other, each with a request that has ended."""
        for name in names:
            self.adapters.require(name)
            await until(lambda: not self.last.loading)
            if self.relay.has(name):
                self.relay.used(next(adapter for adapter in self.relay.adapters if adapter.name == name))
            self.now += 1.0


@asynccontextmanager
async def group_of(*names: str, slots: int = 1) -> AsyncIterator[Group]:
    group = Group(slots=slots)
    group.declare(1, *map(declared, names))
    yield group


async def test_required_adapters_are_loaded_once() -> None:
    async with group_of("a", "b", slots=2) as group:
        for _ in range(3):
            group.adapters.require("a")
        group.adapters.require("unknown")
        assert group.last == wire.AdapterSlots(1, ["a"])
        await until(lambda: group.last == wire.AdapterSlots(1))
        group.adapters.require("a")
        assert group.fetched == ["a"] and group.names == {"a"}


async def test_full_group_unloads_the_least_recently_used() -> None:
    async with group_of("a", "b", "c", slots=2) as group:
        await group.load("a", "b", "a", "c")
        assert group.names == {"a", "c"}


async def test_adapters_with_requests_stay_until_these_end() -> None:
    async with group_of("a", "b") as group:
        await group.load("a")
        group.in_use = Counter(group.relay.adapters)
        group.adapters.require("b")
        await until(lambda: group.fetched == ["a", "b"])
        assert group.names == {"a"} and group.last.loading == ["b"]
        group.in_use.clear()
        await until(lambda: group.names == {"b"})


async def test_waiting_loads_leave_the_engine_alone() -> None:
    async with group_of("a", "b") as group:
        await group.load("a")
        group.in_use, group.num_sent = Counter(group.relay.adapters), 0
        group.adapters.require("b")
        await until(lambda: group.fetched == ["a", "b"])
        await asyncio.sleep(0.3)
        assert not group.num_sent
        group.is_draining = True
        group.now += SLOT_WAIT_S
        await until(lambda: not group.last.loading)
        assert group.last.refused == [wire.RefusedAdapter("b", "all slots have running requests", is_final=False)]


@asynccontextmanager
async def yielding_group(*waiting: str) -> AsyncIterator[Group]:
    """Yields a group with two slots, whose adapters `a` and `b` have 2 and 1 requests; loads have waited for `YIELD_S`."""
    async with group_of("a", "b", "c", "d", slots=2) as group:
        await group.load("a", "b")
        group.in_use, group.is_draining = Counter(dict(zip(group.relay.adapters, (2, 1), strict=True))), True
        for name in waiting:
            group.adapters.require(name)
            await until(lambda name=name: name in group.fetched)  # type: ignore[misc]
        await asyncio.sleep(0.1)
        assert group.names == {"a", "b"}
        group.wait(YIELD_S, *waiting)
        yield group


async def test_busy_adapter_yields_its_slot_after_a_while() -> None:
    """It takes no more requests; the other one is loaded once the running ones have ended. One adapter leaves at a time."""
    async with yielding_group("c", "d") as group:
        await until(lambda: group.names == {"a"})
        await asyncio.sleep(0.6)
        assert group.names == {"a"} and group.last.loading == ["c", "d"]
        group.end_requests("b")
        await until(lambda: group.names == {"c"})
        assert group.last.loading == ["d"]
        group.end_requests("a")
        await until(lambda: group.names == {"c", "d"})


async def test_idle_adapter_leaves_while_another_one_yields() -> None:
    async with yielding_group("c") as group:
        await until(lambda: group.names == {"a"})
        group.is_draining = False
        del group.in_use[group.relay.adapters[0]]
        await until(lambda: group.names == {"c"})
        assert [adapter.name for adapter in group.in_use] == ["b"], "its requests are running"


async def test_adapter_that_has_yielded_returns_after_a_while() -> None:
    """Its running requests are long: without a return its new ones would wait as long as those of the other adapter."""
    async with yielding_group("c") as group:
        await until(lambda: group.names == {"a"})
        group.adapters.require("b")
        await until(lambda: group.fetched.count("b") == 2)
        await asyncio.sleep(0.1)
        assert group.names == {"a"}
        group.wait(RETURN_S, "b", "c")
        await until(lambda: group.names == {"a", "b"})
        assert group.last.loading == ["c"]


async def test_load_that_no_router_requires_any_more_ends() -> None:
    """Its requests have left: no adapter yields for it."""
    async with group_of("a", "b") as group:
        await group.load("a")
        group.in_use = Counter(group.relay.adapters)
        group.adapters.require("b")
        await until(lambda: "b" in group.fetched)
        group.now += ABANDONED_S + 1.0
        await until(lambda: not group.last.loading)
        assert group.names == {"a"} and not group.last.refused


async def test_late_requests_leave_an_adapter_its_first_ones() -> None:
    """A request that a router sent before the adapter was unloaded is none of those that the next load is for."""
    async with group_of("a", "b") as group:
        await group.load("a", "b")
        group.relay.used(wire.Adapter("a", "hash of file:///a"))
        assert group.relay.used_at("a") is None, "names that are gone would add up"
        group.adapters.require("a")
        await until(lambda: group.names == {"a"})
        group.adapters.require("b")
        await until(lambda: group.fetched == ["a", "b", "a", "b"])
        await asyncio.sleep(0.2)
        assert group.names == {"a"}
        group.now += UNUSED_S
        await until(lambda: group.names == {"b"})


async def test_loads_wait_for_the_end_of_a_restart() -> None:
    """Meanwhile no adapter leaves for them, though none has requests."""
    async with group_of("a", "b") as group:
        await group.load("a")
        group.is_serving = False
        group.adapters.require("b")
        await until(lambda: "b" in group.fetched)
        await asyncio.sleep(0.1)
        assert group.names == {"a"} and group.last.loading == ["b"]
        group.is_serving = True
        await until(lambda: group.names == {"b"})


async def test_waiting_loads_end_when_withdrawn() -> None:
    async with group_of("a", "b") as group:
        await group.load("a")
        group.in_use = Counter(group.relay.adapters)
        group.adapters.require("b")
        await until(lambda: group.fetched == ["a", "b"])
        group.declare(2, declared("a"))
        await until(lambda: not group.last.loading)
        assert not group.last.refused and group.names == {"a"}


async def test_at_most_as_many_loads_as_slots() -> None:
    async with group_of("a", "b", "c", slots=2) as group:
        group.gate = threading.Event()
        for name in ("a", "b", "c"):
            group.adapters.require(name)
        await until(lambda: len(group.fetched) == 2)
        await asyncio.sleep(0.1)
        assert len(group.fetched) == 2 and group.last.loading == ["a", "b", "c"]
        group.gate.set()
        await until(lambda: len(group.names) == 2 and len(group.fetched) == 3)
        assert group.relay.unload(min(group.names))  # by a request to the pod
        await until(lambda: not group.last.loading)
        assert len(group.names) == 2


async def test_loads_withdrawn_while_they_wait_download_nothing() -> None:
    async with group_of("a", "b") as group:
        group.gate = threading.Event()
        group.adapters.require("a")
        group.adapters.require("b")
        await until(lambda: group.fetched == ["a"])
        group.declare(2, declared("a"))
        group.gate.set()
        await until(lambda: not group.last.loading)
        assert group.fetched == ["a"] and group.names == {"a"}


async def test_loads_and_unloads_by_requests_are_published() -> None:
    async with group_of("a", slots=2) as group:
        await group.relay.load(LocalAdapter(wire.Adapter("mine", "hash"), "/mine"))
        assert group.last == wire.AdapterSlots(1)
        group.relay.unload("mine")
        assert group.last == wire.AdapterSlots(2)


async def test_withdrawn_adapters_are_unloaded() -> None:
    async with group_of("a", "b", slots=2) as group:
        await group.load("a", "b")
        group.declare(2, declared("a", "file:///other"), declared("b"))
        assert group.names == {"b"}
        group.declare(1)  # of a router with an older policy
        assert group.names == {"b"}
        await group.load("a")
        assert wire.Adapter("a", "hash of file:///other") in group.relay.adapters


async def test_other_content_of_a_source_replaces_an_adapter() -> None:
    """Once another group has it; the files are not read again for each order, nor if nothing is known of others."""
    async with group_of("a") as group:
        await group.load("a")
        (first,) = group.relay.adapters
        group.adapters.require("a", "new")
        assert not group.last.loading, "it was read just now"
        group.now += FINAL_RETRY_S
        group.adapters.require("a", first.content_hash)
        group.adapters.require("a", "new")
        await until(lambda: not group.last.loading)
        assert group.fetched == ["a", "a"] and group.relay.adapters == [first], "the source has not changed"
        group.content = "new"
        group.adapters.require("a", "new")
        assert not group.last.loading
        group.now += FINAL_RETRY_S
        group.fetch_error = AdapterRefused("the host does not answer", is_final=False)
        group.adapters.require("a", "new")
        await until(lambda: not group.last.loading)
        assert group.relay.adapters == [first] and not group.last.refused
        group.now, group.fetch_error = group.now + FINAL_RETRY_S, None
        group.adapters.require("a", "new")
        await until(lambda: not group.last.loading)
        assert group.relay.adapters == [wire.Adapter("a", "new")] and group.loaded == set(group.relay.adapters)


async def test_adapters_withdrawn_during_their_load_are_unloaded() -> None:
    async with group_of("a") as group:
        group.is_silent = True
        group.adapters.require("a")
        await until(lambda: group.loaded)
        group.declare(2)
        group.relay.deliver(wire.AdapterLoaded(next(iter(group.loaded))))
        await until(lambda: not group.last.loading)
        assert not group.names and not group.loaded and group.last == wire.AdapterSlots(1)


Refuse = Callable[[Group], None]


def by_ranks(group: Group) -> None:
    group.refusals["a"] = "the base model has no such layer"


def by_changed_files(group: Group) -> None:
    group.refusals["a"], group.is_final = "for now: /a differs between the pods", False


def by_download(group: Group) -> None:
    group.fetch_error = AdapterRefused("the host does not answer", is_final=False)


@pytest.mark.parametrize(
    ("refuse", "why", "is_final", "retry_s"),
    [
        (by_ranks, "the base model has no such layer", True, FINAL_RETRY_S),
        (by_changed_files, "for now: /a differs between the pods", False, RETRY_S),
        (by_download, "the host does not answer", False, RETRY_S),
    ],
)
async def test_refused_adapters_are_tried_again_later(refuse: Refuse, why: str, is_final: bool, retry_s: float) -> None:
    async with group_of("a") as group:
        refuse(group)
        await group.load("a")
        assert group.last.refused == [wire.RefusedAdapter("a", why, is_final)]
        group.refusals, group.fetch_error = {}, None
        await group.load("a")
        assert not group.names
        group.now += retry_s
        group.adapters.require("a")
        assert group.last.loading == ["a"] and group.last.refused  # the condition of the service has one state until it ends
        await group.load("a")
        assert group.names == {"a"} and not group.last.refused


async def test_changed_declarations_forget_a_refusal() -> None:
    async with group_of("a") as group:
        by_ranks(group)
        await group.load("a")
        group.declare(2, declared("a", "file:///other"))
        assert not group.last.refused


async def test_load_of_a_lost_engine_is_repeated() -> None:
    async with group_of("a") as group:
        group.is_silent = True
        group.adapters.require("a")
        await until(lambda: group.loaded)
        group.loaded.clear()
        group.is_silent = False
        group.relay.reset("rank 0 died")
        await until(lambda: group.names == {"a"})
        assert not group.last.refused
