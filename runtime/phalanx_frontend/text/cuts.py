"""Where a text can be cut so that its parts, tokenized apart, have the tokens of the whole: before a space between two letters.

Byte-level BPE tokenizes words apart. The patterns that are known here let a word end before such a space and the next one start
with it, whatever surrounds both. So two texts with a part in common need its tokens once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS = frozenset((LLAMA_3, QWEN_2))
"""Patterns of words; ByteLevel has that of GPT-2 itself."""
_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_LAST_CUT = re.compile(r"(?s:.*) (?<=[A-Za-z] )(?=[A-Za-z])")
_LETTER_AND_SPACE = re.compile(r"[A-Za-z]\s")


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Token ids of the characters from `start` to `end` of a part of a text."""

    start: int
    end: int
    ids: Sequence[int]


def has_cuts(document: Mapping[str, Any]) -> bool:
    """Whether the tokenizer of a tokenizer.json tokenizes both sides of each cut apart; false if that is not known."""
    model, normalizer = document.get("model") or {}, document.get("normalizer")
    if model.get("type") != "BPE" or model.get("dropout") or normalizer not in (None, {"type": "NFC"}):
        return False
    if any(_may_span(token) for token in document.get("added_tokens") or ()):
        return False
    steps = list(_steps(document.get("pre_tokenizer") or {}))
    # ByteLevel writes a space as a letter: patterns after it would find no words.
    is_last = all(step.get("type") != "ByteLevel" for step in steps[:-1])
    return is_last and all(map(_is_known, steps)) and any(map(_splits_words, steps))


def cut_places(text: str) -> tuple[int, int] | None:
    """Returns the first and the last cut of a text, if it has two."""
    first, last = _CUT.search(text), _LAST_CUT.match(text)
    if first is None or last is None or last.end() == first.end():
        return None
    return first.start(), last.end() - 1


def _steps(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if step.get("type") == "Sequence":
        for inner in step["pretokenizers"]:
            yield from _steps(inner)
    else:
        yield step


def _is_known(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return not step.get("add_prefix_space", True)
    return step.get("type") == "Digits" or _splits_words(step)


def _splits_words(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))
    is_split = step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")
    return is_split and step["pattern"].get("Regex") in _WORDS


def _may_span(token: Mapping[str, Any]) -> bool:
    """Whether an added token may have characters on both sides of a cut."""
    content = str(token["content"])
    return bool(_LETTER_AND_SPACE.search(content)) or (bool(token.get("rstrip")) and content[-1:].isalpha())
