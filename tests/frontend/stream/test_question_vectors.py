"""The prompt that embeds a question."""

from typing import get_args

from phalanx_api import wire
from phalanx_frontend.stream.question_vectors import POOLING, prepare


def test_the_last_token_follows_the_question() -> None:
    text = 'What does "{}" mean?'
    before, after = prepare(text).split(text)
    assert before and after.rstrip() == '" means in one word: "'
    assert POOLING == "last" and POOLING in get_args(wire.Pooling)
