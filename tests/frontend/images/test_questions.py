"""The response cache stores and compares no requests with images."""

from typing import Any

import msgspec

from phalanx_api import wire
from phalanx_frontend.auth.caller import Caller
from phalanx_frontend.openai.accept import cache_query
from phalanx_frontend.openai.prompt import ReadyPrompt
from phalanx_frontend.openai.question import question_of
from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.openai.served_model import load_model
from tests.frontend.images.pictures import colour, file_of, image_assets, url_of

IMAGE = {"type": "image_url", "image_url": {"url": url_of(file_of(colour(1)))}}
REQUEST = wire.Request(id="a", epoch=0, prompt=[1], delivered=[], sampling=wire.Sampling(max_tokens=1, seed=0))


def has_question(*contents: Any, rendered: str = "<|user|>is it") -> bool:
    messages = [{"role": "user", "content": content} for content in contents]
    body = ChatRequest.model_validate({"messages": messages})
    return question_of(body, None, load_model(image_assets()), REQUEST, ReadyPrompt([1], rendered=rendered)) is not None


def test_text_after_an_image_is_no_question() -> None:
    assert has_question("what", "is it") and has_question("what", " is it ")
    assert not has_question("what", "is it", rendered="<|user|>IS IT"), "the template has changed it"
    assert not has_question([IMAGE, {"type": "text", "text": "what"}])
    assert not has_question([IMAGE], "is it")


def test_request_with_an_image_is_not_stored() -> None:
    image = wire.Image(digest=b"d" * 16, num_tiles=1, height=1, width=1, pixels=b"rgb", spans=[(0, 1)])
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "what"}], "seed": 0})
    model, requests = load_model(image_assets()), [REQUEST, msgspec.structs.replace(REQUEST, images=[image])]
    queries = [cache_query(body, Caller(request_id="a"), model, [one], lambda: None) for one in requests]
    assert [query is not None for query in queries] == [True, False]
