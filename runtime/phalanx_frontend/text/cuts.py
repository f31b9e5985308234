"""Where a text can be cut so that its parts, tokenized apart, have the tokens of the whole: before a space between two letters.

Byte-level BPE tokenizes words apart. The patterns that are known here let a word end before such a space and the next one start
with it, whatever surrounds both. So the tokens of a word can be kept for the next text.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS = frozenset((LLAMA_3, QWEN_2))
"""Patterns of words; ByteLevel has that of GPT-2 itself."""
_CUT = re.compile(r" (?=[A-Za-z])(?<=[A-Za-z] )")
_LETTER_AND_SPACE = re.compile(r"[A-Za-z]\s")
RECENT_BYTES = 4 << 20
"""Of `RecentParts`: some 15,000 English words."""
MAX_PART_CHARS = 24
"""Longest part that is kept."""
MAX_NEW = 16
"""Parts of one text that are tokenized apart: of more, the whole text costs less."""
OWNER_BYTES, PART_BYTES, ID_BYTES = 512, 192, 40
"""Upper bounds of the memory of an owner and of a part, in addition to their texts, and of a token id."""

Owner = tuple[str, ...]


class RecentParts:
    """Token ids of words in recent texts, with the space before each: bounded in bytes, per owner. Bound to one thread."""

    def __init__(self, max_bytes: int = RECENT_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._ids: dict[Owner, dict[str, list[int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._ids.values()))

    def encode(self, owner: Owner, text: str, tokenize: Callable[[str], list[int]]) -> list[int]:
        """Returns the token ids of a text. `tokenize`: the same of a tokenizer that has cuts."""
        first, *parts = _CUT.split(text)
        known = self._ids.get(owner, {})
        missing = set(parts).difference(known)
        new = {part: tokenize(f" {part}") for part in islice(missing, MAX_NEW)}
        ids = tokenize(first if len(missing) <= MAX_NEW else text)
        if len(missing) <= MAX_NEW:
            for part in parts:
                found = known.get(part)
                ids += new[part] if found is None else found
        if new:
            self._keep(owner, {part: of_part for part, of_part in new.items() if len(part) <= MAX_PART_CHARS})
        return ids

    def _keep(self, owner: Owner, new: dict[str, list[int]]) -> None:
        of_owner = OWNER_BYTES + sum(map(sys.getsizeof, owner))
        of_new = sum(PART_BYTES + sys.getsizeof(part) + ID_BYTES * len(ids) for part, ids in new.items())
        if self.num_bytes + of_owner + of_new > self._max_bytes:
            self.clear()
        if owner not in self._ids:
            self._ids[owner] = {}
            self.num_bytes += of_owner
        self._ids[owner].update(new)
        self.num_bytes += of_new

    def clear(self) -> None:
        """Removes all."""
        self._ids, self.num_bytes = {}, 0


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
