"""Decides from words alone that two texts need different answers, whatever their embeddings say.

Embeddings hardly separate "15 % of 80" from "80 % of 15". The guard reads features of both texts and compares numbers and units,
names, identifiers and quotations, negations, opposites, quantifiers, question words, what is possible or required, tense,
prepositions, the order of words, and the words left over. A false alarm costs a computation, a miss costs a wrong answer, so
doubt is a difference: texts that are not English must be equal except for capitals and spaces, and long ones equal.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from phalanx_frontend.stream.lexical_features import BE, PERSON, UNIT, Features, read
from phalanx_frontend.stream.lexical_tokens import OPTIONAL, forget_tokens

Values = Literal["numbers", "units", "identifiers", "names"]
Logic = Literal["negation", "scope", "polarity"]
Meaning = Literal["question", "modality", "tense", "order", "words"]
Difference = Literal["length", "language"] | Values | Logic | Meaning
MAX_CHARS = 4000
"""Longer texts are alike only if they are equal."""
KEPT_TEXTS = 16
"""Number of texts whose features a `LexicalGuard` keeps."""
_BOTH_SIDES = 3
_LIKE_WHAT = ({"what", "how much", "how tall"}, {"what", "what is", "which"})
"""Questions of each set may have one answer: what is the fee, how high is the fee."""
_NEVER_REQUESTED = frozenset(("who", "when", "where", "why", "how"))
"""Questions that differ from each text without a question, such as a request or a statement."""
_LOST = frozenset(("", "in", "to", "for", "as", "by"))
"""Prepositions that a paraphrase may leave out, and "" for none. "From" and "than" are not among them."""
_MARKS = UNIT + PERSON
_DUTIES = frozenset(("should", "must"))


class LexicalGuard:
    """Compares as `differs` does, and keeps the features of `KEPT_TEXTS`: one question is compared with several stored ones."""

    def __init__(self) -> None:
        self._read = lru_cache(KEPT_TEXTS)(read)

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

    Symmetric; None for equal texts. Pure, except for a bounded cache of words; time is linear in the length of the texts, except
    for sorting.
    """
    return _difference(asked, stored, read)


def _difference(asked: str, stored: str, read: Callable[[str], Features]) -> Difference | None:
    if asked == stored:
        return None
    if len(asked) > MAX_CHARS or len(stored) > MAX_CHARS:
        return "length"
    first, second = read(asked), read(stored)
    if not (first.is_english and second.is_english):
        return None if asked.casefold().split() == stored.casefold().split() else "language"
    return _values(first, second) or _logic(first, second) or _meaning(first, second)


def _values(first: Features, second: Features) -> Values | None:
    """Compares numbers, units, identifiers and names."""
    if first.numbers != second.numbers and not _may_be_reordered(first, second):
        return "numbers"
    if first.units != second.units or (first.measures != second.measures and not _may_be_reordered(first, second)):
        return "units"
    if first.asked_units and second.asked_units and first.asked_units != second.asked_units:
        return "units"
    if first.identifiers != second.identifiers or first.signs != second.signs:
        return "identifiers"
    if first.asked_names and second.asked_names and first.asked_names != second.asked_names:
        return "names"
    if first.names != second.names and not (first.names <= second.roots and second.names <= first.roots):
        return "names"
    return None


def _may_be_reordered(first: Features, second: Features) -> bool:
    """Returns whether both texts have the same numbers, with a unit of its own for each: 4% for 3 years, 3 years at 4%."""
    if sorted(first.numbers) != sorted(second.numbers) or sorted(first.measures) != sorted(second.measures):
        return False
    count = len(first.measures)
    return len(set(first.numbers)) == len(first.numbers) == len({unit for _, unit in first.measures}) == count


def _logic(first: Features, second: Features) -> Logic | None:
    """Compares negations, quantifiers and opposites."""
    if first.negations != second.negations:
        return "negation"
    if sorted(first.scopes) != sorted(second.scopes):
        return "scope"
    if any(side != second.axes.get(axis, side) for axis, side in first.axes.items()):
        return "polarity"
    return None


def _meaning(first: Features, second: Features) -> Meaning | None:
    """Compares questions, modality, tense, roles, the order of words, and the words left over."""
    if _questions_differ(first.questions, second.questions) or _differ(first.asked, second.asked):
        return "question"
    if {first.asked_role, second.asked_role} == {"subject", "object"}:
        return "question"  # which files changed, which files did I change
    if _modalities_differ(first, second):
        return "modality"
    if _tenses_differ(first, second):
        return "tense"
    if _roles_differ(first, second) or _order_differs(first, second):
        return "order"
    more, fewer = _words_only_in(first.content, second.content), _words_only_in(second.content, first.content)
    if (more and fewer) or not OPTIONAL.issuperset(more or fewer):
        return "words"
    if first.verb and second.verb and first.verb != second.verb:
        return "words"  # how do I find the pod that mounts it, how do I mount it
    one, other = first.light - second.light, second.light - first.light
    is_statement = not (first.questions or second.questions)
    return "words" if (one and other) or (is_statement and (one or other)) else None  # use it, make it


def _words_only_in(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [word for word in one if word not in other and word[0] not in _MARKS]


def _differ(one: set[str], other: set[str]) -> bool:
    """Returns whether both sets have words, and none in common."""
    return bool(one and other) and one.isdisjoint(other)


def _questions_differ(first: set[str], second: set[str]) -> bool:
    """Returns whether both texts ask, but for different things, or only one asks, and with a word of `_NEVER_REQUESTED`."""
    if not (first and second):
        return not _NEVER_REQUESTED.isdisjoint(first | second)
    if {"which", "how"} <= first ^ second and "how" not in first & second:
        return True  # which animal builds dams, how does an animal build dams
    changed = first ^ second
    return bool(changed) and not any([changed <= alike for alike in _LIKE_WHAT])


def _modalities_differ(first: Features, second: Features) -> bool:
    """Returns whether one text is about what is possible, the other about what is required. "How" asks for either."""
    one, other = first.modalities, second.modalities
    if "how" in first.questions | second.questions or one & other:
        return False
    if "why" in first.questions & second.questions:
        return one != other
    is_whether = first.questions == second.questions == {"whether"}
    if _differ(one, other):
        return is_whether or {"can", "must"} <= one | other
    is_mine = "i" in first.persons and "i" in second.persons  # do I take it, should I take it
    return is_whether and not is_mine and not _DUTIES.isdisjoint(one | other)


def _tenses_differ(first: Features, second: Features) -> bool:
    """Returns whether one text is about the past: by its auxiliaries, or by a verb that the other one has in the present."""
    changed = first.tenses ^ second.tenses if first.tenses and second.tenses else set[str]()
    if "past" in changed or "future" in changed:
        return True
    for text, request in ((first, second), (second, first)):
        if "past" in text.tenses and not request.questions and not request.tenses:
            return True  # what was it, name it
    return _is_past_of(first, second) or _is_past_of(second, first)


def _is_past_of(past: Features, present: Features) -> bool:
    if not past.past or "past" in present.tenses:
        return False
    return not past.past.isdisjoint([token.root for token in present.tokens if not token.is_past])


def _roles_differ(first: Features, second: Features) -> bool:
    """Returns whether shared words, numbers or persons change their roles: from A to B, from B to A.

    A word may gain or lose a preposition of `_LOST`, unless another word changes the other way.
    """
    both = [axis for axis, sides in first.axes.items() if sides == second.axes.get(axis) == _BOTH_SIDES]
    if any([first.first_sides[axis] != second.first_sides[axis] for axis in both]):
        return True
    if _persons_differ(first, second) or _subjects_differ(first, second) or _is_offer(first, second) or _is_offer(second, first):
        return True
    if any([_is_other(word, second.counted.get(number, word), second, first) for number, word in first.counted.items()]):
        return True  # two functions return a value, a function returns two values
    numbers, others = first.number_directions, second.number_directions
    moved = {(numbers[number], others[number]) for number in numbers if number in others}
    if any([_excludes(here, there, is_number=True) for here, there in moved]):
        return True
    changed = {(here, second.content[word]) for word, here in first.content.items() if second.content.get(word, here) != here}
    if any([_excludes(here, there) or (there, here) in changed for here, there in changed]):
        return True
    return _has_attribute(first, second.content) or _has_attribute(second, first.content)


def _has_attribute(text: Features, other: dict[str, str]) -> bool:
    """Returns whether a word describes one after a preposition in `text` alone: in the old folder, old files in the folder."""
    described = set[int]()
    for word, phrase in text.phrases.items():
        here, there = text.content[word], other.get(word)
        if there == "" and here:
            described.add(phrase)
        elif here and there == here and phrase in described:
            return True
    return False


def _persons_differ(first: Features, second: Features) -> bool:
    """Returns whether other persons act, or the same ones in other roles: can I call you, can you call me."""
    one, other = first.persons, second.persons
    is_anyone = "how" in first.questions & second.questions and len(one) == len(other) == 1  # how do I, how do they
    shared = [person for person in one if person in other]
    return bool(one and other) and not is_anyone and (not shared or shared != [person for person in other if person in one])


def _is_other(here: str, there: str, second: Features, first: Features) -> bool:
    """Returns whether a number counts different things, and each text has both."""
    return here != there and here in second.content and there in first.content


def _subjects_differ(first: Features, second: Features) -> bool:
    """Returns whether the subject of one text has another role in the other: how do I call the doctor, how does he call me."""
    one, other = first.subject, second.subject
    if one == other:
        return False
    if one and other and not (first.is_passive or second.is_passive):
        return one in second.content or other in first.content
    return second.content.get(one, "") not in ("", "in", "by") or first.content.get(other, "") not in ("", "in", "by")


def _is_offer(first: Features, second: Features) -> bool:
    """Returns whether one text asks whether someone other than the reader does what the other text requests."""
    is_request = not (second.questions or second.tenses)
    return is_request and first.questions == {"whether"} and first.subject[:1] == PERSON and first.subject != PERSON + "you"


def _excludes(here: str, there: str, *, is_number: bool = False) -> bool:
    """Returns whether a word has different roles after these prepositions; empty for none."""
    if here == there:
        return False
    if is_number:
        return not {"from", "than"}.isdisjoint((here, there)) or {here, there} in ({"by", "to"}, {"for", "in"})
    return bool(here and there) or not _LOST.issuperset((here, there))


def _order_differs(first: Features, second: Features) -> bool:
    """Returns whether shared words with equal prepositions, or without one, change their order.

    Exceptions: the agent of a passive verb is the first word of the active one, one word moves around "is" in questions such
    as "which" that open differently, and the object of a verb is its subject in the passive.
    """
    places = {word: place for place, word in enumerate(second.content)}
    orders: dict[str, list[int]] = {}
    agents = list[str]()
    for word, here in first.content.items():
        there = second.content.get(word)
        if there is None or word[0] == PERSON or (here != there and "in" in (here, there)):
            continue  # the price of bread, the bread price
        if here != there and "by" in (here, there):
            agents.append(word)
        orders.setdefault(here if here == there else "", []).append(places[word])
    plain = orders.pop("", [])
    if any([order != sorted(order) for order in orders.values()]):
        return True
    if agents:
        active = second if first.content[agents[0]] else first
        moved = set(plain)
        return agents != [active.subject or next(word for word in active.content if places.get(word) in moved)]
    if plain == sorted(plain):
        return False
    return not _has_one_moved(plain) or not (_are_equations(first, second) or _change_voice(first, second))


def _has_one_moved(order: list[int]) -> bool:
    """Returns whether all are in order except one, which is the first or last one of a text."""
    ends = {order[0], order[-1], min(order), max(order)}
    return any([rest == sorted(rest) for rest in ([place for place in order if place != end] for end in ends)])


def _are_equations(first: Features, second: Features) -> bool:
    """Returns whether both texts ask what something is, in other words: what is the largest organ, which organ is the largest."""
    is_plain = not BE.isdisjoint([*first.opening[1:], *second.opening[1:]])
    return is_plain and first.opening != second.opening and first.is_equation and second.is_equation


def _change_voice(first: Features, second: Features) -> bool:
    """Returns whether one text has a person who acts, and the other one is passive: how can I ripen it, how is it ripened."""
    return bool(first.persons) != bool(second.persons) and first.is_passive != second.is_passive
