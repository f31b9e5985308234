"""The monitor's thread, and its metrics."""

import asyncio
import pathlib
import re
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from phalanx_api.wire import NO_POWER, DevicePower
from phalanx_runtime.server.devices.metrics import DeviceMetrics
from phalanx_runtime.server.devices.monitor import DeviceMonitor, DeviceReport
from phalanx_runtime.server.devices.readings import ThrottleReason, XidEvent
from tests.polling import until
from tests.runtime.server.devices.fake_source import GPU, SECOND, FakeSource

PAGE = pathlib.Path(__file__).parents[4] / "docs" / "gpu-cluster.md"
LABELS = {"device": "0", "uuid": "GPU-0"}


def make_monitor(source: FakeSource) -> tuple[DeviceMonitor, CollectorRegistry]:
    registry = CollectorRegistry()
    return DeviceMonitor(source, DeviceMetrics(registry), 2), registry


def test_page_lists_every_device_metric() -> None:
    registry, table = CollectorRegistry(), PAGE.read_text().split("| metric | what it is |", 1)[1].split("\n\n", 1)[0]
    DeviceMetrics(registry)
    suffixes = {"counter": "_total"}
    names = {family.name + suffixes.get(family.type, "") for family in registry.collect()}
    assert set(re.findall(r"`(phalanx_device_\w+)", table)) == names


def test_energy_is_counted_from_the_first_reading() -> None:
    source = FakeSource()
    registry = CollectorRegistry()
    monitor = DeviceMonitor(source, DeviceMetrics(registry), 0)
    for energy_j, counted in ((5000.0, 0.0), (5300.0, 300.0), (None, 300.0), (40.0, 340.0)):
        source.readings = (replace(GPU, energy_j=energy_j),)
        monitor.turn(0.0)
        assert registry.get_sample_value("phalanx_device_energy_joules_total", LABELS) == counted


def test_energy_of_a_pod_is_that_of_all_devices() -> None:
    source = FakeSource()
    monitor = DeviceMonitor(source, DeviceMetrics(CollectorRegistry()), 0)

    def energy(*joules: float | None) -> float | None:
        source.readings = tuple(replace(GPU, index=index, energy_j=each) for index, each in enumerate(joules))
        return monitor.turn(0.0).energy_j

    counted = [energy(5000.0, 70.0), energy(5300.0, 70.0), energy(5300.0, None), energy(5400.0, 30.0)]
    assert counted == [0.0, 300.0, None, 430.0], "a device that counts less has a new driver"


def test_power_is_a_mean_and_the_lowest_reading() -> None:
    now_s, source = 0.0, FakeSource()
    monitor = DeviceMonitor(source, DeviceMetrics(CollectorRegistry()), 0, lambda: now_s)

    def power(at_s: float, *watts: float | None) -> DevicePower:
        nonlocal now_s
        now_s, source.readings = at_s, tuple(replace(GPU, index=index, power_w=each) for index, each in enumerate(watts))
        return monitor.turn(0.0).power

    assert power(0.0, 50.0, 70.0) == DevicePower(120.0, 120.0), "of all devices"
    assert power(30.0, 300.0, 301.0) == DevicePower(360.0, 120.0)
    assert power(80.0, 302.0, 300.0) == DevicePower(600.0, 120.0), "the mean is that of the last minute"
    assert power(620.0, 300.0, 300.0) == DevicePower(600.0, 600.0), "the lowest is that of the last ten"
    assert power(625.0, 300.0, None) == NO_POWER
    assert power(630.0, 100.0, 100.0) == DevicePower(200.0, 200.0), "it begins again"


def test_metrics_show_the_last_reading() -> None:
    source = FakeSource((GPU, replace(SECOND, power_w=None)))
    monitor, registry = make_monitor(source)
    assert monitor.turn(0.0) == DeviceReport(), "without the power of all devices"
    assert registry.get_sample_value("phalanx_device_memory_used_bytes", LABELS) == 1 << 30
    assert registry.get_sample_value("phalanx_device_kernel_time_ratio", LABELS) == 0.5
    assert registry.get_sample_value("phalanx_device_power_watts", {"device": "1", "uuid": "GPU-1"}) is None
    throttle = frozenset[ThrottleReason]({"sw_power_cap"})
    source.readings = (replace(GPU, power_w=700.0, throttle=throttle, ecc_corrected=3, ecc_uncorrected=None),)
    monitor.turn(0.0)
    assert registry.get_sample_value("phalanx_device_power_watts", LABELS) == 700.0
    assert registry.get_sample_value("phalanx_device_throttled", {**LABELS, "reason": "sw_power_cap"}) == 1
    assert registry.get_sample_value("phalanx_device_throttled", {**LABELS, "reason": "hw_thermal"}) == 0
    assert registry.get_sample_value("phalanx_device_ecc_errors_total", {**LABELS, "kind": "corrected"}) == 3
    source.readings = (replace(GPU, temperature_c=None),)
    monitor.turn(0.0)
    assert registry.get_sample_value("phalanx_device_temperature_celsius", LABELS) is None
    source.readings = (replace(GPU, lost="GPU is lost", throttle=throttle),)
    monitor.turn(0.0)
    assert registry.get_sample_value("phalanx_device_lost", LABELS) == 1
    assert registry.get_sample_value("phalanx_device_power_watts", LABELS) is None, "not that of the last reading"
    assert registry.get_sample_value("phalanx_device_throttled", {**LABELS, "reason": "sw_power_cap"}) == 0


def test_xid_is_counted_reported_and_ends_ranks() -> None:
    source = FakeSource()
    monitor, registry = make_monitor(source)
    monitor.turn(0.0)
    source.events.put(XidEvent(0, 94))
    report = monitor.turn(0.0)
    assert report.end_reason == "device 0: Xid 94 (contained ECC error)"
    assert [(problem.pod, problem.device, problem.xid) for problem in report.problems] == [(2, 0, 94)]
    assert registry.get_sample_value("phalanx_device_xid_errors_total", {**LABELS, "xid": "94"}) == 1
    assert monitor.turn(0.0) == DeviceReport(report.problems, power=report.power), "the reason is reported once"


async def test_thread_reports_changes_to_the_loop() -> None:
    source, reports = FakeSource(), list[DeviceReport]()
    monitor, _ = make_monitor(source)
    monitor.start(reports.append)
    await until(lambda: len(reports) == 1 and not reports[0].problems)
    source.events.put(XidEvent(0, 13))
    await until(lambda: len(reports) == 3)
    assert reports[1].end_reason and reports[2] == DeviceReport(reports[1].problems, power=reports[1].power)
    monitor.stop()
    await until(lambda: source.is_closed)


async def test_unreadable_source_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    """An error of the driver may pass; meanwhile no metric shows the last reading."""
    caplog.set_level("INFO")
    source, reports, registry = FakeSource(), list[DeviceReport](), CollectorRegistry()
    monitor = DeviceMonitor(source, DeviceMetrics(registry), 2, interval_s=0.01)
    monitor.start(reports.append)
    await until(lambda: len(reports) == 1)
    source.failure = "NVML: Unknown Error"
    await until(lambda: registry.get_sample_value("phalanx_device_power_watts", LABELS) is None)
    assert registry.get_sample_value("phalanx_device_lost", LABELS) is None
    await asyncio.sleep(0.1)
    source.failure = ""
    await until(lambda: registry.get_sample_value("phalanx_device_power_watts", LABELS) == 300.0)
    source.events.put(XidEvent(0, 13))
    await until(lambda: any(report.end_reason for report in reports))
    monitor.stop()
    await until(lambda: source.is_closed)
    names = [record.getMessage() for record in caplog.records]
    assert names == ["devices cannot be read", "devices are read again", "Xid event"]
