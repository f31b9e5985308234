"""The lexical guard: signs and words on which the question itself depends."""

import pytest

from phalanx_frontend.stream.lexical_guard import differs

SIGNS = [
    ("units", "What does the $ sign mean?", "What does the € sign mean?"),
    ("order", "Is the $ stronger than the €?", "Is the € stronger than the $?"),
    ("order", "How much is 100€ in $?", "How much is 100$ in €?"),
    ("units", "How much is €100 in $?", "How much is €100 in £?"),
    ("order", "How do I convert £ to $?", "How do I convert $ to £?"),
    ("units", "How much is 100 € in pounds?", "How much is 100 $ in pounds?"),
    ("identifiers", "How many cm is 5'?", 'How many cm is 5"?'),
    ("identifiers", "What is f'(2) if f(x) is x^2?", "What is f''(2) if f(x) is x^2?"),
    ("identifiers", "What is f'(2) if f(x) is x^2?", "What is f(2) if f(x) is x^2?"),
    ("identifiers", "What is y'' if y is x^3?", "What is y' if y is x^3?"),
    ("identifiers", "What is (x + 1)' at 3?", "What is (x + 1) at 3?"),
    ("identifiers", "What does ?. do in Swift?", "What does !. do in Swift?"),
    ("identifiers", "What does ; do in bash?", "What does ! do in bash?"),
    ("identifiers", "What does user! do in Swift?", "What does user? do in Swift?"),
    ("identifiers", "What does a?.b do in Swift?", "What does a!.b do in Swift?"),
    ("order", "What is the difference between ../ and ./ in a path?", "What is the difference between ./ and ../ in a path?"),
]
WORDS = [
    ("What rhymes with film?", "What rhymes with movie?"),
    ("What is the past tense of buy?", "What is the past tense of purchase?"),
    ("What is the past tense of have to?", "What is the past tense of must?"),
    ("How do you spell colour?", "How do you spell color?"),
    ("How do you spell enable?", "How do you spell activate?"),
    ("How many letters are in twenty-one?", "How many letters are in 21?"),
    ("How many letters are in isn't?", "How many letters are in is not?"),
    ("Which words rhyme with film but not with movie?", "Which words rhyme with movie but not with film?"),
    ("Translate the word buy into German.", "Translate the word purchase into German."),
    ("What is movie in French?", "What is film in French?"),
    ("What does film mean in the novel?", "What does movie mean in the novel?"),
    ("Is a lawyer an attorney?", "Is a lawyer a lawyer?"),
    ("Should I write grey or gray?", "Should I write gray or grey?"),
    ("Convert twenty-one to digits.", "Convert 21 to digits."),
]
ALIKE = [
    ("How much is $20 in the shop?", "How much is 20 $ in the shop?"),
    ("Is it more than 20 $ or 20 €?", "Is it more than $20 or €20?"),
    ("What does the sign say, stop or go?", "What does the sign say, stop or go"),
    ("How can I find a rhyme for the word orange?", "How can I find a rhyme for the word orange, please?"),
    ("How do I buy a film?", "How can I purchase a movie?"),
    ("What does it mean that my bike is red?", "What does it mean that the bike is red?"),
]


@pytest.mark.parametrize(("reason", "asked", "stored"), SIGNS)
def test_signs_count(reason: str, asked: str, stored: str) -> None:
    assert differs(asked, stored) == differs(stored, asked) == reason


@pytest.mark.parametrize(("asked", "stored"), WORDS)
def test_questions_about_words_have_no_synonyms(asked: str, stored: str) -> None:
    assert differs(asked, stored) == differs(stored, asked) == "words"


@pytest.mark.parametrize(("asked", "stored"), ALIKE)
def test_questions_with_signs_may_be_alike(asked: str, stored: str) -> None:
    assert differs(asked, stored) is None and differs(stored, asked) is None


def test_letters_of_other_languages_count() -> None:
    assert differs("Ist Bier in Maßen gesund?", "Ist Bier in Massen gesund?") == "language"
    assert differs("Ist Bier in Maßen gesund?", "ist bier in maßen  gesund?") is None
