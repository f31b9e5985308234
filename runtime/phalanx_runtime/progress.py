"""Progress of long work on a terminal: a line that is rewritten and then removed. Elsewhere nothing is written."""

import shutil
import threading
import time
from collections.abc import Callable
from typing import TextIO

from phalanx_frontend.logs import ERASE_LINE

ProgressBar = Callable[[str, int, int], None]
"""Receives what is done, and how many bytes of how many."""
INTERVAL_S = 0.1
"""Minimum interval between two states of the line; also that of a timer."""
BAR_CELLS = 24


def bar_text(label: str, done_bytes: int, total_bytes: int) -> str:
    """Returns the text of a bar: `label [####    ] 50 % of 2 MB`."""
    share = min(1.0, done_bytes / total_bytes) if total_bytes > 0 else 0.0
    filled = int(BAR_CELLS * share)
    return f"{label} [{'#' * filled}{' ' * (BAR_CELLS - filled)}] {int(100 * share)} % of {total_bytes / 1e6:,.0f} MB"


def open_line(stream: TextIO) -> "ProgressLine | None":
    """Returns the line of a terminal; null if the stream is none."""
    return ProgressLine(stream, lambda: shutil.get_terminal_size().columns) if stream.isatty() else None


class ProgressLine:
    """The last line of a terminal. Thread-safe."""

    def __init__(self, stream: TextIO, width: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._width = width
        self._clock = clock
        self._shown_at = float("-inf")
        self._is_shown = False
        self._timer: threading.Event | None = None
        self._lock = threading.Lock()

    def show(self, label: str, done_bytes: int, total_bytes: int) -> None:
        """Rewrites the line, unless it has just been; the last state always."""
        with self._lock:
            if self._clock() - self._shown_at >= INTERVAL_S or done_bytes >= total_bytes:
                self._write(bar_text(label, done_bytes, total_bytes))

    def show_text(self, text: str) -> None:
        """Rewrites the line, unless it has just been."""
        with self._lock:
            if self._clock() - self._shown_at >= INTERVAL_S:
                self._write(text)

    def write_above(self, text: str) -> None:
        """Writes a line that stays; a running bar follows it at its next state."""
        self.clear()
        with self._lock:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def start_timer(self, label: str) -> None:
        """Shows the seconds since now, until `clear`."""
        self.clear()
        ended = self._timer = threading.Event()
        threading.Thread(target=self._count, args=(label, ended), name="progress", daemon=True).start()

    def clear(self) -> None:
        """Removes the line, and ends a timer."""
        if self._timer is not None:
            self._timer.set()
        with self._lock:
            if self._is_shown:
                self._stream.write(ERASE_LINE)
                self._stream.flush()
                self._is_shown = False

    def _count(self, label: str, ended: threading.Event) -> None:
        started = self._clock()
        while not ended.wait(INTERVAL_S):
            with self._lock:
                if not ended.is_set():
                    self._write(f"{label}: {self._clock() - started:.0f} s")

    def _write(self, text: str) -> None:
        self._shown_at, self._is_shown = self._clock(), True
        self._stream.write(ERASE_LINE + text[: self._width() - 1])
        self._stream.flush()


def show_loading(line: ProgressLine | None) -> Callable[[str], None]:
    """Returns a function that receives the activities of a launcher, and counts the seconds of `loading` in the line."""

    def show(activity: str) -> None:
        if line is not None and activity == "loading":
            line.start_timer("loading the model")
        elif line is not None:
            line.clear()

    return show
