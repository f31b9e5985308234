"""Finds stop strings in a text stream, across any boundaries.

The stop string that is complete first wins, and the longest of those complete at the same position, so the result does not depend
on how the text is split into tokens. The longest suffix that may become a stop string is held back.
"""

from collections.abc import Sequence


class StopStrings:
    """Stop string search of one request. `found`: the stop string that ended the text, or None."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    @property
    def is_holding(self) -> bool:
        """Whether some text is held back because it may become a stop string."""
        return bool(self._held)

    def feed(self, text: str) -> str:
        """Returns the text to send. Must not be called after `found` is set."""
        text = self._held + text
        end = self._earliest_end(text)
        if self.found is None:
            held = self._longest_beginning(text)
            self._held = text[len(text) - held :]
            return text[: len(text) - held]
        self._held = ""
        return text[:end] if self._include else text[: end - len(self.found)]

    def end(self) -> str:
        """Returns the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _earliest_end(self, text: str) -> int:
        """Returns the end position of the winning stop string and sets `found`; meaningless while `found` is None."""
        best = len(text) + 1
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if end < best or (end == best and self.found is not None and len(stop) > len(self.found)):
                best, self.found = end, stop
        return best

    def _longest_beginning(self, text: str) -> int:
        """Returns the length of the longest suffix that begins a stop string."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and len(text) - start > longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(stop[0], start + 1)
        return longest
