"""The time of the API server, which also sets the times in objects: the clock of the operator's node does not matter.

`Date` headers have whole seconds, so an estimate is up to a second and half a round trip off; it changes only if a response
contradicts it. A change of more than `STEP_S` is a step, if `CONFIRMATIONS` responses in a row show it: ages of objects are wrong
by as much for a while. A return within `HOLD_S` to a former time does not count as a step: otherwise API servers with different
clocks would hold disruptions without end.
"""

import datetime
import email.utils
import time
from collections.abc import Callable

TOLERANCE_S = 1.0
"""Difference between the estimate and a response that is accepted beyond whole seconds and the round trip."""
STEP_S = 10.0
CONFIRMATIONS = 5
MAX_FORMER = 8
"""Remembered offsets."""
HOLD_S = 300.0
"""Time after a step in which no conclusion from ages ends a group."""


class ServerClock:
    """The API server's time, from its responses; before the first one, the operator's."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._monotonic = monotonic
        self._offset_s = wall() - monotonic()
        self._is_known = False
        self._stepped_s: float | None = None
        self._step_s = 0.0
        self._former: list[tuple[float, float]] = []
        """Offsets before changes, with the times of these."""
        self._contradictions = 0

    def observe(self, date: str, sent_s: float, received_s: float) -> None:
        """Takes the `Date` of a response, and monotonic times. An invalid header has no effect."""
        try:
            server_s = email.utils.parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError):
            return
        low_s, high_s = server_s - received_s - TOLERANCE_S, server_s + 1.0 - sent_s + TOLERANCE_S
        if self._is_known and low_s <= self._offset_s <= high_s:
            self._contradictions = 0
            return
        offset_s = server_s + 0.5 - (sent_s + received_s) / 2
        if self._is_known and abs(offset_s - self._offset_s) > STEP_S:
            self._contradictions += 1
            if self._contradictions < CONFIRMATIONS:
                return
            self._step(offset_s, received_s)
        self._offset_s, self._is_known, self._contradictions = offset_s, True, 0

    def _step(self, offset_s: float, now_s: float) -> None:
        recent = [(former_s, left_s) for former_s, left_s in self._former if now_s - left_s < HOLD_S]
        is_return = any(abs(offset_s - former_s) <= STEP_S for former_s, _ in recent)
        self._former = [*recent, (self._offset_s, now_s)][-MAX_FORMER:]
        if not is_return:
            self._stepped_s, self._step_s = now_s, offset_s - self._offset_s

    def moment(self) -> datetime.datetime:
        """Returns the time."""
        return datetime.datetime.fromtimestamp(self._monotonic() + self._offset_s, datetime.UTC)

    def now(self) -> str:
        """Returns the time in RFC 3339, in whole seconds."""
        return self.moment().strftime("%Y-%m-%dT%H:%M:%SZ")

    def step_reason(self) -> str:
        """Returns how the time changed within `HOLD_S`; empty without a step."""
        if self._stepped_s is None or self._monotonic() - self._stepped_s >= HOLD_S:
            return ""
        return f"the API server's clock changed by {self._step_s:+.0f} s"
