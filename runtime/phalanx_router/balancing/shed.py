"""When waiting requests are refused: the fleet is saturated, and even its best group misses the target, for a second.

Each further second one more priority band is refused, the lowest first. A started stream is never shed; who is refused within a
band is the queue's (`route`).
"""

from dataclasses import dataclass

PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse waiting requests of so many bands, the lowest first, and tell them when to come again."""

    bands: int
    retry_after_s: float
    why: str


class Shedding:
    """Follows how long shedding has been due."""

    def __init__(self) -> None:
        self._since: float | None = None

    def decide(self, is_saturated: bool, best_ttft_s: float | None, target_s: float | None, now: float) -> Shed | None:
        """What to refuse now, if anything. `best_ttft_s`: predicted at the best group for a newcomer, None without a group."""
        is_due = is_saturated and best_ttft_s is not None and target_s is not None and best_ttft_s > target_s
        if not is_due or best_ttft_s is None or target_s is None:
            self._since = None
            return None
        self._since = self._since if self._since is not None else now
        bands = int((now - self._since) / PATIENCE_S)
        if not bands:
            return None
        why = f"every group is loaded, and the best would need {best_ttft_s:.1f} s where {target_s:.1f} s are the target"
        return Shed(bands, max(1.0, best_ttft_s - target_s), why)
