"""Tokens of an English text, and what each one contributes to the comparison of two texts, whatever surrounds it."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from phalanx_frontend.stream import lexical_words as lists

MAX_CACHED = 8192
"""Entries of each cache: of tokens, and of texts between spaces."""
MAX_CACHED_CHARS = 40
"""Longest text of an entry."""

Kind = Literal["word", "number", "sign", "identifier", "stop"]

_TOKEN = re.compile(
    r""""[^"]+"|`[^`]+`|“[^“”]+”|«[^«»]+»|(?<!\w)'[^'\n]+'(?!\w)
    |\w+://\S*[\w/]|[\w.+-]{1,64}@[\w.-]+\w|(?<!\S)[~.]{0,2}(?:/[\w.-]+)+/?|(?<!\S)--?[A-Za-z][\w-]*
    |(?:(?<![\w)\].%])[-−])?(?<![^\W\d])(?:\d{1,3}(?:[,'’_\u00a0\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)*
    |\w+(?:['’]\w+)*(?:\.\w+)*
    |[!=<>]=+|[-=]>
    |[.!?:,;\n]+
    |[%$€£¥₹°+−<>=*/^|&~\\#@{}\[\]]|(?<=\w)\(|(?<!\S)-(?!\S)""",
    re.VERBOSE,
)
_APOSTROPHE = re.compile(r"(?<!\w)'")
_NUMBER = re.compile(r"[-−]?\d[\d,.'’_\u00a0\u202f]*")
_SIGN_WORDS = {"+": "plus", "-": "minus", "−": "minus"}
_QUOTES = "\"`'“”«»"
_DIRECTIONS = {
    word: word
    for word in """from to for than before after until till since by with without about as between over under during via against
    near instead""".split()
} | {
    **dict.fromkeys("of in on at through".split(), "in"),
    "into": "to",
}
"""Prepositions and the direction of the words after them, up to the next verb or the end of the clause."""

_QUESTION_WORDS = frozenset("who whose whom when where why how what which".split())


@dataclass(frozen=True, slots=True)
class Token:
    """What one token contributes. Empty strings: nothing."""

    kind: Kind
    text: str  # a word in lower case, a number without separators
    root: str = ""  # a word without its ending
    content: str = ""  # canonical form of a word that is no stop word
    capitals: int = 0  # 1: the first letter; 2: others too, which makes a name anywhere
    score: int = 0  # 1 for a frequent English word, -2 for a frequent foreign one
    direction: str | None = None  # of the words after it; None: unchanged
    tense: str = ""
    is_auxiliary: bool = False
    is_plain: bool = False  # `_Reader` uses its content alone
    is_special: bool = False  # a question word, number, unit, negation, scope or opposite, or no word
    is_question: bool = False
    number: str = ""
    unit: str = ""
    negation: str = ""
    scope: str = ""
    modality: str = ""
    light: str = ""  # group of a light verb
    person: str = ""
    is_past: bool = False  # it ends in -ed
    is_clausal: bool = False  # it has a modality, light verb, person or past, or is an auxiliary or "too"
    is_owner: bool = False  # it ends in 's: a possessive
    axes: tuple[tuple[int, int], ...] = ()  # axis of opposites, and its side: 1 or 2


def tokens_of(text: str) -> list[Token]:
    """Returns the tokens in order, from bounded caches: those between spaces, or single ones if a quotation may have spaces."""
    if any([quote in text for quote in '"`“«']) or ("'" in text and _APOSTROPHE.search(text)):
        return _scanned(text)
    tokens = list[Token]()
    for chunk in text.split(" "):
        tokens += _cached_tokens(chunk) if len(chunk) <= MAX_CACHED_CHARS else _scanned(chunk)
    return tokens


def uncached_tokens(text: str) -> list[Token]:
    """Returns the tokens in order. Reference implementation of `tokens_of`."""
    return [_token(one) for one in _TOKEN.findall(text)]


def _scanned(text: str) -> list[Token]:
    return [_cached_token(one) if len(one) <= MAX_CACHED_CHARS else _token(one) for one in _TOKEN.findall(text)]


def num_cached() -> int:
    """Returns the entries of the caches."""
    return sum(cached.cache_info().currsize for cached in (_cached_token, _cached_tokens))


def forget_tokens() -> None:
    """Clears the caches: a token may be a name or an address that a client sent."""
    _cached_token.cache_clear()
    _cached_tokens.cache_clear()


@lru_cache(MAX_CACHED)
def _cached_token(text: str) -> Token:
    return _token(text)


@lru_cache(MAX_CACHED)
def _cached_tokens(chunk: str) -> tuple[Token, ...]:
    return tuple(_scanned(chunk))


def stem(word: str) -> str:
    """Returns the word without the endings of plural, tense and adverb; equal words have equal stems."""
    for ending, rest in (("ies", "i"), ("sses", "ss"), ("ing", ""), ("edly", ""), ("ed", ""), ("ly", ""), ("es", ""), ("s", "")):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not (ending == "s" and word[-2] in "su"):
            word = word[: -len(ending)] + rest
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] in "bdgmnprt":
        word = word[:-1]
    if len(word) > 3 and word[-1] in "ey":
        return word[:-1] if word[-1] == "e" else word[:-1] + "i"
    return word


def _axes() -> dict[str, tuple[tuple[int, int], ...]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for axis, sides in enumerate(lists.OPPOSITES):
        for side, words in enumerate(sides, 1):
            for word in words:
                found.setdefault(word, []).append((axis, side))
    return {word: tuple(axes) for word, axes in found.items()}


_AXES = _axes()
_STOP_ROOTS = frozenset(stem(word) for word in lists.STOPWORDS if len(word) > 2)
_SYNONYMS = {stem(word): stem(first) for word, first in lists.SYNONYMS.items()}
OPTIONAL = frozenset(_SYNONYMS.get(stem(word), stem(word)) for word in lists.OPTIONAL)
"""Canonical words that one text may have alone."""


def _token(text: str) -> Token:
    if text in _SIGN_WORDS:
        return _word(_SIGN_WORDS[text], 0)
    if text[0] in ".!?:,;\n" and text[-1] != "=":
        return Token("stop", text, direction="", is_special=True)
    if _NUMBER.fullmatch(text):
        return Token("number", re.sub(r"[^\d.-]", "", text.replace("−", "-")), is_special=True)
    if text in lists.UNITS and not text.isalpha():
        return Token("sign", text, unit=lists.UNITS[text], is_special=True)
    if not (text[0].isalnum() or text[0] == "_" or len(text) > 1) or text[-1] in "=>":
        return Token("sign", text, is_special=True)
    plain = text.replace("’", "'").removesuffix("'s")
    if not plain.replace("'", "").isalpha() or text[0] in _QUOTES or len(text) > MAX_CACHED_CHARS:
        return Token("identifier", text.strip(_QUOTES), is_special=True)
    capitals = 0 if plain.islower() or plain == "I" else 2 if len(plain) > 1 and not plain[1:].islower() else 1
    return _word(plain.lower(), capitals, is_owner=len(plain) < len(text))


def _word(lower: str, capitals: int, *, is_owner: bool = False) -> Token:
    root = stem(lower)
    negation = lists.NEGATIONS.get(lower, "not" if lower.endswith("n't") else "")
    is_stop = lower in lists.STOPWORDS or (len(root) > 3 and root in _STOP_ROOTS) or bool(negation)
    number, unit, scope, axes = (
        lists.NUMBERS.get(lower, ""),
        lists.UNITS.get(lower, ""),
        lists.SCOPES.get(lower, ""),
        _AXES.get(lower, ()),
    )
    is_question, is_auxiliary, direction = lower in _QUESTION_WORDS, lower in lists.AUXILIARIES, _DIRECTIONS.get(lower)
    modality, light, person = lists.MODALITIES.get(lower, ""), lists.LIGHT_VERBS.get(lower, ""), lists.PERSONS.get(lower, "")
    is_past = lower.endswith("ed") and len(lower) > 4
    is_special = bool(number or unit or negation or scope or axes or is_question)
    return Token(
        "word",
        lower,
        root=root,
        content="" if is_stop or number else _SYNONYMS.get(root, root),
        capitals=capitals,
        score=-2 if lower in lists.FOREIGN or not lower.isascii() else lower in lists.STOPWORDS,
        direction="" if is_auxiliary else direction,
        tense=lists.TENSES.get(lower, ""),
        is_auxiliary=is_auxiliary,
        is_plain=not (capitals or is_auxiliary or direction or is_special or is_owner or person),
        is_special=is_special,
        is_question=is_question,
        number=number,
        unit=unit,
        negation=negation,
        scope=scope,
        modality=modality,
        light=light,
        person=person,
        is_past=is_past,
        is_owner=is_owner,
        is_clausal=bool(modality or light or person or is_past or is_auxiliary or lower == "too"),
        axes=axes,
    )
