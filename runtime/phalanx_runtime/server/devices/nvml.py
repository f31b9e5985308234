"""Reads devices through NVML, by `nvidia-ml-py`. Without the library or a driver there is no source.

NVML lists the devices that the container may use; `CUDA_VISIBLE_DEVICES` selects among them, as it does for ranks.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from phalanx_runtime.server.devices.readings import DeviceReading, ThrottleReason, XidEvent

log = logging.getLogger(__name__)
T = TypeVar("T")

THROTTLE_BITS: Mapping[int, ThrottleReason] = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
"""Reasons by bit of `nvmlDeviceGetCurrentClocksEventReasons`. Idle and configured clocks are no throttling."""
_MHZ = 1e6


def open_devices(num_ranks: int, visible: str | None) -> "NvmlSource | None":
    """Returns a source for the devices of `num_ranks` ranks; `None`, with one log line, without library, driver or device.

    `visible`: value of `CUDA_VISIBLE_DEVICES`.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        log.info("devices are not monitored", extra={"why": "nvidia-ml-py is not installed"})
        return None
    except Exception as error:  # errors of the library are generated classes
        log.info("devices are not monitored", extra={"why": str(error)})
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        chosen = visible_devices([str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles], visible)[:num_ranks]
        if chosen:
            return NvmlSource(pynvml, [handles[index] for index in chosen])
        why = "no device is visible"
    except pynvml.NVMLError as error:
        why = str(error)
    pynvml.nvmlShutdown()
    log.info("devices are not monitored", extra={"why": why})
    return None


def visible_devices(uuids: Sequence[str], visible: str | None) -> list[int]:
    """Returns the indices of visible devices in their order. `visible`: indices or starts of UUIDs; a wrong one ends the list."""
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in (word.strip() for word in visible.split(",")):
        if word.isdecimal():
            matches = [int(word)] if int(word) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if len(matches) != 1:
            break
        chosen += matches
    return chosen


class NvmlSource:
    """Implements `DeviceSource`. `library`: the module pynvml, initialized."""

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._nvml = library
        self._handles = list(handles)
        self._uuids = [str(library.nvmlDeviceGetUUID(handle)) for handle in handles]
        self._names = [str(library.nvmlDeviceGetName(handle)) for handle in handles]
        self.driver = str(library.nvmlSystemGetDriverVersion())
        """Version."""
        self._lost = library.NVMLError_GpuIsLost, library.NVMLError_ResetRequired
        """Errors of a device that cannot be read."""
        self._events = self._register_events()

    def _register_events(self) -> Any | None:
        """Devices without events, such as MIG slices, have readings only."""
        events = self._nvml.nvmlEventSetCreate()
        num_registered = 0
        for handle in self._handles:
            try:
                self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, events)
                num_registered += 1
            except self._nvml.NVMLError as error:
                log.info("the device reports no Xid events", extra={"why": str(error)})
        return events if num_registered else None

    def read(self) -> list[DeviceReading]:
        """See DeviceSource."""
        try:
            return [self._read(index) for index in range(len(self._handles))]
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def _read(self, index: int) -> DeviceReading:
        nvml, handle = self._nvml, self._handles[index]
        try:
            memory = self._optional(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
            power = self._optional(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
            limit = self._optional(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
            reasons = self._optional(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)) or 0
            busy = self._optional(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            return DeviceReading(
                index=index,
                uuid=self._uuids[index],
                name=self._names[index],
                memory_used_bytes=None if memory is None else int(memory.used),
                memory_total_bytes=None if memory is None else int(memory.total),
                power_w=power,
                power_limit_w=limit,
                energy_j=self._optional(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
                sm_clock_hz=self._optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * _MHZ),
                max_sm_clock_hz=self._optional(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * _MHZ),
                memory_clock_hz=self._optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * _MHZ),
                temperature_c=self._optional(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                throttle=frozenset(reason for bit, reason in THROTTLE_BITS.items() if reasons & bit),
                ecc_corrected=self._optional(lambda: self._ecc_errors(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)),
                ecc_uncorrected=self._optional(lambda: self._ecc_errors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)),
                busy=busy,
            )
        except self._lost as error:
            return DeviceReading(index=index, uuid=self._uuids[index], name=self._names[index], lost=str(error))

    def _ecc_errors(self, handle: Any, kind: int) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEccErrors(handle, kind, self._nvml.NVML_VOLATILE_ECC))

    def _optional(self, get: Callable[[], T]) -> T | None:
        """Some products, and MIG slices, lack some values."""
        try:
            return get()
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission, self._nvml.NVMLError_FunctionNotFound):
            return None

    def wait(self, timeout_s: float) -> XidEvent | None:
        """See DeviceSource."""
        if self._events is None:
            time.sleep(timeout_s)
            return None
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(timeout_s * 1000))
            uuid = str(self._nvml.nvmlDeviceGetUUID(event.device))
        except self._nvml.NVMLError_Timeout:
            return None
        except self._lost:
            self._events = None  # each further wait would fail at once; `read` returns which device it is
            return None
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        return XidEvent(self._uuids.index(uuid), int(event.eventData)) if uuid in self._uuids else None

    def close(self) -> None:
        """See DeviceSource."""
        self._nvml.nvmlShutdown()
