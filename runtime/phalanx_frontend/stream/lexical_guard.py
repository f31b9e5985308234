"""Differences that embeddings hide: two texts with nearly equal vectors may ask for different things."""

import re

_NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
_WORD = re.compile(r"[^\W\d_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}][^\W\d_]+)*")
_NEGATIONS = frozenset({"no", "not", "never", "none", "nor", "neither", "without", "cannot", "nothing", "nobody", "nowhere"})


def differs(asked: str, stored: str) -> str | None:
    """Returns why the answer to `stored` may not answer `asked`, as a code for metrics; null if it may.

    `numbers`: the texts name other numbers, or another count of one. `negation`: they negate other things.
    """
    if _numbers(asked) != _numbers(stored):
        return "numbers"
    if _negations(asked) != _negations(stored):
        return "negation"
    return None


def _numbers(text: str) -> list[str]:
    return sorted(_NUMBER.findall(text))


def _negations(text: str) -> list[str]:
    """Negating words; contractions as `not`."""
    words = (word.casefold().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'") for word in _WORD.findall(text))
    return sorted("not" if word.endswith("n't") else word for word in words if word in _NEGATIONS or word.endswith("n't"))
