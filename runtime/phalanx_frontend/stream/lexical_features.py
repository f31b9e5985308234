"""Reads what the lexical guard compares from the tokens of a text: each with the few words around it that decide its meaning."""

from dataclasses import dataclass, field
from functools import lru_cache

from phalanx_frontend.stream import lexical_words as lists
from phalanx_frontend.stream.lexical_tokens import Token, tokens_of

MIN_ENGLISH_SHARE = 0.125
"""Share of frequent English words, less twice the foreign ones, among the tokens of a text that is taken for English."""
KEPT_TEXTS = 16
"""Texts whose features are kept: a question is compared with several stored ones, and a stored one with many."""
MAX_WORDS_TO_UNIT = 2
"""Words between a number and its unit: 30 degrees Celsius."""
_BEFORE_NOUN = frozenset("is are was were the a an of best right usual current average normal typical exact".split())
_ASKED_OF_VERBS = frozenset(("who", "why"))
"""Questions of nouns that a verb may follow: which author wrote, what causes tides."""
_NOT_ONE = frozenset("which this that each no any every the another".split())
_CHANGES = frozenset("more less off above below higher lower extra".split())
"""Words after a percentage that is not one of a whole: 20 % more than 350."""
_CURRENCY_WORDS = frozenset("dollar euro sterling yen franc rupee".split())
"""Without a number they are things: the dollar gains against the euro."""
_CURRENCIES = frozenset("$€£¥₹")
_MULTIPLES_OF_TEN = frozenset(str(number) for number in range(20, 100, 10))


@dataclass(slots=True)
class Features:
    """What the guard compares of a text."""

    tokens: list[Token]
    numbers: list[str] = field(default_factory=list)
    measures: set[tuple[str, str]] = field(default_factory=set)  # a number and its unit
    units: set[str] = field(default_factory=set)
    asked_units: set[str] = field(default_factory=set)  # of "how many days"
    names: set[str] = field(default_factory=set)
    asked_names: set[str] = field(default_factory=set)  # in the last of several sentences
    identifiers: list[str] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)
    negations: list[str] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    axes: dict[int, int] = field(default_factory=dict)  # sides of each axis of opposites, 3 for both
    first_sides: dict[int, int] = field(default_factory=dict)  # of each axis, the side that appears first
    questions: set[str] = field(default_factory=set)
    tenses: set[str] = field(default_factory=set)
    content: dict[str, str] = field(default_factory=dict)  # canonical word and its direction, in order of appearance

    @property
    def is_english(self) -> bool:
        """Whether the guard can judge the text."""
        return sum([token.score for token in self.tokens]) >= max(1, MIN_ENGLISH_SHARE * len(self.tokens))

    @property
    def opening(self) -> list[str]:
        """The first two tokens, or the auxiliary that starts a question: texts with equal ones keep the order of words."""
        return [token.text for token in self.tokens[: 1 if self.questions == {"whether"} else 2]]

    @property
    def roots(self) -> set[str]:
        """All words without their endings."""
        return {token.root for token in self.tokens}


@lru_cache(KEPT_TEXTS)
def read(text: str) -> Features:
    """Returns the features of a text, which are not to be changed, in time linear in its length."""
    tokens = tokens_of(text)
    reader = _Reader(tokens)
    reader.read(tokens)
    return reader.features


def _is_number(tokens: list[Token], index: int) -> bool:
    return index < len(tokens) and tokens[index].kind == "number"


class _Reader:
    """Reads tokens in order. State: what the next token depends on."""

    def __init__(self, tokens: list[Token]) -> None:
        self.features = Features(tokens)
        self._number = ""  # that waits for its unit
        self._waited = 0  # words since then
        self._currency = ""  # a unit that waits for its number
        self._question = ""  # question word that waits for the next word
        self._asks_directly = False  # the question word's next word is what it asks for: which author
        self._has_noun_next = False  # the next word has content: the price difference is no price
        self._asks_time = False  # the last word is the unit of "how many days"

    def read(self, tokens: list[Token]) -> None:
        features = self.features
        content, names = features.content, features.names
        last_names, has_several = set[str](), False
        is_start, direction, previous, is_waiting, has_modal, unit = True, "", "", False, False, ""
        for index, token in enumerate(tokens):
            if unit == "percent" and token.text in _CHANGES:
                features.units.add(f"percent {token.text}")
            unit = token.unit
            if token.is_plain and not is_waiting:
                if token.content and not (token.content == "number" and _is_number(tokens, index + 1)):
                    content.setdefault(token.content, direction)
                is_start, previous = False, token.text
                continue
            if token.capitals and (not is_start or token.capitals > 1):
                names.add(token.root)
                last_names.add(token.root)
            if token.tense:
                features.tenses.add("past" if has_modal and token.text == "have" else token.tense)
            elif token.is_auxiliary:
                features.tenses.add("modal")
                has_modal = True  # should I have done it
            if token.is_auxiliary and is_start:
                features.questions.add("whether")
            is_content = True
            if is_waiting or token.is_special:
                self._has_noun_next = index + 1 < len(tokens) and bool(tokens[index + 1].content)
                is_content = self._special(token, previous, is_start)
                is_waiting = bool(self._question or self._number)
            if token.content and is_content:
                content.setdefault(token.content, direction)
            if token.direction is not None and not (direction == "than" and token.direction):
                direction = token.direction  # faster in water than in air: compared words stay so after a preposition
            if token.kind == "stop":
                is_start, previous = is_start or token.text[-1] in ".!?:\n", ""
                if is_start and index + 1 < len(tokens):
                    last_names, has_several = set[str](), True
            else:
                is_start, previous = False, token.text
        self._end_question("")
        features.asked_names = last_names if has_several else set()

    def _special(self, token: Token, previous: str, is_start: bool) -> bool:
        """Reads a token that matters beyond its content, or that another one waits for. Returns whether it is content too."""
        if token.kind != "word":
            self._other(token)
            return False
        is_asked = self._asks(token, is_head=is_start or not previous or previous in lists.STOPWORDS)
        features = self.features
        if token.negation:
            features.negations.append(token.negation)
        if token.scope:
            features.scopes.append(token.scope)
        for axis, side in token.axes:
            features.axes[axis] = features.axes.get(axis, 0) | side
            features.first_sides.setdefault(axis, side)
        if token.number:
            if token.number != "1" or token.text != "one" or previous not in _NOT_ONE:
                self._number_word(token.number)
            return False
        if token.unit or self._number:
            return self._unit(token, previous) and not is_asked
        return not is_asked

    def _other(self, token: Token) -> None:
        self._end_question("")
        if token.kind == "number":
            self.features.numbers.append(token.text)
            self._number, self._waited = token.text, 0
            if self._currency:
                self._unit_of_number(self._currency)
                self._currency = ""
        elif token.text in _CURRENCIES:
            self._currency = token.unit
            self.features.units.add(token.unit)
        elif token.kind == "identifier":
            self.features.identifiers.append(token.text)
        elif token.unit:
            self._unit(token, "")
        elif token.kind == "sign":
            self.features.signs.append(token.text)

    def _number_word(self, number: str) -> None:
        numbers = self.features.numbers
        if self._number in _MULTIPLES_OF_TEN and self._waited == 0 and len(number) == 1:
            self._number = numbers[-1] = self._number[0] + number
            return
        numbers.append(number)
        self._number, self._waited = number, 0

    def _unit(self, token: Token, previous: str) -> bool:
        """Joins a unit to the number before it, else records it alone, a time as a word. Returns whether it is a word."""
        unit = token.unit
        if not unit and (self._waited == 0 or previous.startswith("degree") or previous == "°"):
            unit = lists.SHORT_UNITS.get(token.text, "")
        if not unit or unit == "degree":
            self._waited += unit != "degree"
            if self._waited > MAX_WORDS_TO_UNIT:
                self._number = ""
            return not unit
        is_thing = unit in _CURRENCY_WORDS and not self._number
        if self._number:
            self._unit_of_number(unit)
        elif unit in lists.TIMES:
            return not self._asks_time
        self.features.units.add(unit)
        return is_thing

    def _unit_of_number(self, unit: str) -> None:
        self.features.measures.add((self._number, unit))
        self._number = ""

    def _asks(self, token: Token, *, is_head: bool) -> bool:
        """Follows questions. Returns whether the word became part of one, such as "deep" of "how deep"."""
        self._asks_time = False
        if not token.is_question:
            return bool(self._question) and self._end_question(token.text)
        self._end_question("")
        self._question, self._asks_directly = token.text if is_head or token.text in ("why", "how", "what") else "", True
        return False

    def _end_question(self, follower: str) -> bool:
        """Records the question of a question word by the word that follows it. Returns whether that is a part of it."""
        question, self._question = self._question, ""
        found = ""
        if question == "how":
            found = lists.DEGREES.get(follower, "")
            question = f"how {found}" if found else "how"
            if found == "many":
                self._question = question  # waits for the noun: how many days is how long
                return True
        elif question == "how many":
            self._asks_time = lists.UNITS.get(follower) in lists.TIMES
            self.features.asked_units |= {lists.UNITS[follower]} if follower in lists.UNITS else set()
            question = "how long" if self._asks_time else "how much" if follower in lists.UNITS else question
        elif question in ("what", "which"):
            if follower in _BEFORE_NOUN:
                self._question, self._asks_directly = question, False
                return False
            found = lists.ASKED.get(follower, "")
            if self._has_noun_next and found not in _ASKED_OF_VERBS:
                found = ""
            is_choice = self._asks_directly and follower and follower not in lists.STOPWORDS
            question = found or ("which" if is_choice else "what")
        elif question in ("when", "where") and follower not in lists.AUXILIARIES:
            return False  # a conjunction
        elif question == "whose":
            question = "who"
        if question:
            self.features.questions.add(question)
        return bool(found) and follower != "deadline"
