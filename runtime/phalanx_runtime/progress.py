"""Progress of long work on a terminal: a line that is rewritten and then removed. Elsewhere nothing is written."""

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
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


class WeightProgress:
    """Bytes of a checkpoint's tensors that a rank has read, of those it will read. Thread-safe."""

    def __init__(self, num_stages: int = 1) -> None:
        """`num_stages`: ranks that read different layers."""
        self.total_bytes = 0
        self._num_stages = num_stages
        self._bytes: dict[str, int] = {}

    @property
    def done_bytes(self) -> int:
        """Bytes of the tensors that were read, of each once and whole."""
        return min(sum(tuple(self._bytes.values())), self.total_bytes)

    def opened(self, files: Iterable[Path]) -> None:
        """Sets the total from the files of the checkpoint."""
        self.total_bytes = sum(file.stat().st_size for file in set(files)) // self._num_stages

    def read(self, tensor: str, num_bytes: int) -> None:
        """Counts a tensor."""
        self._bytes[tensor] = num_bytes


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
        self._loaded = (0, 0)
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
        """Shows the seconds since now, until `clear`, and the bar of `set_loaded` once that has a total."""
        self.clear()
        self._loaded = (0, 0)
        ended = self._timer = threading.Event()
        threading.Thread(target=self._count, args=(label, ended), name="progress", daemon=True).start()

    def set_loaded(self, done_bytes: int, total_bytes: int) -> None:
        """Sets the bar of the timer."""
        self._loaded = (done_bytes, total_bytes)

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
                    text = f"{label}: {self._clock() - started:.0f} s"
                    self._write(bar_text(text, *self._loaded) if self._loaded[1] else text)

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
