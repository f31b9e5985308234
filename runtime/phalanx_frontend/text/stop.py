"""Where a stream of text ends because of stop strings, across any boundaries.

The stop string that is complete first wins, the longest of those that are complete at once; so the answer does not depend
on how the text was cut into tokens. Held back is the longest end of the text that may still become a stop string.
"""

from collections.abc import Sequence


class StopStrings:
    """Searches one request's text. `found` is the stop string that ended it, None while it goes on."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    @property
    def is_holding(self) -> bool:
        """Whether some of the text may become a stop string."""
        return bool(self._held)

    def feed(self, text: str) -> str:
        """The text that may be sent now. Nothing may be fed after `found` is set."""
        text = self._held + text
        end = self._earliest_end(text)
        if self.found is None:
            held = self._longest_beginning(text)
            self._held = text[len(text) - held :]
            return text[: len(text) - held]
        self._held = ""
        return text[:end] if self._include else text[: end - len(self.found)]

    def end(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _earliest_end(self, text: str) -> int:
        """Where the winning stop string ends; sets `found`. Meaningless while `found` is None."""
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
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and len(text) - start > longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(stop[0], start + 1)
        return longest
