"""Reads what the lexical guard compares from the tokens of a text: each with the few words around it that decide its meaning."""

from dataclasses import dataclass, field

from phalanx_frontend.stream import lexical_words as lists
from phalanx_frontend.stream.lexical_tokens import OPTIONAL, Token, tokens_of

MIN_ENGLISH_SHARE = 0.125
"""Least share of frequent English words, less twice the frequent foreign ones, among the tokens of an English text."""
UNIT = "°"
"""Prefix of units without a number in `Features.content`: feet in metres, metres in feet."""
PERSON = "@"
"""Prefix of persons in `Features.content`: remind me to call him, remind him to call me."""
MAX_WORDS_TO_SUBJECT = 3
"""Words from an auxiliary to the subject of a question: can the old man."""
MAX_WORDS_TO_UNIT = 2
"""Words between a number and its unit: 30 degrees Celsius."""
_BEFORE_NOUN = frozenset("is are was were the a an of best right usual current average normal typical exact".split())
_BEFORE_PARTICIPLE = frozenset("the a an be been being my your".split())
"""Words after which -ed is no past tense."""
BE = frozenset("is are was were be been".split())
_LIMITS = {"from": "since", "since": "since", "until": "until", "till": "until"}
_HAVE = frozenset("have has had".split())
_DO = frozenset("do does did".split())
_HAVE_OR_DO = _HAVE | _DO
_ASKED_THINGS = frozenset(("who", "what", "what is", "which"))
_PERMITTED = frozenset("allowed permitted able required obliged".split())
_END = Token("stop", "")
_ASKED_OF_VERBS = frozenset(("who", "why"))
"""Questions of nouns that a verb may follow: which author wrote, what causes tides."""
_DEFINITE = frozenset("my your his her its our their this that these those it".split())
"""Words that make a question of one thing, as "the" does: what is my limit, how high is it."""
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
    measures: list[tuple[str, str]] = field(default_factory=list)  # a number and its unit
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
    asked: set[str] = field(default_factory=set)  # nouns of questions: which year
    tenses: set[str] = field(default_factory=set)
    past: set[str] = field(default_factory=set)  # roots of verbs in -ed without an auxiliary
    modalities: set[str] = field(default_factory=set)
    auxiliaries: set[str] = field(default_factory=set)
    has_participle: bool = False  # a word ends in -ed
    subject: str = ""  # what follows the first auxiliary
    verb: str = ""  # after a person as the subject
    asks_agent: bool = False  # the question asks who acts: "by whom"
    light: set[str] = field(default_factory=set)  # groups of light verbs
    persons: list[str] = field(default_factory=list)  # in order of their first appearance
    counted: dict[str, str] = field(default_factory=dict)  # the word with content after a number
    number_directions: dict[str, str] = field(default_factory=dict)  # of each number, the last one
    content: dict[str, str] = field(default_factory=dict)  # canonical word and its direction, in order of appearance
    phrases: dict[str, int] = field(default_factory=dict)  # word after a preposition, and the index of that preposition

    @property
    def is_english(self) -> bool:
        """Whether the guard can judge the text."""
        return sum([token.score for token in self.tokens]) >= max(1, MIN_ENGLISH_SHARE * len(self.tokens))

    @property
    def opening(self) -> list[str]:
        """The first two tokens, or the auxiliary that starts a question: texts with equal ones keep the order of words."""
        return [token.text for token in self.tokens[: 1 if self.questions == {"whether"} else 2]]

    @property
    def asked_role(self) -> str:
        """What a question such as "which files" asks for: the subject or the object of its verb; empty if it may be both."""
        if not self.questions or not self.questions <= _ASKED_THINGS:
            return ""
        auxiliaries = self.auxiliaries
        if self.asks_agent or not auxiliaries:
            return "subject"
        is_passive = self.has_participle and not BE.isdisjoint(auxiliaries)
        return "object" if is_passive or not _DO.isdisjoint(auxiliaries) else ""

    @property
    def is_equation(self) -> bool:
        """Whether the text asks what or which thing is another one, so that both sides of "is" may change their places."""
        has_verb = not self.tenses <= {"present", "past"} or not _HAVE_OR_DO.isdisjoint([token.text for token in self.tokens])
        return bool(self.questions) and self.questions <= _ASKED_THINGS - {"who"} and not has_verb

    @property
    def is_passive(self) -> bool:
        """Whether the text may have a passive verb without an agent."""
        words = [token.text for token in self.tokens]
        is_active = not _PERMITTED.isdisjoint(words) or any([word.endswith("ing") for word in words])
        return not self.persons and not BE.isdisjoint(words) and not is_active

    @property
    def roots(self) -> set[str]:
        """All words without their endings."""
        return {token.root for token in self.tokens}


def read(text: str) -> Features:
    """Returns the features of a text, which are not to be changed, in time linear in its length."""
    features = Features(tokens_of(text))
    _Reader(features).read()
    _read_clauses(features)
    return features


def _read_clauses(features: Features) -> None:
    """Reads auxiliaries, light verbs, persons and tenses, which depend on neighbouring words, after `_Reader` read the rest."""
    tokens, questions = features.tokens, features.questions
    has_auxiliary = False
    for index, token in enumerate(tokens):
        if token.kind == "stop":
            has_auxiliary = False
        if token.number or token.kind == "number":
            features.counted[token.number or token.text] = _content(tokens[index + 1 : index + 1 + MAX_WORDS_TO_SUBJECT])
        if not token.is_clausal:
            continue
        previous = tokens[index - 1].text if index and tokens[index - 1].kind != "stop" else ""
        following = tokens[index + 1] if index + 1 < len(tokens) else _END
        features.has_participle = features.has_participle or token.is_past
        if token.is_auxiliary:
            features.auxiliaries.add(token.text)
            has_auxiliary = True
        if token.is_auxiliary and following.person and index + 2 < len(tokens) and not features.verb:
            features.verb = tokens[index + 2].light or tokens[index + 2].content
        if token.is_auxiliary and not features.subject:
            features.subject = _subject(tokens, index, previous)
        if token.is_auxiliary and not previous:
            questions.add("whether")
        if token.text in _HAVE and following.text == "to":
            features.modalities.add("must")
        if token.text == "do" and (previous in lists.PERSONS or previous == "to") and "what" in questions:
            questions.symmetric_difference_update({"what", "how"})  # "what can I do" asks how
        if previous == "who" and "who" in questions and (token.text in _DO or (token.is_auxiliary and following.person)):
            questions.symmetric_difference_update({"who", "whom"})  # "who does he call" asks for the object
        if token.light == "mean" and "what" in questions:
            questions.symmetric_difference_update({"what", "what is"})
        if token.text == "count" and previous in ("", "please"):
            questions.add("how many")
        if token.text == "too" and following.kind == "word":
            features.scopes.append("too")  # too many
        if token.is_past and not has_auxiliary and previous not in _BEFORE_PARTICIPLE:
            features.past.add(token.root)
        if token.modality:
            features.modalities.add(token.modality)
        if token.light:
            features.light.add(token.light)
        is_addressed = token.text in ("me", "us") and previous in lists.ADDRESSED
        if token.person and not is_addressed and token.person not in features.persons:
            features.persons.append(token.person)


def _subject(tokens: list[Token], index: int, previous: str) -> str:
    """Returns the person or word that an auxiliary belongs to: the one after it in a question; empty if that is not sure."""
    if previous in lists.PERSONS:
        return PERSON + lists.PERSONS[previous]
    if previous and tokens[index].text not in _DO and not tokens[index - 1].is_question:
        return ""
    return _content(tokens[index + 1 : index + 1 + MAX_WORDS_TO_SUBJECT])


def _content(tokens: list[Token]) -> str:
    """Returns the first person or word with content."""
    return next(
        (PERSON + token.person if token.person else token.content for token in tokens if token.person or token.content), ""
    )


def _is_number(tokens: list[Token], index: int) -> bool:
    return index < len(tokens) and tokens[index].kind == "number"


def _is_bound(tokens: list[Token], index: int) -> bool:
    return index < len(tokens) and tokens[index].text in ("most", "least")


class _Reader:
    """Reads tokens in order. Its state is what the meaning of the next token depends on."""

    def __init__(self, features: Features) -> None:
        self.features = features
        self._direction = ""  # of the current token
        self._number = ""  # a number whose unit may follow
        self._waited = 0  # words since that number
        self._currency = ""  # a unit whose number may follow
        self._question = ""  # question word that depends on the next word
        self._asks_directly = False  # the next word is the thing asked for: which author
        self._is_agent = False  # the question asks who acts: "by whom"
        self._is_defined = False  # the question is "what is the fee", not "what is a fee"
        self._has_noun_next = False  # the next word has content: "the price difference" asks for no price
        self._asks_time = False  # the last word is the unit of "how many days"

    def read(self) -> None:
        features, tokens = self.features, self.features.tokens
        content, names, phrases, phrase = features.content, features.names, features.phrases, 0
        last_names, has_several = set[str](), False
        is_start, direction, previous, is_waiting, has_modal, unit, before = True, "", "", False, False, "", ""
        for index, token in enumerate(tokens):
            if unit == "percent" and token.text in _CHANGES:
                features.units.add(f"percent {token.text}")
            unit = token.unit
            if token.is_plain and not is_waiting:
                if token.content and not (token.content == "number" and _is_number(tokens, index + 1)):
                    content.setdefault(token.content, direction)
                    if direction:
                        phrases.setdefault(token.content, phrase)
                is_start, previous, before = False, token.text, token.content
                continue
            if token.capitals and (not is_start or token.capitals > 1):
                names.add(token.root)
                last_names.add(token.root)
            if token.tense:
                features.tenses.add("past" if has_modal and token.text == "have" else token.tense)
            elif token.is_auxiliary:
                features.tenses.add("modal")
                has_modal = True  # should I have done it
            if token.person and not (token.text in ("me", "us") and previous in lists.ADDRESSED):
                content.setdefault(PERSON + token.person, direction)
            is_content = True
            if is_waiting or token.is_special:
                self._has_noun_next = index + 1 < len(tokens) and bool(tokens[index + 1].content)
                self._direction = direction
                is_content = self._special(token, previous, is_start)
                is_waiting = bool(self._question or self._number)
            if token.content and is_content:
                content.setdefault(token.content, "in" if token.is_owner else direction)  # China's emperor, the emperor of China
                if direction:
                    phrases.setdefault(token.content, phrase)
            if token.direction is not None and not (direction == "than" and token.direction):
                is_apposition = token.text == "of" and (before in OPTIONAL or previous == "instead")  # the city of Turin
                if not is_apposition and not (token.text == "at" and _is_bound(tokens, index + 1)):
                    direction, phrase = token.direction, index  # faster in water than in air: compared words stay so
            before = token.content
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
        is_asked = self._asks(token, previous, is_head=is_start or not previous or previous in lists.STOPWORDS)
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
            self.features.number_directions[token.text] = self._direction
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
        self.features.number_directions[number] = self._direction
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
        elif not is_thing and unit not in self.features.asked_units:
            self.features.content.setdefault(UNIT + unit, "in" if self._direction == "to" else self._direction)
        self.features.units.add(unit)
        return is_thing

    def _unit_of_number(self, unit: str) -> None:
        self.features.measures.append((self._number, unit))
        self._number = ""

    def _asks(self, token: Token, previous: str, *, is_head: bool) -> bool:
        """Follows questions. Returns whether the word became part of one, such as "deep" of "how deep"."""
        self._asks_time = False
        if not token.is_question:
            is_thing = self._question in ("what", "which")
            is_part = bool(self._question) and self._end_question(token.text)
            if is_part and is_thing and token.content:
                self.features.asked.add(token.content)
            return is_part
        self._end_question("")
        self._is_defined, self._is_agent = False, previous == "by"
        self.features.asks_agent = self.features.asks_agent or self._is_agent
        if previous in _LIMITS and (token.text == "when" or _LIMITS[previous] == "until"):
            self.features.scopes.append(_LIMITS[previous])
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
                self._question = question  # depends on the noun: "how many days" is "how long"
                return True
        elif question == "how many":
            self._asks_time = lists.UNITS.get(follower) in lists.TIMES
            self.features.asked_units |= {lists.UNITS[follower]} if follower in lists.UNITS else set()
            question = "how long" if self._asks_time else "how much" if follower in lists.UNITS else question
        elif question in ("what", "which"):
            if follower in _BEFORE_NOUN:
                self._question, self._asks_directly = question, False
                self._is_defined = self._is_defined or follower == "the"
                return False
            found = lists.ASKED.get(follower, "")
            if self._has_noun_next and found not in _ASKED_OF_VERBS:
                found = ""
            is_choice = self._asks_directly and follower and follower not in lists.STOPWORDS
            is_definition = follower and not self._asks_directly and not self._is_defined and follower not in _DEFINITE
            question = found or ("which" if is_choice else "what is" if is_definition else "what")
        elif question in ("when", "where") and follower not in lists.AUXILIARIES:
            return False  # a conjunction
        elif question == "whose":
            question = "who"
        elif question == "whom" and self._is_agent:
            question = "who"  # "by whom is it called" has the subject of "who calls it"
        if question:
            self.features.questions.add(question)
        return bool(found) and follower != "deadline"
