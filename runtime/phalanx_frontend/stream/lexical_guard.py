"""Decides from words alone that two texts need different answers, whatever their embeddings say.

Embeddings hardly separate "15 % of 80" from "80 % of 15". The guard reads features of both texts and compares numbers and units,
names, identifiers and quotations, negations, opposites, quantifiers, question words, tense, the order of arguments, and the words
left over. A false alarm costs a computation, a miss costs a wrong answer, so doubt is a difference: texts that are not English
must be equal except for capitals and spaces, and long ones equal.
"""

from typing import Literal

from phalanx_frontend.stream.lexical_features import Features, read
from phalanx_frontend.stream.lexical_tokens import OPTIONAL

Values = Literal["numbers", "units", "identifiers", "names"]
Logic = Literal["negation", "scope", "polarity"]
Meaning = Literal["question", "tense", "order", "words"]
Difference = Literal["length", "language"] | Values | Logic | Meaning
MAX_CHARS = 4000
"""Longer texts are alike only if they are equal."""
MAX_ORDERED = 64
"""Words with a compared order: the first ones, as its cost is quadratic."""
_BOTH_SIDES = 3
_LIKE_WHAT = {"what", "how", "how much", "how tall"}
_OPPOSITE_DIRECTIONS = ({"from", "to"}, {"from", "for"}, {"before", "after"})


def differs(asked: str, stored: str) -> Difference | None:
    """Returns why the answer of one text must not serve the other; None if no difference was found.

    Symmetric; None for equal texts. Pure, except for a bounded cache of words; time is linear in the length of the texts.
    """
    if asked == stored:
        return None
    if len(asked) > MAX_CHARS or len(stored) > MAX_CHARS:
        return "length"
    first, second = read(asked), read(stored)
    if not (first.is_english and second.is_english):
        return None if asked.casefold().split() == stored.casefold().split() else "language"
    return _values(first, second) or _logic(first, second) or _meaning(first, second)


def _values(first: Features, second: Features) -> Values | None:
    """Compares what an answer is computed from."""
    if first.numbers != second.numbers and not _may_be_reordered(first, second):
        return "numbers"
    if first.measures != second.measures or first.units != second.units:
        return "units"
    if first.asked_units and second.asked_units and first.asked_units != second.asked_units:
        return "units"
    if first.identifiers != second.identifiers or first.signs != second.signs:
        if sorted(first.identifiers) != sorted(second.identifiers) or first.signs != second.signs:
            return "identifiers"
    if first.asked_names and second.asked_names and first.asked_names != second.asked_names:
        return "names"
    if first.names != second.names and not (first.names <= second.roots and second.names <= first.roots):
        return "names"
    return None


def _may_be_reordered(first: Features, second: Features) -> bool:
    """Returns whether both texts have the same numbers, each with a unit of its own: 4% for 3 years, 3 years at 4%."""
    if sorted(first.numbers) != sorted(second.numbers):
        return False
    return all(len(one.numbers) == len({unit for _, unit in one.measures}) == len(one.measures) for one in (first, second))


def _logic(first: Features, second: Features) -> Logic | None:
    """Compares what turns an answer round."""
    if first.negations != second.negations:
        return "negation"
    if sorted(first.scopes) != sorted(second.scopes):
        return "scope"
    if any(side != second.axes.get(axis, side) for axis, side in first.axes.items()):
        return "polarity"
    return None


def _meaning(first: Features, second: Features) -> Meaning | None:
    """Compares what is asked, when, in which roles, and of what."""
    if _questions_differ(first.questions, second.questions):
        return "question"
    if first.tenses and second.tenses and ("past" in first.tenses) != ("past" in second.tenses):
        return "tense"
    if _order_differs(first, second):
        return "order"
    more, fewer = first.content.keys() - second.content.keys(), second.content.keys() - first.content.keys()
    return "words" if (more and fewer) or not OPTIONAL.issuperset(more or fewer) else None


def _questions_differ(first: set[str], second: set[str]) -> bool:
    """Returns whether both texts ask, and one for something else. "What" may stand for how, how much, and how high."""
    if {"which", "how"} <= first ^ second and "how" not in first & second:
        return True  # which animal builds dams, how does an animal build dams
    first, second = ({"what" if word == "which" else word for word in words} for words in (first, second))
    one, other = first - second, second - first
    if (not one and not other) or not (first and second):
        return False
    return not (one | other <= _LIKE_WHAT)


def _order_differs(first: Features, second: Features) -> bool:
    """Returns whether shared words swap their directions or their places, or a source in one text is a target in the other.

    Questions such as "which" move their words freely, unless both texts open equally: what can X do, what can do X.
    """
    both = [axis for axis, sides in first.axes.items() if sides == second.axes.get(axis) == _BOTH_SIDES]
    if any(first.first_sides[axis] != second.first_sides[axis] for axis in both):
        return True
    one, other = first.content, second.content
    shared = [word for word in one if word in other]
    changed = {(one[word], other[word]) for word in shared if one[word] != other[word]}
    if any((there, here) in changed or {here, there} in _OPPOSITE_DIRECTIONS for here, there in changed):
        return True
    if any({here, there} == {"from", ""} for here, there in changed):
        return True  # what do bees make from honey, from what do bees make honey
    direct = [word for word in shared if not one[word] and not other[word]]
    places = {word: place for place, word in enumerate(other)}
    order = [places[word] for word in direct[:MAX_ORDERED]]
    if order == sorted(order):
        return False
    if first.opening == second.opening:
        return True
    return first.questions | second.questions <= {"whether"} and _has_swap_around(order)


def _has_swap_around(order: list[int]) -> bool:
    """Returns whether two words swap around a third: a descending triple, as in A pays B and B pays A."""
    for middle in range(1, len(order) - 1):
        if max(order[:middle]) > order[middle] > min(order[middle + 1 :]):
            return True
    return False
