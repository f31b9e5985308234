"""Thread that reads the devices every few seconds, and at once after an Xid event."""

import asyncio
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from phalanx_api.wire import NO_POWER, DevicePower, DeviceProblem
from phalanx_runtime.server.devices.metrics import DeviceMetrics
from phalanx_runtime.server.devices.problems import DeviceHistory, end_reason
from phalanx_runtime.server.devices.readings import DeviceReading, DeviceSource

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
MEAN_S, LOWEST_S = 60.0, 600.0
"""Times over which the mean and the lowest power are taken."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Outcome of one turn."""

    problems: tuple[DeviceProblem, ...] = ()
    end_reason: str = ""
    """Why the ranks cannot go on; empty if they can."""
    power: DevicePower = NO_POWER
    energy_j: float | None = None
    """Used by the pod's devices since the first turn; none unless all of them count it."""


class EnergyCount:
    """Energy of the pod's devices since the first reading."""

    def __init__(self) -> None:
        self._last_j: dict[int, float] = {}
        self._used_j = 0.0

    def add(self, readings: Sequence[DeviceReading]) -> float | None:
        """Adds a reading. Returns the joules up to now; none if a device does not count them."""
        for reading in readings:
            if (now_j := reading.energy_j) is None:
                return None
            before_j = self._last_j.get(reading.index, now_j)
            self._used_j += now_j - before_j if now_j >= before_j else now_j  # after a reload of the driver it counts from 0
            self._last_j[reading.index] = now_j
        return self._used_j if readings else None


class PowerHistory:
    """Power of the pod's devices in the last minutes."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()  # time, watts of all devices

    def add(self, readings: Sequence[DeviceReading], now_s: float) -> DevicePower:
        """Adds a reading. Returns the power up to now; none while a device does not report it."""
        watts = [reading.power_w for reading in readings if reading.power_w is not None]
        if not watts or len(watts) < len(readings):
            self._readings.clear()
            return NO_POWER
        self._readings.append((now_s, sum(watts)))
        while now_s - self._readings[0][0] > LOWEST_S:
            self._readings.popleft()
        mean_w = statistics.fmean(watts for at_s, watts in self._readings if now_s - at_s <= MEAN_S)
        lowest_w = min(watts for _, watts in self._readings)
        return DevicePower(max(10.0, round(mean_w, -1)), max(10.0, round(lowest_w, -1)))  # small changes are not reported


class DeviceMonitor:
    """Reads a source, updates metrics, and reports changes to the event loop."""

    def __init__(
        self,
        source: DeviceSource,
        metrics: DeviceMetrics,
        pod: int,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._source = source
        self._interval_s = interval_s
        self._metrics = metrics
        self._pod = pod
        self._clock = clock
        self._history = DeviceHistory()
        self._power = PowerHistory()
        self._energy = EnergyCount()
        self._stop = threading.Event()

    def start(self, report: Callable[[DeviceReport], None]) -> None:
        """Starts the thread. `report` is called on the running event loop: at the first turn and for each change."""
        loop = asyncio.get_running_loop()

        def send(news: DeviceReport) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(report, news)

        threading.Thread(target=self._run, args=[send], name="devices", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread after its turn."""
        self._stop.set()

    def turn(self, timeout_s: float) -> DeviceReport:
        """Waits for an event or the timeout, then reads. Raises OSError."""
        event = self._source.wait(timeout_s)
        now_s = self._clock()
        if event is not None:
            self._metrics.count(event)
            self._history = self._history.after_event(event, now_s)
            log.warning("Xid event", extra={"device": event.device, "xid": event.xid})
        readings = self._source.read()
        problems, power = self._update(readings, now_s), self._power.add(readings, now_s)
        return DeviceReport(problems, end_reason(event, readings), power, self._energy.add(readings))

    def _update(self, readings: Sequence[DeviceReading], now_s: float) -> tuple[DeviceProblem, ...]:
        self._metrics.update(readings)
        self._history = self._history.after_readings(readings, now_s)
        return self._history.problems(self._pod)

    def _run(self, send: Callable[[DeviceReport], None]) -> None:
        last: DeviceReport | None = None
        timeout_s, is_readable = 0.0, True
        while not self._stop.is_set():
            try:
                news = self.turn(timeout_s)
            except OSError as error:  # it may pass, as while the driver is busy with another device
                if is_readable:
                    log.error("devices cannot be read", extra={"why": str(error)})
                    self._metrics.clear()
                is_readable = False
                self._stop.wait(self._interval_s)
                continue
            if not is_readable:
                log.info("devices are read again")
            if news != last or news.end_reason:
                send(news)
            last, timeout_s, is_readable = news, self._interval_s, True
        self._source.close()
