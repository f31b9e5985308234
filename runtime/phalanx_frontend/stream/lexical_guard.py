"""Decides from words alone that two texts need different answers, whatever their embeddings say.

Embeddings hardly separate "15 % of 80" from "80 % of 15". The guard gives each text one wording by a closed list of rules, and
only texts of equal wordings are alike. A false alarm costs a computation, a miss costs a wrong answer, so doubt is a difference:
texts that are not English must be equal except for capitals and spaces, and long ones equal.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from phalanx_frontend.stream import lexical_words as lists
from phalanx_frontend.stream.lexical_tokens import NUMBER, UNIT, forget_tokens
from phalanx_frontend.stream.lexical_wording import Wording, read

Values = Literal["numbers", "units", "identifiers", "names"]
Logic = Literal["negation", "scope", "polarity"]
Meaning = Literal["question", "modality", "tense", "order", "words"]
Difference = Literal["length", "language", "quoted"] | Values | Logic | Meaning
MAX_CHARS = 4000
"""Longer texts are alike only if they are equal."""
KEPT_TEXTS = 16
"""Number of texts whose wordings a `LexicalGuard` of a router keeps."""


class LexicalGuard:
    """Compares as `differs` does, and keeps the wordings of some texts: one question is compared with several stored ones."""

    def __init__(self, kept_texts: int = KEPT_TEXTS) -> None:
        self._read = lru_cache(kept_texts)(read)

    def __len__(self) -> int:
        return self._read.cache_info().currsize

    def differs(self, asked: str, stored: str) -> Difference | None:
        """Returns why the answer of one text must not serve the other."""
        return _difference(asked, stored, self._read)

    def clear(self) -> None:
        """Forgets all texts, and the words that all guards of the process keep."""
        self._read.cache_clear()
        forget_tokens()


def differs(asked: str, stored: str) -> Difference | None:
    """Returns why the answer of one text must not serve the other; None if no difference was found.

    Symmetric; None for equal texts. Pure, except for a bounded cache of words; time is linear in the length of the texts.
    """
    return _difference(asked, stored, read)


def _difference(asked: str, stored: str, read: Callable[[str], Wording]) -> Difference | None:
    if asked == stored:
        return None
    if len(asked) > MAX_CHARS or len(stored) > MAX_CHARS:
        return "length"
    first, second = read(asked), read(stored)
    if not (first.is_english and second.is_english):
        is_prose = "\n" not in asked + stored  # code has indents, and names that differ in capitals
        return None if is_prose and asked.lower().split() == stored.lower().split() else "language"
    if first.words != second.words:
        return _reason(first, second)
    if first.quoted != second.quoted:
        return "quoted"
    if (first.is_about_words or second.is_about_words) and first.replaced != second.replaced:
        return "words"  # what rhymes with film, what rhymes with movie
    if first.synonyms != second.synonyms:
        return "words"  # what is film in French; grey or gray
    if first.inner_signs and second.inner_signs and first.inner_signs != second.inner_signs:
        return "identifiers"  # x! in Swift, x? in Swift
    if first.powers and second.powers and first.powers != second.powers:
        return "modality"  # am I able to, am I allowed to
    if _has_other_case(first.cases, second.cases):
        return "names"
    return "order" if _articles_are_swapped(first.definite, second.definite) else None


def _has_other_case(first: dict[str, set[bool]], second: dict[str, set[bool]]) -> bool:
    """Returns whether a word has a capital letter in one text only: Windows, windows."""
    return any([first[word].isdisjoint(second[word]) for word in first.keys() & second.keys()])


def _articles_are_swapped(first: dict[str, bool], second: dict[str, bool]) -> bool:
    """Returns whether one word gains what another one loses: the charger of a phone, a charger of the phone."""
    return len({first[word] for word in first.keys() & second.keys() if first[word] != second[word]}) == 2


def _reason(first: Wording, second: Wording) -> Values | Logic | Meaning:
    """Returns the kind of the words that only one text has; the order, if both have the same words."""
    here, there = set(first.words), set(second.words)
    words = here ^ there
    if not words:
        return "order"
    for kind, is_kind in _KINDS.items():
        if any([is_kind(word) for word in words]):
            return kind
    if not words.isdisjoint(first.names | second.names):
        return "names"
    if words <= lists.PREPOSITIONS:
        return "order"
    sides, others = _sides(here - there), _sides(there - here)
    if any([side != others.get(axis, side) for axis, side in sides.items()]):
        return "polarity"
    return "tense" if any([f"{word}ed" in words or f"{word}d" in words for word in words]) else "words"


def _sides(words: set[str]) -> dict[int, int]:
    """Returns the sides of opposites that the words are on."""
    return {axis: side for word in words for axis, side in _AXES.get(word, ())}


def _axes() -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for axis, sides in enumerate(lists.OPPOSITES):
        for side, words in enumerate(sides):
            for word in words:
                found.setdefault(lists.EQUALS.get(word, word), []).append((axis, side))
    return found


_AXES = _axes()
_KINDS: dict[Values | Logic | Meaning, Callable[[str], bool]] = {
    "numbers": lambda word: word[0] == NUMBER or word in lists.QUANTITIES,
    "units": lambda word: word[0] == UNIT,
    "identifiers": lambda word: not word.replace("-", "").replace("'", "").isalpha() and word not in ".:",
    "negation": lists.NEGATIONS.__contains__,
    "scope": lists.SCOPES.__contains__,
    "question": lists.QUESTIONS.__contains__,
    "modality": lists.MODALITIES.__contains__,
    "tense": lists.TENSES.__contains__,
}
"""Kinds of words by which a difference is named, in this order."""
