"""The condition `DevicesHealthy`, and throttled devices of stragglers."""

from dataclasses import replace

import pytest

from phalanx_api.conditions import find_condition
from phalanx_api.status import Status
from phalanx_api.summary import Hotspot
from phalanx_api.wire import DeviceProblem
from phalanx_operator.decide.conditions import traffic
from phalanx_operator.decide.conditions.devices import with_devices_condition
from phalanx_operator.decide.state.fleet import Fleet
from tests.control.builders import NOW, make_group, make_snapshot
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

XID = DeviceProblem(kind="fault", pod=1, device=2, xid=79, message="Xid 79 (the device has fallen off the bus; drain the node)")
HOT = DeviceProblem(kind="throttled", pod=0, device=0, message="throttled (hw_thermal)")
XID_TEXT = "a: device 2 of pod 1: Xid 79 (the device has fallen off the bus; drain the node)"


def decide(fleet: Fleet, status: Status | None = None) -> tuple[str, str, str] | None:
    snapshot = make_snapshot(make_group("a"), status=status or Status())
    condition = find_condition(with_devices_condition(snapshot.status, fleet, snapshot, NOW).conditions, "DevicesHealthy")
    return (condition.status, condition.reason, condition.message) if condition else None


@pytest.mark.parametrize(
    ("fleet", "verdict"),
    [
        (fleet_of(summary(group("a"))), None),
        (
            fleet_of(summary(group("a", devices=[HOT]))),
            ("False", "DeviceThrottled", "a: device 0 of pod 0: throttled (hw_thermal)"),
        ),
        (fleet_of(summary(group("a", devices=[HOT, XID]))), ("False", "DeviceFault", XID_TEXT)),
        (fleet_of(summary(group("gone", devices=[XID]))), None),
        (Fleet(polled=1), None),
    ],
    ids=["no problem", "throttled", "a fault first", "an unknown group", "silent routers"],
)
def test_devices_condition_table(fleet: Fleet, verdict: tuple[str, str, str] | None) -> None:
    assert decide(fleet) == verdict


def test_only_complete_reports_end_the_condition() -> None:
    snapshot = make_snapshot(make_group("a"))
    broken = with_devices_condition(snapshot.status, fleet_of(summary(group("a", devices=[XID]))), snapshot, NOW)
    assert decide(Fleet(polled=1), broken) == ("False", "DeviceFault", XID_TEXT)
    assert decide(fleet_of(summary(group("a")), polled=2), broken) == ("False", "DeviceFault", XID_TEXT)
    assert decide(fleet_of(summary(group("a"))), broken) == ("True", "Healthy", "")


def test_stragglers_message_names_its_throttled_device() -> None:
    def slow(name: str) -> Hotspot:
        return Hotspot(group=name, cause="straggler", signal=1.5, median=1.0, since_s=60.0, action="weigh")

    reports = summary(group("a", devices=[HOT, XID]), group("b"), hotspots=[slow("a"), slow("b")])
    snapshot = make_snapshot(make_group("a"), make_group("b"))
    status = traffic.with_balanced_condition(snapshot.status, replace(fleet_of(reports), is_new=False), snapshot, NOW)
    balanced = find_condition(status.conditions, "Balanced")
    assert balanced is not None and balanced.reason == "Straggler"
    first, second = balanced.message.split("; ")
    assert first.endswith("weigh (device 0 of pod 0: throttled (hw_thermal))") and second.endswith("weigh")


async def test_device_fault_becomes_an_event_of_the_service() -> None:
    world = World()
    await world.settle()
    world.cluster.start_router_pods()
    (name,) = world.groups
    world.routers.summary = summary(group(name, devices=[XID]))
    await world.reconcile()
    assert world.condition("DevicesHealthy") == ("False", "DeviceFault")
    assert ("Warning", "DeviceFault") in world.events()
    world.routers.summary = summary(group(name))
    await world.reconcile()
    assert ("Normal", "Healthy") in world.events()
