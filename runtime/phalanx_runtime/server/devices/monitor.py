"""Thread that reads the devices every few seconds, and at once after an Xid event."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from phalanx_api.wire import DeviceProblem
from phalanx_runtime.server.devices.metrics import DeviceMetrics
from phalanx_runtime.server.devices.problems import DeviceHistory, end_reason
from phalanx_runtime.server.devices.readings import DeviceReading, DeviceSource

log = logging.getLogger(__name__)

INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Outcome of one turn."""

    problems: tuple[DeviceProblem, ...] = ()
    end_reason: str = ""
    """Why the ranks cannot go on; empty if they can."""


class DeviceMonitor:
    """Reads a source, updates metrics, and reports changes to the event loop."""

    def __init__(
        self, source: DeviceSource, metrics: DeviceMetrics, pod: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._metrics = metrics
        self._pod = pod
        self._clock = clock
        self._history = DeviceHistory()
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
        return DeviceReport(self._update(readings, now_s), end_reason(event, readings))

    def _update(self, readings: Sequence[DeviceReading], now_s: float) -> tuple[DeviceProblem, ...]:
        self._metrics.update(readings)
        self._history = self._history.after_readings(readings, now_s)
        return self._history.problems(self._pod)

    def _run(self, send: Callable[[DeviceReport], None]) -> None:
        last: DeviceReport | None = None
        timeout_s = 0.0
        try:
            while not self._stop.is_set():
                news = self.turn(timeout_s)
                if news != last or news.end_reason:
                    send(news)
                last, timeout_s = news, INTERVAL_S
        except OSError as error:
            log.error("devices are no longer monitored", extra={"why": str(error)})
        self._source.close()
