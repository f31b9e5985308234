"""Tokens of an English text, each with the words that it contributes to the comparison of two texts."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from phalanx_frontend.stream import lexical_words as lists

MAX_CACHED = 8192
"""Entries of each cache: of tokens, and of texts between spaces."""
MAX_CACHED_CHARS = 40
"""Longest text of an entry."""
UNIT = "°"
"""Prefix of units."""
PLURAL = "s"
"""After units without a number: which months."""
NUMBER = "#"
"""Prefix of numbers."""

Kind = Literal["word", "number", "currency", "article", "depends", "identifier", "stop"]

_TOKEN = re.compile(
    r"""((?<=\S)[.!?:,;]+(?=\s|\Z)|\n+)
    |("[^"]+"|`[^`]+`|“[^“”]+”|«[^«»]+»|(?<!\w)'[^'\n]+'(?!\w)
    |\w+://\S*[\w/]|[\w.+-]{1,64}@[\w.-]+\w|(?<!\S)[~.]{0,2}(?:/[\w.-]+)+/?|(?<!\S)--?[A-Za-z][\w-]*
    |(?:(?<![\w)\].%])[-−])?(?<![^\W\d])(?:\d{1,3}(?:[,'’_\u00a0\u202f]\d{3})+(?!\d)|\d+)(?:\.\d+)*(?:!+(?!=))?
    |(?<!\w)[A-Za-z]!+(?!=)|[()]!*
    |\w+(?:['’]\w+)*(?:\.\w+)*
    |[!=<>]=+|[-=]>
    |[.!?:,;]+
    |(?<=[\w)\]])['’"”]+
    |(?<![^\W\d_]{2})-|-(?![^\W\d_]{2})|(?<=\w)(?:(?<![^\W\d_]{2})–|–(?![^\W\d_]{2}))(?=\w)
    |[^\w\s\-–—…'’‘"“”«»`])""",
    re.VERBOSE,
)
"""A stop, or another token. Signs that end no word are no stop: `?.`, `../`. A quotation mark after a word is a prime: 5', f"."""
_APOSTROPHE = re.compile(r"(?<!\w)'")
_NUMBER = re.compile(r"[-−]?\d[\d,.'’_\u00a0\u202f]*")
_SIGN_WORDS = {"+": "plus", "-": "minus", "−": "minus", "–": "minus"}
_QUOTES = "\"`'“”«»"
_CURRENCIES = frozenset("$€£¥₹")
_CAPITAL_MATTERS = frozenset("Kb Mb Gb Tb mW MW mV MV mA MA mJ MJ mN MN mPa MPa mHz MHz M G S H".split())
"""Units with a capital letter that matters: Mb, MB; mW, MW; 5 G, 5 g."""
_DEPENDS = frozenset(("which", "few", "little", "#1", *lists.SHORT_UNITS))
_OWNERS_WITH_IS = frozenset("what it that there who how where here he she when".split())
"""Words with 's that are no possessives: what's."""
_ENDINGS = {"re": "is", "m": "is", "ve": "has", "ll": "will"}
_CONTRACTIONS = {
    "can't": ("can", "not"),
    "cannot": ("can", "not"),
    "won't": ("will", "not"),
    "shan't": ("shall", "not"),
}


@dataclass(frozen=True, slots=True)
class Token:
    """What one token contributes."""

    kind: Kind  # "depends": on the word before it
    words: tuple[str, ...]
    score: int = 0  # 1 for a frequent English word, -2 for a frequent foreign one
    has_capital: bool = False


_STOPS, _FULL_STOP = {sign: Token("stop", (sign,)) for sign in ":,"}, Token("stop", (".",))


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
    return [_STOPS.get(stop, _FULL_STOP) if stop else _token(other) for stop, other in _TOKEN.findall(text)]


def _scanned(text: str) -> list[Token]:
    return [
        _STOPS.get(stop, _FULL_STOP) if stop else _cached_token(other) if len(other) <= MAX_CACHED_CHARS else _token(other)
        for stop, other in _TOKEN.findall(text)
    ]


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


def _token(text: str) -> Token:
    if text in _SIGN_WORDS:
        return Token("word", (_SIGN_WORDS[text],))
    if text[0] in ".!?:,;" and text[-1] != "=":
        return Token("identifier", (f"`{text}`",))  # other than the words of stops
    if _NUMBER.fullmatch(text):
        return Token("number", (NUMBER + re.sub(r"[^\d.-]", "", text.replace("−", "-")),))
    if text in lists.UNITS and not text.isalpha():
        return Token("currency" if text in _CURRENCIES else "word", (UNIT + lists.UNITS[text],))
    plain = text.replace("’", "'").removesuffix("'s")
    is_word = plain.replace("'", "").isalpha() and text[0] not in _QUOTES
    if not is_word or len(text) > MAX_CACHED_CHARS or text in _CAPITAL_MATTERS:
        return Token("identifier", (text.strip(_QUOTES) or text,))
    return _word(plain, is_owner=len(plain) < len(text))


def _word(text: str, *, is_owner: bool) -> Token:
    lower = text.lower()
    is_frequent = lower in lists.STOPWORDS
    score = -2 if lower in lists.FOREIGN or not lower.isascii() else int(is_frequent)
    has_capital = lower not in (text, "i")
    if is_frequent and len(text) > 1 and text.isupper():
        return Token("identifier", (text,), score, has_capital)  # US and us, IT and it
    words = _CONTRACTIONS.get(lower) or _parts(lower)
    if is_owner:
        words += ("is",) if lower in _OWNERS_WITH_IS else ("'s",)
    kind: Kind = "article" if lower in lists.LEFT_OUT else "depends" if words[0] in _DEPENDS or lower in lists.PLURALS else "word"
    return Token(kind, words, score, has_capital)


def _parts(lower: str) -> tuple[str, ...]:
    """Returns the words of a word in lower case, which may be a contraction."""
    head, _, ending = lower.rpartition("'")
    if ending == "t" and head.endswith("n"):
        return (lists.EQUALS.get(head[:-1], head[:-1]), "not")
    if head and ending in _ENDINGS:
        return (head, _ENDINGS[ending])
    if lower in lists.NUMBERS:
        return (NUMBER + lists.NUMBERS[lower],)
    if lower in lists.UNITS:
        return (UNIT + lists.UNITS[lower] + (PLURAL if lower in lists.PLURALS else ""),)
    return (lists.EQUALS.get(lower, lower),)
