"""Images in the bodies of all APIs, over a scripted backend."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from phalanx_api import wire
from tests.frontend.fakes import FakeBackend, text_script, tiny_assets, tiny_tokenizer, token_ids
from tests.frontend.images.pictures import TAKEN, bomb, colour, file_of, image_assets, url_of
from tests.frontend.posting import client_of, post

RED, BLUE = url_of(file_of(colour(255))), url_of(file_of(colour(1)))
REFUSED = wire.ImageInput(layout="whole", token="", token_id=0, tile_tokens=1, height=1, width=1, resample=0, obstacle="none")
(RUN,) = token_ids("STOP")
AROUND = msgspec.structs.replace(TAKEN, token_id=RUN, run_token="STOP", before="<once", after=">", attends_within=True)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def backend(assets: wire.Assets | None = None) -> FakeBackend:
    return FakeBackend(text_script("a"), assets=assets or image_assets())


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: object) -> list[dict[str, Any]]:
    shown = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": shown}]


def anthropic_image(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": user("see ", image_part(RED), " and ", image_part(BLUE))}),
    "messages": (
        MESSAGES,
        {
            "max_tokens": 2,
            "messages": user(
                "see ",
                anthropic_image(type="base64", media_type="image/png", data=RED.partition(",")[2]),
                " and ",
                anthropic_image(type="url", url=BLUE),
            ),
        },
    ),
    "responses": (
        RESPONSES,
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "see "},
                        {"type": "input_image", "image_url": RED},
                        {"type": "input_text", "text": " and "},
                        {"type": "input_image", "image_url": BLUE},
                    ],
                }
            ]
        },
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_images_become_placeholders_of_the_prompt(name: str) -> None:
    path, body = BODIES[name]
    server = backend()
    answer = await post(server, path, **body)
    assert answer.status_code == 200, answer.text
    (request,) = server.requests
    run = TAKEN.token * TAKEN.tile_tokens
    assert tiny_tokenizer().decode(request.prompt) == f"[user:see {run} and {run}]"
    assert [request.prompt[start : start + count] for image in request.images for start, count in image.spans] == [
        [TAKEN.token_id] * TAKEN.tile_tokens
    ] * 2
    assert request.images[0].digest != request.images[1].digest
    assert [len(image.pixels) for image in request.images] == [8 * 8 * 3] * 2


async def test_several_images_are_taken_in_their_own_way() -> None:
    """As of LLaVA-OneVision. An image that a prompt has twice counts twice."""
    square = msgspec.structs.replace(TAKEN, layout="square", tile_tokens=5, border=(9, 9, 9))
    server = backend(image_assets(msgspec.structs.replace(TAKEN, several=square)))
    for images, count in (([RED], 4), ([RED, BLUE], 5), ([RED, RED], 5)):
        answer = await post(server, CHAT, messages=user(*map(image_part, images)))
        assert answer.status_code == 200, answer.text
        request = server.requests[-1]
        assert request.prompt.count(TAKEN.token_id) == count * len(images) and len(request.images) == len(images)
    assert server.requests[0].images[0].digest != server.requests[1].images[0].digest


async def test_an_image_has_tokens_around_its_placeholders() -> None:
    """As of Gemma 3: the template writes another token than those of the image, which no text may spell either."""
    server = backend(image_assets(AROUND))
    answer = await post(server, CHAT, messages=user("see ", image_part(RED)))
    assert answer.status_code == 200, answer.text
    (request,) = server.requests
    assert tiny_tokenizer().decode(request.prompt) == f"[user:see <once{'STOP' * 4}>]"
    (image,) = request.images
    (start, count), *others = image.spans
    assert request.prompt[start : start + count] == [RUN] * 4 and not others and image.attends_within
    answer = await post(server, CHAT, messages=user("STOP"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")


async def test_templates_that_read_text_get_placeholders() -> None:
    server = backend(image_assets(chat_template="{% for message in messages %}{{ message.content }}{% endfor %}"))
    answer = await post(server, CHAT, messages=user("see", image_part(RED)))
    assert answer.status_code == 200, answer.text
    assert tiny_tokenizer().decode(server.requests[0].prompt) == f"see\n{TAKEN.token * TAKEN.tile_tokens}"


async def test_templates_that_read_parts_get_empty_text() -> None:
    """Templates of SmolVLM and Gemma 3 read the first part. Calls without text have no part."""
    template = (
        "{% for message in messages %}[{{ message.role }}:"
        "{{ 'call' if message.tool_calls and not message.content else message.content[0]['text'] }}]{% endfor %}"
    )
    server = backend(image_assets(chat_template=template))
    call = {"type": "function", "id": "a", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "see"},
        *({"role": "assistant", "content": content} for content in ("", None)),
        *({"role": "assistant", "content": content, "tool_calls": [call]} for content in ("", None)),
        {"role": "tool", "content": "", "tool_call_id": "a"},
    ]
    answer = await post(server, CHAT, messages=turns)
    assert answer.status_code == 200, answer.text
    rendered = "[system:][user:see][assistant:][assistant:][assistant:call][assistant:call][tool:]"
    assert tiny_tokenizer().decode(server.requests[0].prompt) == rendered


@pytest.mark.parametrize("taken", [TAKEN, REFUSED], ids=["images", "no images after all"])
async def test_text_alone_is_unchanged_by_a_model_with_images(taken: wire.ImageInput) -> None:
    server = backend(image_assets(taken))
    answer = await post(server, CHAT, messages=[{"role": "user", "content": "see"}])
    assert answer.status_code == 200, answer.text
    assert tiny_tokenizer().decode(server.requests[0].prompt) == "[user:see]" and server.requests[0].images == []


@pytest.mark.parametrize(
    "spelled",
    [
        RED.replace("base64", "Base64 "),
        RED.replace("=", "%3D"),
        RED.rstrip("="),
        "\r\n".join([RED[:40], RED[40:80], RED[80:] + " "]),
    ],
    ids=["another case", "escaped", "no padding", "lines"],
)
async def test_data_urls_are_read_as_in_browsers(spelled: str) -> None:
    plain, other = backend(), backend()
    assert spelled != RED and RED.endswith("=")
    for server, url in ((plain, RED), (other, spelled)):
        answer = await post(server, CHAT, messages=user(image_part(url)))
        assert answer.status_code == 200, answer.text
    assert plain.requests[0].images == other.requests[0].images


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,AAAA", "invalid_image"),
        ("data:image/png;base64,%%", "invalid_image"),
        ("data:image/png", "invalid_image"),
        ("data:,", "invalid_image"),
        (url_of(bomb(20_000, 20_000)), "image_too_large"),
        ("https://images.example/a.png", "image_url_refused"),
        ("http://images.example/a.png", "image_url_refused"),
        ("file:///etc/passwd", "image_url_refused"),
        ("", "image_url_refused"),
    ],
)
async def test_bad_images_are_refused_with_their_field(url: str, code: str) -> None:
    answer = await post(backend(), CHAT, messages=[{"role": "system", "content": "s"}, *user(image_part(url))])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, "messages[1].content"), answer.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            MESSAGES,
            {"max_tokens": 2, "messages": user("see", anthropic_image(type="url", url="data:,"))},
            "messages[0].content[1].source.url",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content[0].image_url",
        ),
    ],
    ids=["messages", "responses"],
)
async def test_errors_name_the_field_of_their_api(path: str, body: dict[str, Any], field: str) -> None:
    error = (await post(backend(), path, **body)).json()["error"]
    assert f"{field}: the image cannot be read" in error["message"]


async def test_the_number_of_images_is_bounded() -> None:
    answer = await post(backend(), CHAT, messages=user(*[image_part(RED)] * 17))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_images")


async def test_choices_share_the_bound_of_pixels() -> None:
    wide = msgspec.structs.replace(TAKEN, height=2048, width=2048, shortest_edge=2048)
    body = {"messages": user(image_part(RED)), "max_tokens": 2}
    assert (await post(backend(image_assets(wide)), CHAT, **body, n=2)).status_code == 200
    answer = await post(backend(image_assets(wide)), CHAT, **body, n=6)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    answer = await post(backend(image_assets(wide)), CHAT, messages=user(*[image_part(RED)] * 6), max_tokens=2)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages", "image_too_large")


@pytest.mark.parametrize("parts", [("once", image_part(RED)), ("once",)], ids=["with an image", "without"])
async def test_a_text_may_not_spell_a_placeholder(parts: Sequence[object]) -> None:
    answer = await post(backend(), CHAT, messages=user(*parts))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")


@pytest.mark.parametrize("name", BODIES)
async def test_other_models_refuse_images_by_name(name: str) -> None:
    path, body = BODIES[name]
    server = FakeBackend(text_script("a"))
    answer = await post(server, path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_images", answer.text
    obstacle = msgspec.structs.replace(TAKEN, obstacle="it has no eyes")
    refused = await post(backend(image_assets(obstacle)), path, **body)
    assert refused.status_code == 400 and "it has no eyes" in refused.json()["error"]["message"]


async def test_a_layout_of_a_later_version_is_refused() -> None:
    assets = image_assets()
    later = msgspec.json.encode({**msgspec.to_builtins(TAKEN), "layout": "of a later version"})
    files = assets.files | {wire.IMAGES_FILE: later}
    known = wire.make_assets(files, assets.served_names, assets.max_model_len, assets.eos_token_ids)
    async with client_of(backend(known)) as client:
        path, body = BODIES["chat"]
        answer = await client.post(path, json=body)
        assert answer.status_code == 400 and "update it" in answer.json()["error"]["message"], answer.text
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("assets", "modalities"),
    [
        (image_assets(), ["text", "image"]),
        (image_assets(msgspec.structs.replace(TAKEN, obstacle="it has no eyes")), ["text"]),
        (tiny_assets(), ["text"]),
    ],
    ids=["images", "obstacle", "text"],
)
async def test_model_list_says_who_takes_images(assets: wire.Assets, modalities: list[str]) -> None:
    async with client_of(backend(assets)) as client:
        assert [card["input_modalities"] for card in (await client.get("/v1/models")).json()["data"]] == [modalities]


@pytest.mark.parametrize(("path", "name"), [("/v1/messages/count_tokens", "messages"), ("/tokenize", "chat")])
async def test_counts_include_images(path: str, name: str) -> None:
    body = {key: value for key, value in BODIES[name][1].items() if key == "messages"}
    answer = (await post(backend(), path, **body)).json()
    plain = (await post(backend(), path, messages=user("see ", " and "))).json()
    field = "input_tokens" if "input_tokens" in answer else "count"
    assert answer[field] >= plain[field] + 2 * TAKEN.tile_tokens - 2


@pytest.mark.parametrize(("truncation", "expected"), [("disabled", range(200, 260)), ("auto", range(10, 60))])
async def test_quotas_count_texts_that_are_not_dropped(truncation: str, expected: range) -> None:
    image = {"type": "input_image", "image_url": RED}
    texts = [
        {"role": "user", "content": "see " * 50},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [{"type": "input_text", "text": "and"}, image]},
    ]
    server = backend()
    answer = await post(server, RESPONSES, input=texts, truncation=truncation)
    assert answer.status_code == 200, answer.text
    (checked,) = server.checked_tokens
    assert checked in expected and checked <= len(server.requests[0].prompt)


async def test_malformed_event_ids_do_not_skip_the_quota() -> None:
    """Only a streamed request with a valid Last-Event-ID needs no check: the quota counted its stream at the start."""
    server = backend()
    async with client_of(server) as client:
        path, body = BODIES["chat"]
        nonsense = {"last-event-id": "nonsense"}
        assert (await client.post(path, json={**body, "stream": True}, headers=nonsense)).status_code == 404
        assert not server.checked_tokens
        assert (await client.post(path, json=body, headers=nonsense)).status_code == 200
        assert len(server.checked_tokens) == 1
