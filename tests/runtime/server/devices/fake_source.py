"""A device source that a test scripts."""

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from phalanx_runtime.server.devices.readings import DeviceReading, XidEvent

GPU = DeviceReading(
    index=0,
    uuid="GPU-0",
    name="H100",
    memory_used_bytes=1 << 30,
    memory_total_bytes=80 << 30,
    power_w=300.0,
    power_limit_w=700.0,
    sm_clock_hz=1.98e9,
    max_sm_clock_hz=1.98e9,
    memory_clock_hz=2.6e9,
    temperature_c=60.0,
    ecc_corrected=0,
    ecc_uncorrected=0,
    busy=0.5,
)
SECOND = replace(GPU, index=1, uuid="GPU-1")


@dataclass(slots=True)
class FakeSource:
    """Implements `DeviceSource`. `readings` are those of the next turns."""

    readings: Sequence[DeviceReading] = (GPU,)
    events: "queue.Queue[XidEvent]" = field(default_factory=queue.Queue)
    failure: str = ""
    """Of the next reading."""
    is_closed: bool = False

    def read(self) -> Sequence[DeviceReading]:
        if self.failure:
            raise OSError(self.failure)
        return self.readings

    def wait(self, timeout_s: float) -> XidEvent | None:
        try:
            return self.events.get(timeout=min(timeout_s, 0.01))
        except queue.Empty:
            return None

    def close(self) -> None:
        self.is_closed = True
