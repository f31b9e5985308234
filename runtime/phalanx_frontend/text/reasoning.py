"""Reasoning between `<think>` and `</think>`, as Qwen3 and DeepSeek-R1 write it, apart from the answer.

Line ends next to the marks are layout and belong to neither side. Text before `<think>` that is more than white space means that
the model does not think: all of it is content. Without `</think>` everything after `<think>` is reasoning.
"""

from phalanx_frontend.text.parts import Content, Marker, Part, Reasoning, said

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Splits one answer. `inside` says that the prompt ended with `<think>`, so the answer begins within the reasoning."""

    def __init__(self, inside: bool = False) -> None:
        self._is_inside = inside
        self._is_over = False
        self._before = ""
        self._marker = Marker(END)
        self._gap = ""
        self._at_start = True

    @property
    def is_holding(self) -> bool:
        """Whether a mark may have begun, or line ends wait for what follows them."""
        if self._is_over:
            return False
        return bool(self._gap) or self._marker.is_holding if self._is_inside else bool(self._before)

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""
        if self._is_over:
            return said(Content, self._without_lead(text))
        return self._think(text) if self._is_inside else self._look(text)

    def end(self) -> list[Part]:
        """The parts of what was held back."""
        if self._is_over:
            return []
        if not self._is_inside:
            held, self._before = self._before, ""
            return said(Content, held)
        return self._reason(self._marker.end(), last=True)

    def _look(self, text: str) -> list[Part]:
        """Before it is known whether the model thinks."""
        self._before += text
        bare = self._before.lstrip()
        if bare.startswith(BEGIN):
            self._is_inside = True
            return self._think(bare[len(BEGIN) :])
        if BEGIN.startswith(bare):
            return []
        self._is_over, self._at_start = True, False
        held, self._before = self._before, ""
        return said(Content, held)

    def _think(self, text: str) -> list[Part]:
        before, after = self._marker.feed(text)
        parts = self._reason(before, last=after is not None)
        if after is None:
            return parts
        self._is_over, self._at_start = True, True
        return [*parts, *said(Content, self._without_lead(after))]

    def _reason(self, text: str, last: bool) -> list[Part]:
        """Reasoning without the line ends at its two sides, which are held back until more than line ends follows."""
        text = self._gap + self._without_lead(text)
        bare = text.rstrip("\n")
        self._gap = "" if last else text[len(bare) :]
        return said(Reasoning, bare)

    def _without_lead(self, text: str) -> str:
        """The text without line ends at the start of a side."""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text
