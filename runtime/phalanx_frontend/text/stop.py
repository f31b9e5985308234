"""Finds stop strings in streamed text. The first complete one wins, the longest of those that end together."""

from collections.abc import Sequence


class StopStrings:
    """Stop string search of one request."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._pending = ""
        self.found: str | None = None  # the stop string that ended the text

    @property
    def is_holding(self) -> bool:
        """Whether a possible stop string is held back."""
        return bool(self._pending)

    def feed(self, text: str) -> str:
        """Returns the text to send, until `found` is set."""
        text = self._pending + text
        end = self._earliest_end(text)
        if self.found is None:
            pending = longest_begin(text, self._stops)
            self._pending = text[len(text) - pending :]
            return text[: len(text) - pending]
        self._pending = ""
        return text[:end] if self._include else text[: end - len(self.found)]

    def end(self) -> str:
        """Returns the text held back."""
        pending, self._pending = self._pending, ""
        return pending

    def _earliest_end(self, text: str) -> int:
        """Returns the end of the winning stop string, and sets `found`."""
        best = len(text) + 1
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if end < best or (end == best and self.found is not None and len(stop) > len(self.found)):
                best, self.found = end, stop
        return best


def longest_begin(text: str, words: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that begins one of `words`, and is not all of it."""
    longest = 0
    for word in words:
        start = text.find(word[0], max(0, len(text) - len(word) + 1))
        while start >= 0 and len(text) - start > longest:
            if word.startswith(text[start:]):
                longest = len(text) - start
                break
            start = text.find(word[0], start + 1)
    return longest
