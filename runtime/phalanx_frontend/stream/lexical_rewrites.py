"""Rules that give a sentence one of the forms that English has for it: each changes only sentences of its own pattern."""

from collections.abc import Callable

from phalanx_frontend.stream import lexical_words as lists
from phalanx_frontend.stream.lexical_tokens import NUMBER, UNIT

MAX_FRONT = 8
"""Longest part before a comma that may also be at the end."""
MAX_NAME = 4
"""Longest name of a thing or subject in a pattern."""
_AMOUNTS = ("how-much", "high", "large", "big")
"""How large is the area: what is it. Not how exact."""
_OWNER = "'s"
_SUBJECT_ENDS = (lists.STOPWORDS - frozenset("best good right long far".split())) | {",", "can", "must"}
_NO_NAMES = frozenset("not never who what that if when where because and or but do is was".split())

Words = list[str]


def rewritten(words: Words) -> Words:
    """Returns a sentence of at least one word in the form that all rules leave."""
    if _OWNER in words:
        words = _owner_last(words)
    if "," in words:
        words = [word for word in _front_last(words) if word != ","]
    for rule in _RULES:
        words = rule(words)
    return words


def _owner_last(words: Words) -> Words:
    """Peru's capital: the capital of Peru. Not the old man's capital, where "man" has words before it; nor a portrait, which may
    show its owner."""
    at = words.index(_OWNER)
    end = at + 1
    while end < len(words) and words[end] not in _SUBJECT_ENDS:
        end += 1
    is_short = 0 < at < end - 1 and (at == 1 or words[at - 2] in _SUBJECT_ENDS)
    owned = lists.PLACES if _superlative(words[at + 1 :]) else lists.OWNED
    if not is_short or words[end - 1] not in owned or _OWNER in words[at + 1 :]:
        return words
    before = words[: at - 1]
    if before in (["what", "is"], ["who", "is"], ["who", "was"], ["what", "was"]):
        before = [*before, "the"]
    return [*before, *words[at + 1 : end], "of", words[at - 1], *words[end:]]


def _front_last(words: Words) -> Words:
    """In Go, how do I sort: how do I sort in Go."""
    at = words.index(",")
    is_movable = words[0] in lists.PREPOSITIONS and 1 < at <= MAX_FRONT and "," not in words[at + 1 :]
    return words[at + 1 :] + words[:at] if is_movable else words


def _preposition_last(words: Words) -> Words:
    """In which city is it: which city is it in."""
    if words[0] in lists.PREPOSITIONS and len(words) > 4 and words[1] == "what":
        return [*words[1:], words[0]]
    return words


def _is_able(words: Words) -> Words:
    """Is a cat able to swim, is it possible for a cat to swim: can a cat swim."""
    if words[0] == "is":
        for verb in ("able", "allowed", "permitted"):
            if verb in words[2 : MAX_NAME + 3]:
                at = words.index(verb, 2)
                if words[at + 1 : at + 2] == ["to"] and _is_name(words[1:at]):
                    return ["can", *words[1:at], *words[at + 2 :]]
    elif words[0] == "can-for" and "to" in words[2 : MAX_NAME + 3]:
        at = words.index("to", 2)
        return ["can", *words[1:at], *words[at + 1 :]]
    return words


def _must(words: Words) -> Words:
    """Does the tenant have to pay: must the tenant pay."""
    if "do" in words and "must" in words:
        first, second = words.index("do"), words.index("must")
        if first < second <= first + MAX_NAME + 1 and _is_name(words[first + 1 : second]):
            return [*words[:first], "must", *words[first + 1 : second], *words[second + 1 :]]
    return words


def _is_name(words: Words) -> bool:
    """Returns whether the words may be a subject: no clause, no negation."""
    return _NO_NAMES.isdisjoint(words)


def _bare_number(words: Words) -> Words:
    """The number 17: 17."""
    if "number" in words[:-1]:
        at = words.index("number")
        if words[at + 1][0] == NUMBER:
            return words[:at] + words[at + 1 :]
    return words


def _degree(words: Words) -> Words:
    """How high is the fee: what is the fee; how tall is the tower: what is the height of the tower."""
    if words[0] == "how-much" and words[-1] == "cost":
        return ["what", *words[1:]]
    asked = "how-much" if words[0] == "how-much" else words[1] if words[0] == "how" and len(words) > 1 else ""
    if words[0] == "how-long":
        asked = "long"
    start = 2 if words[0] == "how" else 1
    if not asked or words[start : start + 1] != ["is"]:
        return words
    rest = words[start + 1 :]
    if rest and _is_amount(asked, rest):
        return ["what", "is", *rest]
    things = rest[1:] if rest[:1] in (["a"], ["the"]) else rest
    return ["what", "is", "the", lists.DEGREES[asked], "of", *things] if things and asked in lists.DEGREES else words


def _is_amount(asked: str, rest: Words) -> bool:
    """Returns whether "what is" asks the same of a number or measure: how large is the area, how long is the period."""
    if rest[0][0] == NUMBER:
        return asked in _AMOUNTS
    measure = _measure(rest[1:]) if rest[0] == "the" else ""
    return bool(measure) and (asked in _AMOUNTS or (asked == "long" and measure in lists.LENGTHS))


def _measure(words: Words) -> str:
    """Returns the measure among the first words that no other noun follows, the entry fee for children; or an empty word."""
    for at, word in enumerate(words[:3]):
        if word in lists.MEASURES:
            return word if at + 1 == len(words) or words[at + 1] in lists.PREPOSITIONS else ""
    return ""


def _thing_first(words: Words) -> Words:
    """What colour does the sky have, what colour is it: what is the colour of the sky; what fee is there: what is the fee."""
    if words[0] != "what" or len(words) < 4:
        return words
    if words[-1] == "has" and "do" in words[2 : MAX_NAME + 2]:
        at = words.index("do")
        return ["what", "is", "the", *words[1:at], "of", *words[at + 1 : -1]] if words[at - 1] in lists.OWNED else words
    if "is" in words[2 : MAX_NAME + 2]:
        at = words.index("is")
        thing, rest = words[1:at], words[at + 1 :]
        if rest[:1] == ["there"]:
            return ["what", "is", "the", *thing, *rest[1:]]
        if len(thing) == 1 and thing[0] in lists.ATTRIBUTES:
            return ["what", "is", "the", *thing, "of", *rest]
        return _superlative_first(thing, rest) or words
    return words


def _superlative_first(thing: Words, rest: Words) -> Words | None:
    """Which lake is the largest: what is the largest lake."""
    rest = rest[1:] if rest[:1] == ["the"] else rest
    length = _superlative(rest)
    return ["what", "is", "the", *rest[:length], *thing, *rest[length:]] if length else None


def _superlative(words: Words) -> int:
    """Returns the length of the superlative that starts the words, or 0."""
    if words[:1] in (["most"], ["least"]):
        return 2
    return int(bool(words) and words[0].endswith("est") and words[0] not in lists.NO_SUPERLATIVES)


def _of_place(words: Words) -> Words:
    """What is the largest lake in Italy: what is the largest lake of Italy. Not the largest rival."""
    if words[:3] == ["what", "is", "the"] and _superlative(words[3:]):
        for at in range(4, min(4 + MAX_NAME, len(words))):
            if words[at] in lists.PREPOSITIONS:
                is_place = words[at] == "in" and words[at - 1] in lists.PLACES
                return [*words[:at], "of", *words[at + 1 :]] if is_place else words
    return words


def _how_many(words: Words) -> Words:
    """How many boats are there in the lake: how many boats in the lake; how many hours do 2 days have: how many hours in 2 days.
    Not how many embassies a country has: they are in others."""
    if words[0] != "how-many" or len(words) < 4:
        return words
    if words[1][0] == UNIT and words[3][0] == NUMBER:
        if words[2] == "is":
            return [*words[:2], "in", *words[3:]]
        if words[2] == "do" and words[-1] == "has":
            return [*words[:2], "in", *words[3:-1]]
    for at in range(2, min(2 + MAX_NAME, len(words) - 1)):
        if words[at] == "is":
            after = at + 2 if words[at + 1] == "there" else at + 1
            is_inside = words[after : after + 1] == ["in"]
            return words[:at] + words[after:] if is_inside else words
        if words[at] in ("in", "of"):
            return words
    return words


def _meaning(words: Words) -> Words:
    """What does X mean: the meaning of X; how do X and Y differ, how does X differ from Y: the difference between X and Y."""
    if words[:2] == ["what", "do"] and words[-1] == "mean":
        return ["what", "is", "the", "meaning", "of", *words[2:-1]]
    if words[:2] == ["how", "do"] and words[-1] == "differ" and "and" in words:
        return ["what", "is", "the", "difference", "between", *words[2:-1]]
    if words[:2] == ["how", "do"] and "differ" in words[2:-2]:
        at = words.index("differ")
        if words[at + 1] == "from" and not {"and", "in"}.intersection(words):
            return ["what", "is", "the", "difference", "between", *words[2:at], "and", *words[at + 2 :]]
    if words[0] in ("what", "how-much") and words[1:2] == ["do"] and words[-1] == "weigh":
        return ["what", "is", "the", "weight", "of", *words[2:-1]]
    if words[:5] == ["what", "is", "the", "duration", "of"]:
        return ["how-long", "do", *words[5:], "take"]
    return words


def _is_thing(words: Words) -> Words:
    """Does parsley count as a herb: is parsley a herb; has the hotel got a lift: does the hotel have a lift."""
    if words[0] == "do" and "count" in words[2 : MAX_NAME + 2]:
        at = words.index("count")
        if words[at + 1 : at + 2] == ["as"]:
            return ["is", *words[1:at], *words[at + 2 :]]
    if words[0] == "has" and "got" in words[2 : MAX_NAME + 2]:
        at = words.index("got")
        return ["do", *words[1:at], "has", *words[at + 1 :]]
    return words


def _why(words: Words) -> Words:
    """Why do stars twinkle, the reason that stars twinkle: why stars twinkle."""
    return ["why", *words[2:]] if words[:2] == ["why", "do"] else words


def _without_relative(words: Words) -> Words:
    """Rows that are older: rows older."""
    if "that" in words[1:-2]:
        at = words.index("that", 1)
        if words[at + 1] == "is":
            return words[:at] + words[at + 2 :]
    return words


_RULES: tuple[Callable[[Words], Words], ...] = (
    _preposition_last,
    _is_able,
    _must,
    _bare_number,
    _degree,
    _thing_first,
    _of_place,
    _how_many,
    _meaning,
    _is_thing,
    _why,
    _without_relative,
)
