"""Turns of one role in a row become one message, with work that grows as they do."""

from typing import Any

import pytest

from phalanx_frontend.openai import prompt
from phalanx_frontend.openai.prompt import merged_turns
from phalanx_frontend.openai.schemas import Message
from phalanx_frontend.openai.tools import CalledFunction, PastCall


def call(id: str) -> PastCall:
    return PastCall(id=id, function=CalledFunction(name="f", arguments="{}"))


def test_turns_of_a_role_become_one_message() -> None:
    turns = [
        Message(role="system", content="s"),
        Message(role="user", content="a"),
        Message(role="user", content=""),
        Message(role="user", content="b"),
        Message(role="assistant", reasoning_content="hm"),
        Message(role="assistant", content="c", tool_calls=[call("1")]),
        Message(role="assistant", tool_calls=[call("2")]),
        Message(role="tool", content="x", tool_call_id="1"),
        Message(role="tool", content="y", tool_call_id="2"),
    ]
    user, assistant, *results = (merged := merged_turns(turns))[1:]
    assert merged[0] is turns[0] and results == turns[-2:]
    assert user == Message(role="user", content="a\nb")
    assert assistant == Message(role="assistant", content="c", reasoning_content="hm", tool_calls=[call("1"), call("2")])


def test_many_turns_are_merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [Message(role="user", content=f"turn {number}") for number in range(20_000)]
    made = list[Message]()

    def make(**fields: Any) -> Message:
        made.append(Message(**fields))
        return made[-1]

    monkeypatch.setattr(prompt, "Message", make)
    [merged] = merged_turns(turns)
    assert made == [merged] and merged.content == "\n".join(f"turn {number}" for number in range(20_000))
