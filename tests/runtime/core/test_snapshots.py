"""Prefix sharing of a model with states: requests start at snapshots, and each plan names those that it loads and saves."""

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.speculation import CHAIN, Speculation, Tree
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.kv.snapshots.sharing import SnapshotSharing
from phalanx_runtime.core.kv.snapshots.slots import SnapshotSlots
from phalanx_runtime.core.request import RequestSpeculation
from phalanx_runtime.core.scheduling.config import make_scheduler
from phalanx_runtime.core.scheduling.reservations import Reservation
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig, speculation_of
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult

SIZE = 8
COMMON = list(range(40))
POOL = PoolShape(200, SIZE)


def engine(num_snapshots: int = 6, budget: int = 256, pool: PoolShape = POOL) -> Scheduler:
    limits = Limits(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=budget)
    return make_scheduler(limits, msgspec.structs.replace(pool, has_states=True, num_snapshots=num_snapshots))


def request(name: int, prompt: list[int], max_tokens: int = 1) -> wire.Request:
    return wire.Request(
        id=str(name), epoch=0, prompt=prompt, delivered=[], sampling=wire.Sampling(max_tokens=max_tokens, seed=1, temperature=0.0)
    )


def submit(scheduler: Scheduler, name: int, prompt: list[int], max_tokens: int = 1) -> None:
    assert scheduler.submit(name, request(name, prompt, max_tokens)) is None


def step(scheduler: Scheduler) -> StepPlan:
    """Computes a plan; every token is 99."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(StepResult(step=plan.step, tokens=[99] * len(plan.draws)))
    return plan


def run(scheduler: Scheduler) -> list[StepPlan]:
    plans = []
    while not scheduler.is_idle():
        plans.append(step(scheduler))
    assert scheduler.check() == []
    return plans


def test_an_equal_prompt_starts_at_its_snapshot() -> None:
    scheduler = engine()
    submit(scheduler, 0, COMMON)
    first = run(scheduler)
    assert [(plan.starts, plan.counts) for plan in first] == [([0], [32]), ([32], [8])], "the last token is always computed"
    ((row, slot),) = first[0].state_saves
    submit(scheduler, 1, COMMON)
    (second,) = run(scheduler)
    assert (second.starts, second.counts, second.state_loads) == ([32], [8], [(second.rows[0], slot)])
    assert scheduler.sharing.hit_tokens == 32 and row == first[0].rows[0]


def test_requests_of_one_plan_compute_each() -> None:
    scheduler = engine()
    for name in range(3):
        submit(scheduler, name, COMMON)
    first = step(scheduler)
    assert first.starts == [0, 0, 0] and first.state_loads == []
    assert len(first.state_saves) == 1, "one of them saves the snapshot"
    run(scheduler)


def test_a_third_prompt_starts_where_two_part() -> None:
    scheduler = engine()
    for name in range(3):
        submit(scheduler, name, [*COMMON[:24], *[100 + name] * 20])
        plans = run(scheduler)
    assert plans[0].starts == [24], "the second one, which computed all, left a snapshot there"


def test_the_least_used_slot_is_replaced() -> None:
    scheduler = engine(num_snapshots=2)
    slots = set()
    for name in range(5):
        submit(scheduler, name, [name] * 20)
        slots |= {slot for plan in run(scheduler) for _, slot in plan.state_saves}
    assert slots == {0, 1}
    for name, start in ((3, 16), (4, 16), (0, 0)):
        submit(scheduler, 10 + name, [name] * 20)
        assert run(scheduler)[0].starts == [start]


def test_an_output_keeps_one_snapshot() -> None:
    scheduler = engine(num_snapshots=4)
    submit(scheduler, 0, COMMON[:20], max_tokens=30)
    run(scheduler)
    submit(scheduler, 1, [*COMMON[:20], *[99] * 29, 7, 8])
    assert run(scheduler)[0].starts == [48]
    assert isinstance(scheduler.sharing, SnapshotSharing) and scheduler.sharing.snapshots.num_saved == 5


def test_snapshots_of_a_taken_back_plan_are_dropped() -> None:
    scheduler = engine()
    submit(scheduler, 0, COMMON)
    plan = scheduler.schedule()
    assert plan is not None and len(plan.state_saves) == 1
    scheduler.take_back()
    assert scheduler.preempt_newest() == 0
    again = scheduler.schedule()
    assert again is not None
    assert (again.starts, again.state_loads) == ([0], []) and len(again.state_saves) == 1


@pytest.mark.parametrize(("lost", "start"), [((), 32), ((0,), 0)])
def test_a_snapshot_that_a_lost_row_loaded_is_dropped(lost: tuple[int, ...], start: int) -> None:
    """Else each request with this prompt would be lost."""
    scheduler = engine()
    submit(scheduler, 0, COMMON)
    run(scheduler)
    submit(scheduler, 1, COMMON)
    plan = scheduler.schedule()
    assert plan is not None and (plan.rows, len(plan.state_loads)) == ([0], 1)
    scheduler.take_back(lost)
    scheduler.abort(1)
    submit(scheduler, 2, COMMON)
    assert run(scheduler)[0].starts == [start]


def test_a_snapshot_over_unwritten_pages_is_unused() -> None:
    """Its tokens were computed in pages without a key, the found ones are of a request that has not computed them."""
    scheduler = engine()
    submit(scheduler, 0, COMMON)
    run(scheduler)
    keys = scheduler.sharing.make_keys(request(1, COMMON)).extend(COMMON)
    page = scheduler.pool.find(keys[1])
    assert page is not None
    scheduler.pool.unmark_written(page, 3)
    submit(scheduler, 1, COMMON)
    assert run(scheduler)[0].starts == [0]


def test_an_extended_chunk_saves_the_state_of_its_end() -> None:
    """It first ends at a full page of output, and then gets what a short prompt beside it leaves of the budget."""
    scheduler = engine(budget=64)
    resumed = msgspec.structs.replace(request(0, COMMON[:20], 90), delivered=[99] * 80)
    assert scheduler.submit(0, resumed) is None
    submit(scheduler, 1, list(range(200, 206)))
    plan = step(scheduler)
    ends = {row: start + count for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True)}
    assert len(ends) == 2 and isinstance(scheduler.sharing, SnapshotSharing)
    keys, snapshots = scheduler.requests[0].pages.keys.keys, scheduler.sharing.snapshots
    lengths = {snapshots.use(key, plan.step + 1): (index + 1) * SIZE for index, key in enumerate(keys) if snapshots.has(key)}
    assert [ends[row] for row, _ in plan.state_saves] == [lengths[slot] for _, slot in plan.state_saves] == [32]


def test_no_request_falls_below_its_state() -> None:
    """A plan that lacked memory writes pages again that a running request shares."""
    scheduler = engine(num_snapshots=1)
    submit(scheduler, 0, COMMON[:35], max_tokens=20)
    step(scheduler)
    step(scheduler)
    submit(scheduler, 1, [7] * 20)  # takes the only snapshot
    step(scheduler)
    submit(scheduler, 2, [*COMMON[:35], 7])
    plan = scheduler.schedule()
    assert plan is not None and 0 in plan.starts
    computed = scheduler.requests[0].num_computed - 1
    scheduler.take_back()
    assert scheduler.requests[0].num_computed == computed
    assert scheduler.preempt_newest() == 2
    assert computed in step(scheduler).starts
    run(scheduler)


def test_a_snapshot_over_pages_of_its_plan_is_unused() -> None:
    """If the plan is taken back, no step has written these pages."""
    scheduler = engine()
    submit(scheduler, 0, COMMON)
    run(scheduler)
    for page in range(200):
        if scheduler.pool.written(page):
            scheduler.pool.unmark_written(page, 0)
    submit(scheduler, 1, [*COMMON, 1])
    submit(scheduler, 2, [*COMMON, 2])
    plan = scheduler.schedule()
    assert plan is not None and plan.starts == [0, 0]


def test_a_reservation_holds_no_page_beyond_the_state() -> None:
    """The request that arrives with the state of 16 tokens needs that of no later one."""
    scheduler = engine()
    prompt = list(range(60))
    submit(scheduler, 0, prompt)
    run(scheduler)
    reservation = scheduler.reservations.reserve("move", request(1, prompt), 64, num_computed=16)
    assert isinstance(reservation, Reservation) and reservation.num_held == 2
    scheduler.reservations.drop("move")
    assert scheduler.check() == []


def test_estimated_hits_ignore_snapshots() -> None:
    scheduler = engine(num_snapshots=1)
    submit(scheduler, 0, COMMON)
    run(scheduler)
    submit(scheduler, 1, [7] * 20)  # takes the only snapshot
    run(scheduler)
    submit(scheduler, 2, COMMON)
    found = scheduler.sharing.find(scheduler.requests[2])
    assert scheduler.sharing.num_hit(found) == 4
    assert run(scheduler)[0].starts == [0]


def test_a_dropped_key_frees_its_slot() -> None:
    slots = SnapshotSlots(1)
    first = slots.take(1)
    assert first == 0 and slots.take(1) is None
    slots.name(first, b"a", 1, 8)
    assert slots.longest([b"a"], 1) == 0, "the plan itself cannot load it"
    assert slots.longest([b"a", b"b"], 2) == 1
    slots.drop(b"a")
    assert slots.longest([b"a"], 2) == 0 and slots.take(2) == 0


def test_replaced_snapshots_stay_in_host_memory() -> None:
    """Slot 0 is on the device, 1 and 2 in host memory."""
    slots = SnapshotSlots(1, 2)
    for step, key in enumerate((b"a", b"b", b"c", b"d"), 1):
        slot = slots.take(step)
        assert slot == 0
        slots.name(slot, key, step, 8)
    assert slots.take_stores()[0] == [(0, 1), (0, 2), (0, 1)], "the least recently used one is lost"
    assert [slots.longest([key], 5) for key in (b"a", b"b", b"c", b"d")] == [0, 1, 1, 1]
    assert slots.longest([b"c"], 4) == 0, "the plan that stores it loads first"
    assert (slots.use(b"b", 5), slots.use(b"d", 5), slots.num_loaded) == (2, 0, 1)
    slots.take_back(5, [2])
    assert slots.longest([b"b"], 5) == 0


@pytest.mark.parametrize("lost", [(0,), ()])
def test_a_lost_snapshot_is_dropped_where_it_was_stored(lost: tuple[int, ...]) -> None:
    """The plan whose row lost it has also replaced it."""
    slots = SnapshotSlots(1, 1)
    slots.name(slots.take(1) or 0, b"a", 1, 8)
    assert (slots.use(b"a", 2), slots.take(2), slots.take_stores()[0]) == (0, 0, [(0, 1)])
    slots.give_back(0)
    slots.take_back(2, lost)
    assert slots.longest([b"a"], 3) == (0 if lost else 1)


def test_a_snapshot_of_the_same_plan_is_not_stored() -> None:
    """The plan would copy the slot before the pass saves it."""
    slots = SnapshotSlots(1, 1)
    slots.name(slots.take(1) or 0, b"a", 1, 8)
    assert slots.take(1) == 0
    assert slots.take_stores() == ([], [])


WITH_DISK = PoolShape(18, SIZE, 40, has_disk=True, num_host_snapshots=4)


def test_snapshots_of_evicted_pages_are_written_to_disk() -> None:
    """They keep their slot on the device: others are free."""
    scheduler = engine(pool=WITH_DISK)
    submit(scheduler, 0, COMMON)
    run(scheduler)
    keys = scheduler.sharing.make_keys(request(0, COMMON)).extend(COMMON)
    submit(scheduler, 1, [7] * 120)
    plans = run(scheduler)
    written = [key for plan in plans for key in plan.host_keys]
    assert keys[3] in written
    assert [key for plan in plans for key in plan.state_keys] == [(keys[3], 32)]
    assert [len(plan.state_stores) == len(plan.state_keys) for plan in plans] == [True] * len(plans)
    assert isinstance(scheduler.sharing, SnapshotSharing) and len(scheduler.sharing.snapshots.never_stored()) == 1


def test_snapshots_without_pages_are_stored_once() -> None:
    """The device has slots for all of them, host memory for two, which each plan would fill with all of them."""
    scheduler = engine(num_snapshots=16, pool=msgspec.structs.replace(WITH_DISK, num_host_snapshots=2))
    plans = []
    for name in range(6):
        submit(scheduler, name, [name] * 40)
        plans += run(scheduler)
    submit(scheduler, 6, [7] * 24, max_tokens=90)
    plans += run(scheduler)
    keys = [key for plan in plans for key, _ in plan.state_keys]
    assert len(keys) >= 6
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("num_read", "start"), [(1, 32), (0, 0)])
def test_a_request_reads_pages_and_a_snapshot(num_read: int, start: int) -> None:
    """The disk has five pages and the snapshots after the second and the fourth one; a rank may lack that."""
    scheduler = engine(pool=WITH_DISK)
    disk, keys = scheduler.sharing.disk, scheduler.sharing.make_keys(request(0, COMMON)).extend(COMMON)
    disk.changed(0, keys, [])
    disk.changed(0, [keys[1], keys[3]], [], is_part=True)
    assert scheduler.submit(0, request(0, COMMON), is_held=True) is None
    order = disk.start(0, scheduler.sharing.find_on_disk(scheduler.requests[0]), model=None, now=0.0)
    assert order is not None and (order.keys, order.part_keys, order.part_slots) == (keys[:4], [keys[3]], [6])
    assert disk.fetched(0, order.number, 4, 0.04) == []
    assert disk.fetched(0, order.number, num_read, 0.01, is_part=True) == [0]
    assert (disk.counters.fetched, disk.counters.fetched_parts, disk.counters.failed) == (4, num_read, 1 - num_read)
    assert (keys[3] in disk.part_keys) == bool(num_read)
    load = scheduler.load()
    assert (load.disk_cached_parts, load.disk_fetched_parts) == (1 + num_read, num_read)
    scheduler.release(0)
    plan = run(scheduler)[0]
    assert (plan.starts, plan.state_loads) == ([start], [(plan.rows[0], 6)] * num_read)
    assert scheduler.pool.host.counters.loaded == 4 * num_read


def test_a_snapshot_alone_is_read_for_pages_in_memory() -> None:
    scheduler = engine(num_snapshots=1, pool=WITH_DISK)
    keys = scheduler.sharing.make_keys(request(0, COMMON)).extend(COMMON)
    submit(scheduler, 0, COMMON)
    run(scheduler)
    submit(scheduler, 1, [7] * 20)  # takes the only slot on the device
    run(scheduler)
    scheduler.sharing.disk.changed(0, keys[:4], [], is_part=True)
    prefix = scheduler.sharing.disk.find(keys[:4])
    assert (prefix.start, prefix.end, prefix.keys, prefix.part_keys) == (4, 4, [], []), "it is in host memory"
    prefix = scheduler.sharing.disk.find(keys[:3])
    assert (prefix.start, prefix.end, prefix.keys, prefix.part_keys) == (0, 3, [], [keys[2]])


def test_snapshots_from_disk_take_half_of_host_memory() -> None:
    slots = SnapshotSlots(1, 4)
    assert slots.reserve(3) == [1, 2]
    slots.fill([1, 2], [b"a"])
    assert b"a" in slots and slots.longest([b"a"], 0) == 1
    assert slots.reserve(2) == [2, 3]


def test_requests_with_speculation_are_refused() -> None:
    wanted = msgspec.structs.replace(request(0, [1, 2]), speculation=Speculation("ngram"))
    refused = engine().submit(0, wanted)
    assert isinstance(refused, Refusal) and refused.code == "unsupported_speculation"
    assert "keeps a state per request" in refused.message
    assert engine().submit(0, msgspec.structs.replace(wanted, epoch=1)) is None, "a stream that began elsewhere continues"


def test_requests_draft_chains_within_the_reserved_memory() -> None:
    wanted = msgspec.structs.replace(request(0, [1, 2]), speculation=Speculation("ngram", 8, Tree([3, 2])))
    given = speculation_of(SpeculationConfig(method="ngram", num_tokens=3).with_states(), wanted)
    assert isinstance(given, RequestSpeculation) and (given.max_tokens, given.tree) == (3, CHAIN)
