"""Which events and readings are problems, and which of them end the incarnation. Pure.

Xid errors: NVIDIA, "Xid Errors" (GPU Deployment and Management Documentation). Those that end a process leave its CUDA context
unusable; the others that end the incarnation leave the device unusable until a reset.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from phalanx_api.wire import DeviceProblem
from phalanx_runtime.server.devices.readings import DeviceReading, ThrottleReason, XidEvent


@dataclass(frozen=True, slots=True)
class Xid:
    """Meaning of an error number."""

    text: str
    ends: bool = True
    """The ranks cannot go on."""


XIDS: Mapping[int, Xid] = {
    13: Xid("graphics engine exception"),
    31: Xid("memory page fault"),
    43: Xid("the device stopped processing"),
    48: Xid("double-bit ECC error; reset the device"),
    62: Xid("internal micro-controller halt; reset the device"),
    63: Xid("a memory row will be remapped at the next reset", ends=False),
    64: Xid("a memory row cannot be remapped; replace the device"),
    69: Xid("graphics engine class error"),
    74: Xid("NVLink error; check the link, then reset the device"),
    79: Xid("the device has fallen off the bus; drain the node"),
    92: Xid("high rate of single-bit ECC errors", ends=False),
    94: Xid("contained ECC error"),
    95: Xid("uncontained ECC error; reset the device"),
    109: Xid("context switch timeout"),
    119: Xid("GSP timeout; reset the device"),
    120: Xid("GSP error; reset the device"),
    140: Xid("unrecovered ECC error; reset the device"),
}
CLEANUP_XID = 45
"""The driver removes the channels of a killed process, such as a rank that the supervisor kills: no problem."""
SLOWING: frozenset[ThrottleReason] = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
"""A software power cap is normal at full load."""
FAULT_S = 600.0
"""Time for which a fault without repetition is reported."""
THROTTLED_S, COOL_S = 10.0, 60.0
"""Least duration of throttling that is reported; time without it after which it ends."""


@dataclass(frozen=True, slots=True)
class Throttling:
    """Throttling of a device."""

    since_s: float
    last_s: float
    reasons: frozenset[ThrottleReason]


@dataclass(frozen=True, slots=True)
class DeviceHistory:
    """Problems so far."""

    faults: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Last time of an error by (device, xid)."""
    lost: Mapping[int, str] = field(default_factory=dict)
    """Reason by device, at the last reading."""
    throttled: Mapping[int, Throttling] = field(default_factory=dict)
    """By device."""

    def after_event(self, event: XidEvent, now_s: float) -> "DeviceHistory":
        """Returns the history with an event."""
        if event.xid == CLEANUP_XID:
            return self
        return replace(self, faults={**self.faults, (event.device, event.xid): now_s})

    def after_readings(self, readings: Iterable[DeviceReading], now_s: float) -> "DeviceHistory":
        """Returns the history with new readings; old problems end."""
        readings = list(readings)
        throttled = {device: state for device, state in self.throttled.items() if now_s - state.last_s < COOL_S}
        for reading in readings:
            if reasons := reading.throttle & SLOWING:
                since_s = throttled[reading.index].since_s if reading.index in throttled else now_s
                throttled[reading.index] = Throttling(since_s, now_s, reasons)
        return DeviceHistory(
            faults={key: at_s for key, at_s in self.faults.items() if now_s - at_s < FAULT_S},
            lost={reading.index: reading.lost for reading in readings if reading.lost},
            throttled=throttled,
        )

    def problems(self, pod: int) -> tuple[DeviceProblem, ...]:
        """Returns the present problems of a pod, faults first."""
        faults = [
            DeviceProblem(kind="fault", pod=pod, device=device, xid=xid, message=xid_text(xid))
            for device, xid in sorted(self.faults)
        ]
        lost = [
            DeviceProblem(kind="fault", pod=pod, device=device, message=f"lost ({why})")
            for device, why in sorted(self.lost.items())
        ]
        throttled = [
            DeviceProblem(kind="throttled", pod=pod, device=device, message=f"throttled ({', '.join(sorted(state.reasons))})")
            for device, state in sorted(self.throttled.items())
            if state.last_s - state.since_s >= THROTTLED_S
        ]
        return (*faults, *lost, *throttled)


def xid_text(xid: int) -> str:
    """Returns the number and its meaning, if known."""
    return f"Xid {xid}" + (f" ({XIDS[xid].text})" if xid in XIDS else "")


def end_reason(event: XidEvent | None, readings: Iterable[DeviceReading]) -> str:
    """Returns why the ranks cannot go on; empty if they can."""
    if event is not None and event.xid in XIDS and XIDS[event.xid].ends:
        return f"device {event.device}: {xid_text(event.xid)}"
    return next((f"device {reading.index} is lost: {reading.lost}" for reading in readings if reading.lost), "")
