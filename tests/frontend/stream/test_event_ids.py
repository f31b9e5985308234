"""Event ids: per choice the last token with completely sent text."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta
from phalanx_frontend.ids import EventId, EventIds, parse_event_id
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.text.detokenize import make_detokenizer
from phalanx_frontend.text.tokenizer import TextTokenizer
from tests.frontend.fakes import MIXED_TEXT, FakeBackend, text_script, tiny_assets, tiny_tokenizer_json, token_deltas, token_ids
from tests.frontend.posting import client_of, post, scripted
from tests.frontend.tool_chat import ANSWER, TOOL, TOOLS_TEMPLATE, USER


def events_with_ids(text: str) -> list[tuple[EventId | None, str]]:
    """Returns each event's id and data."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in lines:
            found.append((parse_event_id(lines["id"]) if "id" in lines else None, lines["data"]))
    return found


def text_of(tokens: list[int]) -> str:
    detokenizer = make_detokenizer(TextTokenizer(tiny_tokenizer_json()))
    return "".join(detokenizer.feed(token) for token in tokens)


@pytest.mark.parametrize("stop", [[], ["STOPPED"], ["\n\nx", "upon me"]], ids=["none", "one", "two"])
async def test_event_id_names_the_tokens_of_the_sent_text(stop: list[str]) -> None:
    answer = await post(FakeBackend(text_script(MIXED_TEXT)), stream=True, stop=stop)
    text, last = "", -1
    for id, data in events_with_ids(answer.text):
        if data == "[DONE]":
            continue
        assert id is not None and len(id.indices) == 1
        text += json.loads(data)["choices"][0]["text"]
        assert id.indices[0] > last
        last = id.indices[0]
        assert text == text_of(token_ids(MIXED_TEXT)[: last + 1])
    assert text == MIXED_TEXT and last == len(token_ids(MIXED_TEXT)) - 1


async def test_held_text_is_in_no_event_id() -> None:
    backend = FakeBackend(text_script(ANSWER, finish="stop"), tiny_assets(chat_template=TOOLS_TEMPLATE))
    answer = await post(backend, "/v1/chat/completions", messages=USER, tools=[TOOL], stream=True)
    tokens, sent = token_ids(ANSWER), []
    for id, data in events_with_ids(answer.text):
        if id is not None and data != "[DONE]":
            [delta] = [choice["delta"] for choice in json.loads(data)["choices"]]
            sent.append(delta.get("reasoning_content", "") + delta.get("content", ""))
            sent_text = "".join(sent)
            assert text_of(tokens[: id.indices[0] + 1]).replace("\n", "").startswith("<think>" + sent_text[:8].replace("\n", ""))
    assert "".join(sent).startswith("hm, a toolLet me look.")


async def test_each_choice_has_its_index_and_keeps_it() -> None:
    def script(request: Any) -> Any:
        return token_deltas(token_ids("once" if request.id.endswith("-0") else "upon a time"), "length")

    answer = await post(FakeBackend(script), stream=True, n=2)
    ids = [id for id, data in events_with_ids(answer.text) if data != "[DONE]"]
    assert all(id is not None and len(id.indices) == 2 for id in ids)
    indices = [id.indices for id in ids if id is not None]
    assert -1 in indices[0] and indices[-1] == (len(token_ids("once")) - 1, len(token_ids("upon a time")) - 1)
    assert all(a <= b for before, after in pairwise(indices) for a, b in zip(before, after, strict=True))


async def test_stream_name_is_random_despite_a_client_id() -> None:
    backend = FakeBackend(text_script("once"))
    async with client_of(backend) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True}, headers={"x-request-id": "mine"})
        plain = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    id, data = events_with_ids(answer.text)[0]
    assert id is not None and re.fullmatch("cmpl-mine~[0-9a-f]{32}", id.request)
    assert json.loads(data)["id"] == plain.json()["id"] == "cmpl-mine"
    assert [(request.id, request.can_resume) for request in backend.requests] == [(id.request, True), ("cmpl-mine", False)]


async def test_native_events_have_ids_and_tokens_with_text() -> None:
    answer = await post(FakeBackend(text_script(MIXED_TEXT)), "/v1/generate", prompt="x", stream=True, stop="STOPPED")
    tokens: list[int] = []
    text = ""
    *pieces, (last, whole), _ = events_with_ids(answer.text)
    for id, data in pieces:
        tokens += json.loads(data)["token_ids"]
        text += json.loads(data)["text"]
        assert id is not None and id.indices == (len(tokens) - 1,) and text == text_of(tokens)
    assert json.loads(whole)["token_ids"] == tokens and last == pieces[-1][0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/generate"])
async def test_error_event_has_the_last_id(path: str) -> None:
    backend = scripted(Delta(index=0, tokens=token_ids("on")), BackendError(503, "gone", "gone"))
    answer = await post(backend, path, prompt="x", stream=True)
    (first, _), (last, data) = events_with_ids(answer.text)
    assert first == last is not None and "error" in json.loads(data)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cmpl-a:3", EventId("cmpl-a", (3,))),
        ("a:b~c:-1,0,17", EventId("a:b~c", (-1, 0, 17))),
        ("", None), ("cmpl-a", None), ("cmpl-a:", None), (":3", None), ("a:-2", None), ("a:1,", None), ("a b:1", None),
        ("a:1234567890", None), ("a:1\n", None),
    ],
)  # fmt: skip
def test_an_id_is_read_as_it_was_written(text: str, expected: EventId | None) -> None:
    assert parse_event_id(text) == expected
    if expected is not None:
        assert EventIds(expected.request, [index + 1 for index in expected.indices]).current() == text


@pytest.mark.parametrize("have", range(0, len(token_ids(MIXED_TEXT)) + 1))
def test_reply_continues_after_delivered_tokens(have: int) -> None:
    """A reply resumed after complete tokens continues with the remaining text."""

    def make() -> Reply:
        tokenizer = TextTokenizer(tiny_tokenizer_json())
        return Reply(make_detokenizer(tokenizer), wire.Sampling(max_tokens=99, seed=0), ("STOP it", "\n\n time 🦊!"))

    tokens, whole, again = token_ids(MIXED_TEXT), make(), make()
    sent = "".join(whole.feed(Delta(index=i, tokens=[token])) for i, token in enumerate(tokens[:have]))
    text = again.skip_delivered(tokens[:have])
    assert text == sent and again.num_whole == whole.num_whole
    rest = Delta(index=have, tokens=tokens[have:], finish="length")
    assert again.feed(rest) == whole.feed(rest)
