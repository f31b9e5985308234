"""The lexical guard: differences that change an answer, rewordings that do not, and properties of any texts."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx_frontend.stream.lexical_guard import KEPT_TEXTS, MAX_CHARS, LexicalGuard, differs
from phalanx_frontend.stream.lexical_tokens import num_cached, tokens_of, uncached_tokens

DIFFERENT = [
    ("numbers", "How many days are in 3 years?", "How many days are in 4 years?"),
    ("numbers", "Add three and twenty-one.", "Add three and twenty-two."),
    ("numbers", "What is 1,000 plus 2?", "What is 100 plus 2?"),
    ("numbers", "How cold is -5 degrees?", "How cold is 5 degrees?"),
    ("numbers", "What is new in Python 3.10?", "What is new in Python 3.1?"),
    ("numbers", "Is the shop open on 2026-05-01?", "Is the shop open on 2026-05-02?"),
    ("numbers", "Is 7 greater than 5?", "Is 5 greater than 7?"),
    ("units", "How far is 5 km for a runner?", "How far is 5 miles for a runner?"),
    ("units", "What is 80% of the 15 seats?", "What is 80 of the 15 seats?"),
    ("units", "How much is $20 in the shop?", "How much is €20 in the shop?"),
    ("units", "What is 30 °C on the stove?", "What is 30 °F on the stove?"),
    ("units", "How many hours does it take?", "How many days does it take?"),
    ("units", "How long is it in metres?", "How long is it in yards?"),
    ("units", "Is 5mg too much for a cat?", "Is 5 g too much for a cat?"),
    ("units", "How many cups fill a gallon?", "How many gallons fill a cup?"),
    ("units", "Take 20 % of 350.", "Take 20 % more than 350."),
    ("units", "Is 5 km + 3 m longer?", "Is 5 m + 3 km longer?"),
    ("names", "He pays Ann. Who owes Ann?", "He pays Ann. Who owes Bob?"),
    ("names", "Who is the mayor of Hamburg?", "Who is the mayor of Bremen?"),
    ("names", "What does the API return?", "What does the CLI return?"),
    ("identifiers", "What does `max_len` do?", "What does `min_len` do?"),
    ("identifiers", "Move `a` to `b` in the shell.", "Move `b` to `a` in the shell."),
    ("identifiers", "How do I open https://a.example/x in the browser?", "How do I open https://a.example/y in the browser?"),
    ("identifiers", 'How do I say "good morning" in the village?', 'How do I say "good night" in the village?'),
    ("identifiers", "What is a < b in the shell?", "What is a > b in the shell?"),
    ("identifiers", "Is a == b in the shell?", "Is a != b in the shell?"),
    ("identifiers", "What does the flag --force do?", "What does the flag --dry-run do?"),
    ("negation", "Can I eat it?", "Can't I eat it?"),
    ("negation", "How do I do it with a key?", "How do I do it without a key?"),
    ("scope", "Which of the seats are only for staff?", "Which of the seats are for staff?"),
    ("scope", "How do I see all of the seats?", "How do I see all seats of all of the boats?"),
    ("scope", "How many cups of tea are too many?", "How many cups of tea are there?"),
    ("scope", "Is it free for orders above $40?", "Is it free for orders of $40?"),
    ("scope", "From when is the pool open?", "Until when is the pool open?"),
    ("scope", "Until what date is the pool open?", "From what date is the pool open?"),
    ("scope", "How do I delete all files but this one?", "How do I delete all files?"),
    ("polarity", "Does the price increase in the rain?", "Does the price decrease in the rain?"),
    ("polarity", "What is the maximum speed of the boat?", "What is the minimum speed of the boat?"),
    ("polarity", "Is the bus late because it snows?", "Is the bus late although it snows?"),
    ("polarity", "Is the soup hot and salty?", "Is the soup hot or salty?"),
    ("question", "Who opened the bridge?", "When was the bridge opened?"),
    ("question", "How many boats are there?", "How much is the boat?"),
    ("question", "How long is the bridge?", "What is the height of the bridge?"),
    ("question", "How did a beaver build the dam?", "Which beaver built the dam?"),
    ("question", "In which year was the bridge built?", "In which month was the bridge built?"),
    ("question", "What is a marathon?", "How much is a marathon?"),
    ("question", "How much flour is best for the cake?", "Which flour is best for the cake?"),
    ("question", "What includes the pass?", "What is included in the pass?"),
    ("question", "What is the meaning of interest?", "How much interest do I get?"),
    ("question", "What does a clock measure?", "How does a clock measure?"),
    ("question", "Who called the doctor?", "Who did the doctor call?"),
    ("question", "Which files changed?", "Which files did I change?"),
    ("question", "Who can see my posts?", "Who can I see in my posts?"),
    ("question", "Remove my card from the list.", "When do you remove my card from the list?"),
    ("question", "Count the seats in the boat.", "Which seats are in the boat?"),
    ("modality", "Can I work in the garden?", "Must I work in the garden?"),
    ("modality", "Why could the boat sink?", "Why does the boat sink?"),
    ("modality", "Do the guards open the gate?", "Should the guards open the gate?"),
    ("modality", "When can I renew the pass?", "When do I have to renew the pass?"),
    ("tense", "Who is the mayor?", "Who was the mayor?"),
    ("tense", "Should I have watered it?", "Should I water it?"),
    ("tense", "Who owns the bridge?", "Who owned the bridge?"),
    ("tense", "Does the boat sink?", "Will the boat sink?"),
    ("tense", "What was the capital of the island?", "Name the capital of the island."),
    ("order", "How do I get from the lake to the castle?", "How do I get from the castle to the lake?"),
    ("order", "Is a horse bigger than a cow?", "Is a cow bigger than a horse?"),
    ("order", "Is it faster in water than in air?", "Is it faster in air than in water?"),
    ("order", "Did the euro gain against the dollar?", "Did the dollar gain against the euro?"),
    ("order", "What do bees make from honey?", "From what do bees make honey?"),
    ("order", "Did the cat chase the dog?", "Did the dog chase the cat?"),
    ("order", "The cat chases the dog.", "The dog chases the cat."),
    ("order", "Are cats dogs?", "Are dogs cats?"),
    ("order", "Do I paint it in the morning, not in the evening?", "Do I paint it in the evening, not in the morning?"),
    ("order", "What can replace butter?", "What can butter replace?"),
    ("order", "Scale the pool by 5 seats.", "Scale the pool to 5 seats."),
    ("order", "Scale it by at most 5 seats.", "Scale it to at most 5 seats."),
    ("order", "Can I call you?", "Can you call me?"),
    ("order", "How do I call the shop?", "How does the shop call me?"),
    ("order", "Remind Ann to call me.", "Remind me to call Ann."),
    ("order", "Shall I call you tomorrow?", "Please call me tomorrow."),
    ("order", "May a boat have two flags?", "May two boats have a flag?"),
    ("order", "How many dogs does the cat chase?", "How many dogs are chasing the cat?"),
    ("order", "How many dogs does the cat chase?", "How many cats are chased by the dog?"),
    ("order", "Do you have the key?", "Do I have the key?"),
    ("order", "Can I pay with the card?", "Can I pay the card?"),
    ("order", "How do I convert feet into metres?", "How do I convert metres into feet?"),
    ("order", "Is 5 km longer than 3 miles?", "Is 3 miles longer than 5 km?"),
    ("order", "Delete old files in the folder.", "Delete files in the old folder."),
    ("order", "Do babies walk at 12 months?", "Do babies walk for 12 months?"),
    ("order", "Is the shop open until Friday?", "Is the shop open on Friday?"),
    ("order", "What can I use instead of eggs in the cake?", "What can I use eggs instead of in the cake?"),
    ("order", "Is Alda north of Bree?", "Is the town of Bree north of Alda?"),
    ("order", "Was Bree conquered by Alda?", "Did Bree conquer Alda?"),
    ("order", "Are cats dogs?", "Does a dog count as a cat?"),
    ("order", "Which gas is liquid?", "Which liquid is gas?"),
    ("words", "How do I wash a shirt?", "How do I wash a car?"),
    ("words", "What is the price difference between A and B?", "What is the difference between A and B?"),
    ("words", "How do I wash a shirt?", "How do I wash a silk shirt?"),
    ("words", "Is this way right?", "Is this way faster?"),
    ("words", "May I keep the phone?", "May I keep the number of the phone?"),
    ("words", "How do I use mustard?", "How do I make mustard?"),
    ("words", "How do I find the pod that mounts a disk?", "How do I mount a disk in a pod?"),
    ("words", "I need a doctor.", "I am a doctor."),
    ("words", "How do I book a boat?", "How do I get a boat?"),
    ("language", "Wie hoch ist der Turm?", "Wie hoch ist der Turm dort?"),
    ("language", "Wat is de hoofdstad?", "Wat is de grootste hoofdstad?"),
    ("language", "北京在哪里", "北京在那里"),
    ("language", "Reset password", "Reset pin"),
    ("length", "word " * MAX_CHARS, "word " * MAX_CHARS + "more"),
]
ALIKE = [
    ("How do I reset my password?", "Please tell me how I can reset the password."),
    ("What is the length of the bridge?", "How long is the bridge?"),
    ("How many minutes does it take?", "How long does it take?"),
    ("What is 5 km in miles?", "Convert 5 kilometers to miles."),
    ("What is 15 percent of 80?", "How much is 15% of 80?"),
    ("Is twenty-one odd?", "Is 21 odd?"),
    ("Does a loan of $5,000 cost a fee?", "Does a loan of 5000 dollars cost a fee?"),
    ("In Go, how do I sort a map?", "How can I sort a map in Go?"),
    ("Who wrote the novel Dune?", "Which author wrote Dune?"),
    ("How do I turn on the lamp?", "How do I switch on the lamp?"),
    ("It isn't open. What can I do?", "What should I do if it is not open?"),
    ("What is 4% of $50 over 3 years?", "What is 4% over 3 years of $50?"),
    ("Who was China's first emperor?", "Who was the first emperor of China?"),
    ("What is the largest lake in Italy?", "Which lake in Italy is the largest?"),
    ("How can I ripen a mango?", "How is a mango ripened?"),
    ("Did Alda conquer Bree?", "Was Bree conquered by Alda?"),
    ("What can I do to save water?", "How can I save water?"),
    ("How do I sort a list in Python?", "How do I sort a Python list?"),
    ("How high is the fee for a boat?", "What is the fee for a boat?"),
    ("Wie hoch ist der Turm?", "wie hoch  ist der turm?"),
    ("Does O’Neill live here?", "Does O'Neill live here?"),
]
WORDS = (
    'how do does I the of to from not 3 -4 1,000 5% $7 Paris NASA `x_y` "a b" before after max min twenty one which km'.split()
)
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=20).map(" ".join)
NUMBERS = st.integers(0, 10**7) | st.decimals(0, 1000, places=2).map(str)
SENTENCES = st.sampled_from(
    [
        "How much is {} and 20?",
        "Give me {} tips for the garden.",
        "What is {}% of 80?",
        "Is ${} too much?",
        "Who won the {} race in 1990?",
    ]
)


@pytest.mark.parametrize(("reason", "asked", "stored"), DIFFERENT)
def test_differences_are_found(reason: str, asked: str, stored: str) -> None:
    assert differs(asked, stored) == differs(stored, asked) == reason


@pytest.mark.parametrize(("asked", "stored"), ALIKE)
def test_rewordings_are_alike(asked: str, stored: str) -> None:
    assert differs(asked, stored) is differs(stored, asked) is None


@given(TEXTS)
def test_a_text_equals_itself(text: str) -> None:
    assert differs(text, text) is None


@given(TEXTS, TEXTS)
def test_the_guard_is_symmetric(asked: str, stored: str) -> None:
    assert differs(asked, stored) == differs(stored, asked)


@given(SENTENCES, NUMBERS, NUMBERS)
def test_another_number_always_differs(sentence: str, one: object, other: object) -> None:
    asked, stored = sentence.format(one), sentence.format(other)
    assert (differs(asked, stored) is None) == (asked == stored)


@given(TEXTS)
@example("don't 'quote it' -4 12'000 a - b")
def test_cached_tokens_equal_uncached_ones(text: str) -> None:
    assert tokens_of(text) == uncached_tokens(text)


def test_kept_texts_are_few_and_change_nothing() -> None:
    guard = LexicalGuard()
    for reason, asked, stored in [*DIFFERENT, *DIFFERENT[::-1]]:
        assert guard.differs(asked, stored) == reason and len(guard) <= KEPT_TEXTS
    assert num_cached()
    guard.clear()
    assert len(guard) == num_cached() == 0


def test_equal_long_texts_are_alike() -> None:
    text = "Is it long? " * MAX_CHARS
    assert differs(text, str(text)) is None
