"""The host tier's decisions, and its copies against a copy of the contents of pages and slots."""

import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.cost import StepModel
from phalanx_api.engine_config import EVICTION_POLICIES, EvictionPolicy
from phalanx_runtime.core.kv.host_loads import pays_to_load
from phalanx_runtime.core.kv.host_tier import HostTier
from phalanx_runtime.core.kv.tier_sizing import SizingRules
from tests.runtime.core.reference_caches import make_slow

MODEL = StepModel(fixed_s=0.004, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=1e-6)
A, B = b"a" * 16, b"b" * 16


@pytest.mark.parametrize(
    ("model", "load_s", "expected"),
    [(None, 1.0, True), (MODEL, None, True), (MODEL, 0.015, True), (MODEL, 0.0164, False), (MODEL, 5.0, False)],
)
def test_loads_pay_while_computing_takes_longer(model: StepModel | None, load_s: float | None, expected: bool) -> None:
    """16 tokens take 16 ms, and their attention 0.13 ms."""
    assert pays_to_load(16, 0, model, load_s) is expected


def test_later_tokens_are_worth_longer_loads() -> None:
    """Their attention takes longer."""
    assert not pays_to_load(16, 0, MODEL, 0.02)
    assert pays_to_load(16, 1000, MODEL, 0.02)


def test_loads_take_the_fitted_times() -> None:
    host = HostTier(2)
    assert host.load_s(3) is None and host.page_s is None
    host.learn(4, 0.04)
    assert host.load_s(3) == pytest.approx(0.03)
    for _ in range(20):
        host.learn(1, 0.011)
        host.learn(30, 0.04)
    assert host.load_s(300) == pytest.approx(0.31, rel=0.05)


def test_a_slow_load_is_tried_again_after_declines() -> None:
    """Without loads nothing measures that they are fast now."""
    host = HostTier(2)
    host.learn(1, 0.032)
    num_declined = 0
    while not pays_to_load(16, 0, MODEL, host.load_s(1)):
        host.decline(1)
        num_declined += 1
    assert host.counters.declined == num_declined > 10


ACTIONS = ["store", "load", "plan", "cancel", "size", "reserve", "fill", "pin", "unpin"]


def old(number: int) -> bytes:
    return bytes([number]) * 16


@settings(max_examples=300)
@given(
    num_slots=st.integers(1, 8),
    policy=st.sampled_from(EVICTION_POLICIES),
    script=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.integers(0, 7))),
)
def test_copies_give_a_key_its_content(num_slots: int, policy: EvictionPolicy, script: list[tuple[str, int, int]]) -> None:
    """Also on disk, and while the tier grows and shrinks.

    Pages are written by others once they are stored or cancelled, after the plan's copies or before.
    """
    rules = SizingRules(floor=1, limit=num_slots, min_gain=0.1)
    host = HostTier(0, policy, has_disk=True, rules=rules)
    reserved: list[tuple[int, bytes]] = []
    pinned: list[tuple[int, bytes]] = []
    slots: dict[int, bytes] = {}
    content: dict[int, bytes] = {}
    present: set[bytes] = set()
    loaded: dict[int, bytes] = {}

    def execute() -> None:
        copies, keys = host.take()
        stored = iter(keys)
        for is_load, page, slot in copies:
            if is_load:
                content[page] = slots[slot]
            else:
                slots[slot] = content[page]
                assert slots[slot] == next(stored), "a disk keeps it under this key"
        for page, key in loaded.items():
            assert content[page] == key
        assert all(slots[slot] == key for slot, key in pinned), "a rank reads them for another group"
        loaded.clear()
        resize, dropped = host.resize()
        present.difference_update(dropped)
        if resize is not None:
            for source, target in resize.moves:
                slots[target] = slots.pop(source)
            for slot in [slot for slot in slots if slot >= resize.num_slots]:
                del slots[slot]

    for action, page, number in script:
        key = bytes([number]) * 16
        match action:
            case "store" if not host.is_copying([page]):
                content[page] = key
                dropped = host.store(page, key)
                present = (present | {key}) - {dropped}
            case "load" if host.match([key]) and not host.is_copying([page]):
                host.load(host.match([key]), [page])
                loaded[page] = key
            case "cancel" if not loaded:
                present -= set(host.cancel([page]))
                content[page] = b"other"
            case "plan":
                execute()
            case "size":
                host.want(number + 1, "test")
            case "reserve" if not any(key == other for _, other in reserved):
                free, lost = host.reserve(1)
                present.difference_update(lost)
                reserved += [(slot, key) for slot in free]
            case "pin":
                pinned += [(slot, key) for slot in host.pin([key])]
            case "unpin" if pinned:
                host.unpin([pinned.pop()[0]])
            case "fill" if reserved:
                slot, other = reserved.pop()
                slots[slot] = other  # by another thread, before the next plan at the latest
                host.fill([slot], [other])
                present.add(other)
            case _:
                pass
        assert host.check() == []
        assert set(host.keys()) == present
        assert len(host) <= host.num_slots <= num_slots


def test_without_slots_nothing_is_stored() -> None:
    host = HostTier()
    assert host.store(3, b"k" * 16) is None
    assert host.match([b"k" * 16]) == []
    assert host.take() == ([], [])


@pytest.mark.parametrize("has_disk", [False, True])
def test_only_a_disk_gets_a_page_without_slot(has_disk: bool) -> None:
    host = HostTier(1, has_disk=has_disk)
    host.store(0, A)
    assert host.store(1, B) == A
    both = ([(False, 0, 0), (False, 1, 0)], [A, B])
    assert host.take() == (both if has_disk else ([(False, 1, 0)], []))


def num_instructions(work: Callable[[], object]) -> int:
    """Returns how many instructions of the interpreter a call executes."""
    count, former = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(former)
    return count


def store_all(host: HostTier, first: int) -> None:
    for page in range(host.num_slots):
        host.store(page, (first + page).to_bytes(16, "big"))


def test_work_of_a_long_prompt_follows_its_pages() -> None:
    """It replaces all pages of a full tier in one plan, with the same work per page however many wait to be copied."""
    work = []
    for size in (64, 512):
        host = HostTier(size)
        store_all(host, 0)
        host.take()
        work.append(num_instructions(partial(store_all, host, 1000)))
        assert len(host.take()[0]) == size
    assert work[1] < 10 * work[0]


def test_page_written_after_losing_its_slot_is_not_stored() -> None:
    """A disk would keep what is written under its key."""
    host = HostTier(1, has_disk=True)
    host.store(0, A)
    assert host.store(1, B) == A
    assert host.cancel([0]) == []
    assert host.take() == ([(False, 1, 0)], [B])


@pytest.mark.parametrize("policy", [policy for policy in EVICTION_POLICIES if policy != "adaptive"])
def test_victims_are_those_of_the_policy(policy: EvictionPolicy) -> None:
    """Stored, loaded and kept pages are used."""
    host, reference, chance = HostTier(40, policy), make_slow(policy, 40), random.Random(2)
    for page in range(2000):
        key = old(int(chance.paretovariate(0.4)) % 160)
        if key in host:
            if page % 2:
                host.load(host.match([key]), [page])
            else:
                assert host.keep([key]) == 1
            reference.hit(key)
        else:
            victim = reference.victim(lambda _: True) if len(host) == host.num_slots else None
            if victim is not None:
                reference.remove(victim)
            assert host.store(page, key) == victim
            reference.insert(key)
        reference.release(key)
        host.take()
    assert host.counters.evicted > 100 < host.counters.loaded


@pytest.mark.parametrize("policy", [policy for policy in EVICTION_POLICIES if policy != "fifo"])
def test_pages_that_a_request_waits_for_are_evicted_late(policy: EvictionPolicy) -> None:
    """Also those in host memory before the ones from disk: without them the others are of no use."""
    host = HostTier(64, policy, has_disk=True)
    for page in range(64):
        host.store(page, old(page))
    host.take()
    chain = [old(3), old(4), A, B]
    assert host.keep(chain) == 2
    slots, _ = host.reserve(2)
    host.fill(slots, chain[2:])
    for page in range(16):
        host.store(page, old(100 + page))
        host.take()
    assert len(host.match(chain)) == 4


def test_a_found_prefix_loses_its_end_first() -> None:
    host = HostTier(4, "lru")
    chain = [old(number) for number in range(4)]
    for page, key in enumerate(chain):
        host.store(page, key)
    host.take()
    assert host.keep(chain) == 4
    host.store(4, A)
    assert len(host.match(chain)) == 3


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_pins_and_reservations_leave_a_slot_for_evicted_pages(policy: EvictionPolicy) -> None:
    host = HostTier(4, policy, has_disk=True)
    host.store(0, A)
    host.store(1, B)
    host.take()
    assert len(host.reserve(2)[0]) == 2
    assert len(host.pin([A, B], max_share=0.9)) == 1, "the other one stays"
    host.store(2, old(0))
    assert len(host.match([A])) == 1
