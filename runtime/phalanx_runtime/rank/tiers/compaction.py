"""Decides what compaction copies, and when.

A page that is dropped leaves a dead slot in the middle of its segment. Compaction copies the live pages of the segment with the
most dead slots to the newest segment, and removes the segment. It starts when fewer than SPARE_SEGMENTS can be created:

    live pages <= LIVE_SHARE * slots of all segments but the spare ones

so that the segment with the most dead slots then has at least 1 - LIVE_SHARE of them dead, which bounds the bytes copied per
byte that is reclaimed.
"""

from collections.abc import Iterable

from phalanx_runtime.rank.tiers.segment import Layout, Segment

LIVE_SHARE = 7 / 8
SPARE_SEGMENTS = 2
MIN_SEGMENTS = 32
"""A log has smaller segments instead of fewer: spare ones are 1/16 of it at most."""


def choose_layout(max_bytes: int, page_bytes: int, segment_bytes: int) -> Layout:
    """Returns the layout of new segments. Raises ValueError if pages are too large for the log."""
    layout = Layout.within(page_bytes, min(segment_bytes, max_bytes // MIN_SEGMENTS))
    if max_bytes < (SPARE_SEGMENTS + 2) * layout.size:
        raise ValueError(
            f"max_bytes={max_bytes} is not enough for {SPARE_SEGMENTS + 2} segments of one page, {layout.size} bytes each"
        )
    return layout


def live_limit(max_bytes: int, layout: Layout) -> int:
    """Returns how many pages may be live."""
    segments = max_bytes // layout.size - SPARE_SEGMENTS
    return max(1, int(LIVE_SHARE * segments * layout.slots))


def choose_source(segments: Iterable[Segment], room: int, layout: Layout) -> Segment | None:
    """Returns the full segment to compact, if there is need. `room`: bytes that new segments may take."""
    if room >= SPARE_SEGMENTS * layout.size:
        return None
    source = max((segment for segment in segments if segment.pages), key=lambda segment: segment.dead, default=None)
    return source if source is not None and source.dead else None


class WriteBudget:
    """Bytes that compaction may write: they accrue over time, up to those of one second or one page."""

    def __init__(self, bytes_per_s: float, page_bytes: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._limit = max(bytes_per_s, float(page_bytes))
        self._bytes = 0.0
        self._updated_s: float | None = None

    def update(self, now_s: float) -> None:
        """Adds the bytes since the last call; the first call adds nothing."""
        if self._updated_s is not None:
            self._bytes = min(self._limit, self._bytes + (now_s - self._updated_s) * self._bytes_per_s)
        self._updated_s = now_s

    def take(self, num_bytes: int) -> bool:
        """Takes bytes, if all are available."""
        if num_bytes > self._bytes:
            return False
        self._bytes -= num_bytes
        return True
