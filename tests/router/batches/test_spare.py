"""What batches may use: rows that no client needs."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.cost import StepModel
from phalanx_router.batches.slots import MAX_IN_FLIGHT, Slots
from phalanx_router.batches.spare import spare_requests
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
    assert spare_requests([view], queued, itl_target_s, 0) == expected


def test_one_request_wakes_a_sleeping_service() -> None:
    assert spare_requests([], 0, 0.0, 0) == 1 and spare_requests([], 1, 0.0, 1) == 0


@given(st.lists(st.sampled_from(["ask", "give up", "release", "tick"]), max_size=60), st.integers(0, 5))
def test_slots_count_what_is_in_flight(steps: list[str], spare: int) -> None:
    """Never more than allowed, and none is lost when a waiting request gives up."""

    async def run() -> None:
        slots = Slots(lambda in_flight: spare - in_flight, tick_s=0.0)
        asked: list[asyncio.Task[None]] = []
        granting = asyncio.create_task(slots.run())
        for step in steps:
            holding = [task for task in asked if task.done() and not task.cancelled()]
            if step == "ask":
                asked.append(asyncio.create_task(slots.acquire()))
            elif step == "give up" and asked:
                asked[-1].cancel()
            elif step == "release" and holding:
                asked.remove(holding[0])
                slots.release()
            for _ in range(4):
                await asyncio.sleep(0)
            held = sum(task.done() and not task.cancelled() for task in asked)
            assert slots.in_flight == held <= min(spare, MAX_IN_FLIGHT)
        granting.cancel()
        for task in asked:
            task.cancel()
        await asyncio.gather(granting, *asked, return_exceptions=True)

    asyncio.run(run())


async def test_requests_start_in_their_order() -> None:
    slots, started = Slots(lambda in_flight: 1, tick_s=0.001), list[int]()

    async def take(number: int) -> None:
        await slots.acquire()
        started.append(number)

    granting = asyncio.create_task(slots.run())
    tasks = [asyncio.create_task(take(number)) for number in range(5)]
    await until(lambda: len(started) == 5)
    assert started == list(range(5))
    granting.cancel()
    await asyncio.gather(granting, *tasks, return_exceptions=True)
