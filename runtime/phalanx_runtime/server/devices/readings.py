"""What is read from a device, and the Protocol of the reader."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

ThrottleReason = Literal["sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """State of one device. A value is absent if the device does not report it."""

    index: int
    """Number in the pod, as of the ranks."""
    uuid: str
    name: str = ""
    """Product."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    """Since the driver was loaded."""
    sm_clock_hz: float | None = None
    max_sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    temperature_c: float | None = None
    throttle: frozenset[ThrottleReason] = frozenset()
    """Present reasons for reduced clocks."""
    ecc_corrected: int | None = None
    """Errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    busy: float | None = None
    """Share of the last sample period, up to a second, in which a kernel ran; 0 to 1."""
    lost: str = ""
    """Why the device cannot be read; empty if it can."""


@dataclass(frozen=True, slots=True)
class XidEvent:
    """An error that the driver reports."""

    device: int
    xid: int


class DeviceSource(Protocol):
    """Reads the devices of this pod. Calls come from one thread."""

    def read(self) -> Sequence[DeviceReading]:
        """Returns one reading per device. Raises OSError if no device can be read now."""
        ...

    def wait(self, timeout_s: float) -> XidEvent | None:
        """Returns the next event, or `None` after the timeout. Raises OSError as `read`."""
        ...

    def close(self) -> None:
        """Releases the library."""
        ...
