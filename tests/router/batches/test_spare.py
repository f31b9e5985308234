"""What batches may use: rows that no client needs."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.cost import StepModel
from phalanx_router.batches.slots import MAX_IN_FLIGHT, Slot, Slots, spare_requests
from phalanx_router.routing.view import GroupCapacity, GroupLoad, GroupView
from tests.polling import until

VIEW = GroupView(
    key="a",
    capacity=GroupCapacity(total_pages=100, max_num_seqs=10),
    load=GroupLoad(running=2),
    step_model=StepModel(fixed_s=0.02, token_s=0, knee_tokens=0, context_s=0, attention_s=0),
)


@pytest.mark.parametrize(
    ("view", "queued", "itl_target_s", "expected"),
    [
        (VIEW, 0, 0.0, 6),
        (VIEW, 1, 0.0, 0),
        (VIEW, 0, 0.03, 6),
        (VIEW, 0, 0.02, 0),
        (replace(VIEW, load=GroupLoad()), 0, 0.02, 8),
        (replace(VIEW, load=GroupLoad(running=9)), 0, 0.0, 0),
        (replace(VIEW, load=GroupLoad(waiting=1)), 0, 0.0, 0),
        (replace(VIEW, load=GroupLoad(used_pages=50, reserved_pages=30)), 0, 0.0, 0),
        (replace(VIEW, is_draining=True), 0, 0.0, 0),
        (replace(VIEW, has_report=False), 0, 0.0, 0),
        (replace(VIEW, state="suspect"), 0, 0.0, 0),
        (replace(VIEW, capacity=GroupCapacity(total_pages=100)), 0, 0.0, 10),
    ],
)
def test_batches_leave_room_for_clients(view: GroupView, queued: int, itl_target_s: float, expected: int) -> None:
    assert spare_requests([view], queued=queued, in_flight=0, itl_target_s=itl_target_s) == expected
    assert spare_requests([view], queued=queued, in_flight=0, itl_target_s=itl_target_s, routers=2) == -(-expected // 2)


def test_one_request_wakes_a_sleeping_service() -> None:
    assert spare_requests([], queued=0, in_flight=0) == 1 and spare_requests([], queued=1, in_flight=1) == 0


@given(st.lists(st.tuples(st.sampled_from(["ask", "give back", "tick"]), st.integers(0, 9)), max_size=60), st.integers(0, 5))
def test_slots_count_what_is_in_flight(steps: list[tuple[str, int]], spare: int) -> None:
    """Never more than allowed, none is lost when a waiting request gives up, and nothing is kept of it."""

    async def run() -> None:
        slots = Slots(lambda in_flight: spare - in_flight, tick_s=0.0)
        asked: list[tuple[Slot, str]] = []
        granting = asyncio.create_task(slots.run())
        for step, number in steps:
            if step == "ask":
                asked.append((slots.ask(f"tenant-{number % 3}"), f"tenant-{number % 3}"))
            elif step == "give back" and asked:
                slots.give_back(*asked.pop(number % len(asked)))
            else:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            held = sum(slot.done() for slot, _ in asked)
            assert slots.in_flight == held <= min(spare, MAX_IN_FLIGHT)
            assert slots.num_waiting == len(asked) - held
        granting.cancel()
        await asyncio.gather(granting, return_exceptions=True)

    asyncio.run(run())


def _note(order: list[str], name: str, slot: Slot) -> None:
    order.append(name)


async def test_tenants_take_turns() -> None:
    slots, order = Slots(lambda in_flight: 1, tick_s=0.001), list[str]()
    for name in ("a0", "a1", "a2", "b0", "b1"):
        slots.ask(name[0]).add_done_callback(partial(_note, order, name))
    granting = asyncio.create_task(slots.run())
    await until(lambda: len(order) == 5)
    assert order == ["a0", "b0", "a1", "b1", "a2"]
    granting.cancel()
    await asyncio.gather(granting, return_exceptions=True)


async def test_slots_of_a_look_last_for_requests_that_follow() -> None:
    """A batch asks for one at a time. The next look counts what they started."""
    slots = Slots(lambda in_flight: 6 - in_flight, tick_s=0.001)
    granting = asyncio.create_task(slots.run())
    await slots.ask("a")
    asked = [slots.ask("a") for _ in range(8)]
    assert [slot.done() for slot in asked] == [True] * 5 + [False] * 3 and slots.in_flight == 6
    granting.cancel()
    await asyncio.gather(granting, return_exceptions=True)


async def test_slots_survive_an_error_of_the_groups() -> None:
    looks = 0

    def spare(in_flight: int) -> int:
        nonlocal looks
        looks += 1
        return in_flight // 0 if looks == 1 else 1

    slots = Slots(spare, tick_s=0.001)
    granting = asyncio.create_task(slots.run())
    await slots.ask("a")
    granting.cancel()
    await asyncio.gather(granting, return_exceptions=True)
