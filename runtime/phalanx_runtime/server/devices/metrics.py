"""Prometheus metrics of the pod's devices."""

from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from phalanx_runtime.server.devices.readings import DeviceReading, ThrottleReason, XidEvent

LABELS = ("device", "uuid")
_GAUGES = {
    "memory_used_bytes": ("memory_used_bytes", "Used memory of the device."),
    "memory_total_bytes": ("memory_total_bytes", "Memory of the device."),
    "power_w": ("power_watts", "Power draw."),
    "power_limit_w": ("power_limit_watts", "Power limit in effect."),
    "sm_clock_hz": ("sm_clock_hertz", "Clock of the multiprocessors."),
    "max_sm_clock_hz": ("sm_clock_max_hertz", "Highest clock of the multiprocessors."),
    "memory_clock_hz": ("memory_clock_hertz", "Clock of the memory."),
    "temperature_c": ("temperature_celsius", "Temperature of the chip."),
    "busy": ("kernel_time_ratio", "Share of the driver's last sample period in which any kernel ran, 0 to 1."),
}
"""Gauges by field of a reading."""


class DeviceMetrics:
    """Values of the last reading; values that a device does not report are absent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, help_text: str, *labels: str) -> Gauge:
            return Gauge(f"phalanx_device_{name}", help_text, [*LABELS, *labels], registry=registry)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"phalanx_device_{name}", help_text, [*LABELS, *labels], registry=registry)

        self._gauges = {field: gauge(name, help_text) for field, (name, help_text) in _GAUGES.items()}
        self._lost = gauge("lost", "1 if the driver no longer reaches the device.")
        self._throttled = gauge("throttled", "1 while clocks are reduced for this reason.", "reason")
        self._ecc = counter("ecc_errors", "ECC errors since the monitor's start; kind is corrected or uncorrected.", "kind")
        self._energy = counter("energy_joules", "Energy that the device used since the monitor's start.")
        self._xids = counter("xid_errors", "Xid errors that the driver reported.", "xid")
        self._uuids: dict[int, str] = {}
        self._ecc_counts: dict[tuple[int, str], int] = {}
        self._energy_j: dict[int, float] = {}

    def update(self, readings: Iterable[DeviceReading]) -> None:
        """Sets gauges and increments counters."""
        for reading in readings:
            labels = (str(reading.index), reading.uuid)
            self._uuids[reading.index] = reading.uuid
            self._lost.labels(*labels).set(bool(reading.lost))
            for field, family in self._gauges.items():
                if reading.lost or (value := getattr(reading, field)) is None:
                    family.remove(*labels)
                else:
                    family.labels(*labels).set(value)
            for reason in get_args(ThrottleReason):
                self._throttled.labels(*labels, reason).set(not reading.lost and reason in reading.throttle)
            if not reading.lost:
                self._count_use(reading)

    def clear(self) -> None:
        """Removes the values of the last reading: the devices cannot be read."""
        for family in (*self._gauges.values(), self._lost, self._throttled):
            family.clear()

    def _count_use(self, reading: DeviceReading) -> None:
        index, labels = reading.index, (str(reading.index), reading.uuid)
        if (energy_j := reading.energy_j) is not None:
            used_j = energy_j - self._energy_j.get(index, energy_j)
            self._energy.labels(*labels).inc(used_j if used_j >= 0 else energy_j)
            self._energy_j[index] = energy_j
        for kind, count in (("corrected", reading.ecc_corrected), ("uncorrected", reading.ecc_uncorrected)):
            if count is not None:
                before = self._ecc_counts.get((index, kind), count)
                self._ecc.labels(*labels, kind).inc(count - before if count >= before else count)
                self._ecc_counts[index, kind] = count

    def count(self, event: XidEvent) -> None:
        """Counts an event."""
        self._xids.labels(str(event.device), self._uuids.get(event.device, ""), str(event.xid)).inc()
