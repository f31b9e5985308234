"""Which events and readings are problems, and which end the incarnation."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_runtime.server.devices.problems import CLEANUP_XID, COOL_S, FAULT_S, THROTTLED_S, XIDS, DeviceHistory, end_reason
from phalanx_runtime.server.devices.readings import ThrottleReason, XidEvent
from tests.runtime.server.devices.fake_source import GPU, SECOND

NONE: frozenset[ThrottleReason] = frozenset()


def texts(history: DeviceHistory) -> list[str]:
    return [f"{problem.kind} {problem}" for problem in history.problems(3)]


@pytest.mark.parametrize(
    ("xid", "reason"),
    [
        (79, "device 1: Xid 79 (the device has fallen off the bus; drain the node)"),
        (31, "device 1: Xid 31 (memory page fault)"),
        (63, ""),
        (92, ""),
        (CLEANUP_XID, ""),
        (9999, ""),
    ],
)
def test_xid_table_decides_what_ends_ranks(xid: int, reason: str) -> None:
    assert end_reason(XidEvent(1, xid), [GPU, SECOND]) == reason


def test_lost_device_ends_the_ranks() -> None:
    lost = replace(SECOND, lost="GPU is lost")
    assert end_reason(None, [GPU, lost]) == "device 1 is lost: GPU is lost"
    assert texts(DeviceHistory().after_readings([GPU, lost], 0.0)) == ["fault device 1 of pod 3: lost (GPU is lost)"]
    assert texts(DeviceHistory().after_readings([GPU, lost], 0.0).after_readings([GPU, SECOND], 1.0)) == []


def test_fault_is_reported_until_it_is_old() -> None:
    history = DeviceHistory().after_event(XidEvent(0, 63), 10.0)
    text = ["fault device 0 of pod 3: Xid 63 (a memory row will be remapped at the next reset)"]
    assert texts(history.after_readings([GPU], 10.0 + FAULT_S - 1)) == text
    assert texts(history.after_readings([GPU], 10.0 + FAULT_S)) == []
    assert texts(history.after_event(XidEvent(0, 63), 500.0).after_readings([GPU], 10.0 + FAULT_S)) == text, "it repeats"


def test_cleanup_after_a_killed_rank_is_no_fault() -> None:
    assert texts(DeviceHistory().after_event(XidEvent(0, CLEANUP_XID), 0.0)) == []


def test_unknown_xid_is_reported_by_its_number() -> None:
    assert texts(DeviceHistory().after_event(XidEvent(0, 9999), 0.0)) == ["fault device 0 of pod 3: Xid 9999"]


def test_lasting_throttling_is_reported_until_it_cools() -> None:
    hot = replace(GPU, throttle=frozenset[ThrottleReason]({"hw_thermal", "sw_power_cap"}))
    history = DeviceHistory().after_readings([hot], 0.0)
    assert texts(history) == [], "a moment is none"
    history = history.after_readings([GPU], 5.0).after_readings([hot], THROTTLED_S)
    assert texts(history) == ["throttled device 0 of pod 3: throttled (hw_thermal)"]
    assert texts(history.after_readings([GPU], THROTTLED_S + COOL_S - 1)) != []
    assert texts(history.after_readings([GPU], THROTTLED_S + COOL_S)) == []


def test_power_cap_under_load_is_no_problem() -> None:
    capped = replace(GPU, throttle=frozenset[ThrottleReason]({"sw_power_cap"}))
    assert texts(DeviceHistory().after_readings([capped], 0.0).after_readings([capped], 100.0)) == []


@given(st.lists(st.tuples(st.sampled_from([*XIDS, 45, 7]), st.integers(0, 1), st.floats(0, 100)), max_size=20))
def test_each_device_and_xid_is_listed_once(events: list[tuple[int, int, float]]) -> None:
    history, now_s = DeviceHistory(), 0.0
    for xid, device, later_s in events:
        now_s += later_s
        history = history.after_event(XidEvent(device, xid), now_s).after_readings([GPU, SECOND], now_s)
    listed = [(problem.device, problem.xid) for problem in history.problems(0)]
    assert len(set(listed)) == len(listed) and CLEANUP_XID not in {xid for _, xid in listed}
    if events and events[-1][0] != CLEANUP_XID:
        assert (events[-1][1], events[-1][0]) in listed
