"""The response cache compares no requests with images by their text."""

from typing import Any

from phalanx_api import wire
from phalanx_frontend.openai.question import question_of
from phalanx_frontend.openai.schemas import ChatRequest
from phalanx_frontend.openai.served_model import load_model
from tests.frontend.images.pictures import colour, file_of, image_assets, url_of

IMAGE = {"type": "image_url", "image_url": {"url": url_of(file_of(colour(1)))}}
REQUEST = wire.Request(id="a", epoch=0, prompt=[1], delivered=[], sampling=wire.Sampling(max_tokens=1, seed=0))


def has_question(*contents: Any) -> bool:
    messages = [{"role": "user", "content": content} for content in contents]
    body = ChatRequest.model_validate({"messages": messages})
    return question_of(body, None, load_model(image_assets()), REQUEST) is not None


def test_text_after_an_image_is_no_question() -> None:
    assert has_question("what", "is it")
    assert not has_question([IMAGE, {"type": "text", "text": "what"}])
    assert not has_question([IMAGE], "is it")
