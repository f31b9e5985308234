"""The one wording of an English text, which it shares with texts that say the same.

Two texts have one wording only if a closed list of rules makes them equal, word by word and in order: all that no rule covers is
a difference. A rule replaces a word by one of the same meaning, number and tense, a phrase by a shorter one, or moves a part of a
sentence that English may have in two places.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from phalanx_frontend.stream import lexical_words as lists
from phalanx_frontend.stream.lexical_rewrites import rewritten
from phalanx_frontend.stream.lexical_tokens import NUMBER, PLURAL, UNIT, Token, tokens_of

MIN_ENGLISH_SHARE = 0.125
"""Least share of frequent English words, less twice the frequent foreign ones, among the tokens of an English text."""
END = "."
"""Between sentences, in words."""
COMMA = ","
_TENS = frozenset(f"{NUMBER}{tens}0" for tens in range(2, 10))
_INDEFINITE = ("a", "an")
_LETTER_A = "A"
"""No article: vitamin A."""
_FEW = ("few", "little")
"""Words that mean less without an article: a few, few."""
_VERBS_OF_RESULTS = frozenset(("calculate", "compute", "out"))
_BEFORE_ARTICLES = _VERBS_OF_RESULTS | {"is", "was"}
_WORD = re.compile(r"\w+(?:['’]\w+)*")
_INNER_SIGNS = re.compile(r"[!?](?<=\S[!?])[!?]*(?=\s+[a-z])")
_ASCII_WORDS = {code: " " for code in range(128) if not (chr(code).isalnum() or chr(code) == "_")}


class _Node:
    """Words that may continue a phrase."""

    __slots__ = ("after", "short")

    def __init__(self) -> None:
        self.after: dict[str, _Node] = {}
        self.short: tuple[str, ...] | None = None  # of the phrase that ends here


@dataclass(frozen=True)  # without slots: `cached_property` needs `__dict__`
class Wording:
    """What two texts have in common if they say the same."""

    text: str
    tokens: list[Token]  # up to a colon or the end of the first line
    words: list[str]
    quoted: str  # the rest, which is compared as it is
    powers: frozenset[str]  # "able", "allowed"
    is_lower: bool  # no capital letter
    is_about_words: bool  # whose sound or letters synonyms do not share

    @cached_property
    def is_english(self) -> bool:
        """Whether the rules apply to the text."""
        return sum([token.score for token in self.tokens]) >= max(1, MIN_ENGLISH_SHARE * len(self.tokens))

    @cached_property
    def names(self) -> set[str]:
        """Words with a capital letter inside of a sentence."""
        return {token.words[0] for before, token in pairwise(self.tokens) if token.has_capital and before.kind != "stop"}

    @cached_property
    def cases(self) -> dict[str, set[bool]]:
        """Words inside of a sentence, and whether they have a capital letter; empty for texts without any."""
        found = dict[str, set[bool]]()
        if not self.is_lower:
            for before, token in pairwise(self.tokens):
                if not (before.kind == "stop" and before.words[0] == END) and token.words[0] != "i":
                    found.setdefault(token.words[0], set()).add(token.has_capital)
        return found

    @cached_property
    def definite(self) -> dict[str, bool]:
        """Words after an article, and whether that is "the" or "my"."""
        return {
            token.words[0]: before.words[0] not in _INDEFINITE
            for before, token in pairwise(self.tokens)
            if before.kind == "article"
        }

    @cached_property
    def replaced(self) -> list[str]:
        """Words that rules replace or leave out."""
        return [word for word in lower_words(self.text) if word in lists.REPLACED or not word.isalnum()]

    @cached_property
    def synonyms(self) -> list[str]:
        """Words that have synonyms, if the text may be about them: it names a language, or two that have one wording."""
        words = lower_words(self.text)
        found, wordings = [word for word in words if word in lists.SYNONYMS], dict[str, str]()
        has_pair = any([wordings.setdefault(lists.SYNONYMS[word], word) != word for word in found])
        return found if has_pair or not lists.ABOUT_SYNONYMS.isdisjoint(words) else []

    @cached_property
    def inner_signs(self) -> list[str]:
        """Signs at the end of a word that end no sentence."""
        return _INNER_SIGNS.findall(self.text)


def lower_words(text: str) -> list[str]:
    """Returns the words of a text in lower case, with the apostrophes in them."""
    lower = text.lower()
    if lower.isascii() and "'" not in lower:
        return lower.translate(_ASCII_WORDS).split()  # the same in a fourth of the time
    return _WORD.findall(lower)


def read(text: str) -> Wording:
    """Returns the wording of a text, which is not to be changed, in time linear in its length."""
    head, quoted = _parted(text.strip())
    tokens = tokens_of(head)
    plain = _words_of(tokens)
    words = list[str]()
    for sentence in _sentences(_with_short_phrases(plain)):
        words += rewritten(sentence)
        words.append(END)
    powers = frozenset([lists.POWERS[word] for word in lists.POWERS.keys() & plain])
    is_about_words = not lists.ABOUT_WORDS.isdisjoint(plain)
    return Wording(
        text=text,
        tokens=tokens,
        words=words,
        quoted=quoted,
        powers=powers,
        is_lower=head.islower(),
        is_about_words=is_about_words,
    )


def _parted(text: str) -> tuple[str, str]:
    """Returns the text up to a colon before a space or up to the end of the first line, and the rest, with its lines and their
    indents, which matter in code, and otherwise single spaces."""
    ends = [end for end in (text.find(": "), text.find("\n")) if end >= 0]
    if not ends:
        return text, ""
    at = min(ends)
    rest = text[at + 1 :] if text[at] == "\n" else text[at + 1 :].lstrip(" ")
    lines = rest.split("\n")
    return text[:at], "\n".join([line[: len(line) - len(line.lstrip())] + " ".join(line.split()) for line in lines])


def _words_of(tokens: list[Token]) -> list[str]:
    """Returns the words of all tokens in order."""
    words = list[str]()
    currency, article_at = "", -1  # `article_at`: the index of the word after an article that was left out
    for token in tokens:
        kind = token.kind
        if currency and kind != "number":
            words.append(currency)
            currency = ""
        if article_at == len(words) and _has_other_sense(token.words[0], words):
            words.append("the")
        if kind == "word":
            words += token.words
        elif kind == "article":
            article_at = len(words)
            if token.has_capital and token.words[0] == "a" and words and words[-1] not in (END, COMMA):
                words.append(_LETTER_A)
            elif words and words[-1] in _BEFORE_ARTICLES and _is_defining(words):
                words.append("a" if token.words[0] in _INDEFINITE else "the")
        elif kind == "currency" and not (words and words[-1][0] == NUMBER):
            currency = token.words[0]
        elif kind == "depends":
            if token.words[0] in _FEW and article_at == len(words):
                words.append("a")
            words.append(_in_context(token.words[0], words))
        else:
            words += token.words
            if currency:
                words.append(currency)  # $20, 20 dollars
                currency = ""
    return [*words, currency] if currency else words


def _has_other_sense(word: str, words: list[str]) -> bool:
    """Returns whether a word after the others and an article means something else without that article."""
    return word in lists.SUPERLATIVES or (word in lists.ARTICLE_MATTERS and bool(words) and words[-1] in lists.PREPOSITIONS)


def _is_defining(words: list[str]) -> bool:
    """Returns whether an article matters after these words: what is a deposit, what is the deposit."""
    return words[-1] in _VERBS_OF_RESULTS or words[-2:-1] in (["what"], ["who"]) or words[-3:-2] == ["how"]


def _in_context(word: str, words: list[str]) -> str:
    """Returns what a word means after the others, of which it may change the last one."""
    before = words[-1] if words else END
    if word == "#1" and before in _TENS:
        words.pop()
        return before[:-1] + "1"
    if word[0] == UNIT:
        return word.removesuffix(PLURAL) if before[0] == NUMBER else word
    if word in lists.SHORT_UNITS and (before[0] == NUMBER or before.startswith(UNIT + "degree")):
        return UNIT + lists.SHORT_UNITS[word]
    if word == "which":
        return "what" if before in (END, COMMA) or before in lists.PREPOSITIONS else "that"
    return word


def _tree(phrases: Mapping[tuple[str, ...], tuple[str, ...]]) -> dict[str, _Node]:
    """Returns the phrases by their first words."""
    root = _Node()
    for phrase, short in phrases.items():
        node = root
        for word in phrase:
            node = node.after.setdefault(word, _Node())
        node.short = short
    return root.after


_ANYWHERE, _AT_START = _tree(lists.PHRASES), _tree({**lists.PHRASES, **lists.OPENINGS})


def _with_short_phrases(words: list[str]) -> list[str]:
    """Returns the words with each phrase, the longest first, in its shortest form."""
    short = list[str]()
    get, get_at_start = _ANYWHERE.get, _AT_START.get
    index, end, is_start = 0, len(words), True
    while index < end:
        word = words[index]
        index += 1
        node = (get_at_start if is_start else get)(word)
        if node is None:
            short.append(word)
            is_start = word == END or word == COMMA
            continue
        ahead = index
        found: tuple[str, ...] = (word,)
        while node is not None:
            if node.short is not None:
                found, index = node.short, ahead
            node = node.after.get(words[ahead]) if ahead < end else None
            ahead += 1
        short += found
        is_start = is_start and not found
    return short


def _sentences(words: list[str]) -> Iterator[list[str]]:
    """Yields the words of each sentence, without commas at its start and "please" at its end."""
    start = 0
    while start < len(words):
        try:
            end = words.index(END, start)
        except ValueError:
            end = len(words)
        first = start
        while first < end and words[first] == COMMA:
            first += 1
        if first < end:
            yield words[first : end - 2 if words[end - 2 : end] == [COMMA, "please"] else end]
        start = end + 1
