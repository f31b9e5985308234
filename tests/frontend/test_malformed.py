"""2,700 invalid requests: each gets a 4xx in OpenAI's form, and no backend receives one."""

import json
from collections import Counter
from itertools import islice

import httpx
import pytest

from phalanx_api import wire
from phalanx_frontend.app import create_app
from phalanx_frontend.limits import Limits
from tests.frontend.fakes import FakeBackend, tiny_assets
from tests.frontend.images.pictures import image_assets
from tests.frontend.malformed import JSON, VALID, bodies_with, malformed

MAX_BODY_BYTES = 500_000
ONE_LABEL = wire.Classification(labels=["a"], activation="sigmoid")
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/generate", "/tokenize"]


def client_of(backend: FakeBackend) -> httpx.AsyncClient:
    app = create_app(backend, limits=Limits(max_body_bytes=MAX_BODY_BYTES))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server")


async def test_fuzz_seed_requests_are_served() -> None:
    async with client_of(FakeBackend(assets=tiny_assets(classification=ONE_LABEL))) as client:
        for path, body in VALID.items():
            assert (await client.post(path, json=body)).status_code == 200, path


MODELS = {
    "text": (tiny_assets(max_model_len=512, classification=ONE_LABEL), 2000),
    "images": (image_assets(max_model_len=512), 700),
}


@pytest.mark.parametrize(("assets", "count"), MODELS.values(), ids=MODELS.keys())
async def test_malformed_requests_get_only_4xx(assets: wire.Assets, count: int) -> None:
    backend = FakeBackend(assets=assets)
    wrong: list[str] = []
    statuses: Counter[int] = Counter()
    async with client_of(backend) as client:
        for case in islice(malformed(seed=4, max_body_bytes=MAX_BODY_BYTES), count):
            answer = await client.request(case.method, case.path, content=case.body, headers=case.headers)
            statuses[answer.status_code] += 1
            is_told = answer.headers["content-type"] == "application/json" and "message" in answer.json().get("error", {})
            if not 400 <= answer.status_code < 500 or not is_told or len(answer.content) > 2000:
                wrong.append(f"{answer.status_code} {case.method} {case.path}: {case.why}; {case.body[:200]!r}")
    assert wrong == []
    assert sum(statuses.values()) == count and set(statuses) == {400, 404, 405, 413}
    assert not backend.requests


@pytest.mark.parametrize("path", PATHS)
async def test_half_a_character_is_refused_wherever_text_may_be(path: str) -> None:
    wrong: list[str] = []
    async with client_of(FakeBackend()) as client:
        openapi = (await client.get("/openapi.json")).json()
        cases = list(bodies_with("\ud800", path, openapi))
        for body, is_own in cases:
            answer = await client.post(path, content=body, headers={"content-type": JSON})
            if answer.status_code not in ((400,) if is_own else (200, 400)):
                wrong.append(f"{answer.status_code} {body[:200]!r}")
    assert wrong == []
    assert sum(is_own for _, is_own in cases) >= 2


@pytest.mark.parametrize("path", PATHS)
async def test_huge_text_is_served_or_refused_in_every_field(path: str) -> None:
    wrong: list[str] = []
    async with client_of(FakeBackend()) as client:
        openapi = (await client.get("/openapi.json")).json()
        for body, _ in bodies_with("x" * 100_000, path, openapi):
            answer = await client.post(path, content=body, headers={"content-type": JSON})
            if answer.status_code not in (200, 400, 404) or (answer.is_error and len(answer.content) > 2000):
                wrong.append(f"{answer.status_code} {body[:200]!r}")
    assert wrong == []


@pytest.mark.parametrize(
    "entry", [{"model": "\ud800"}, {"\ud800": 1}, {"prompt": "\ud800"}, {"prompt": "x", "tenant": "\ud800"}], ids=ascii
)
async def test_half_a_character_fails_only_its_batch_entry(entry: dict[str, object]) -> None:
    async with client_of(FakeBackend()) as client:
        content = json.dumps({"requests": [entry, {"prompt": "x", "max_tokens": 1}]})
        answer = await client.post("/v1/batch", content=content, headers={"content-type": JSON})
    bad, good = answer.json()["responses"]
    assert answer.status_code == 200 and bad["error"]["status"] == 400 and good["generated_tokens"] == 1


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("tenant", ["t", "t" * 512], ["", "t" * 513]),
        ("priority", [-(2**31), 2**31 - 1], [-(2**31) - 1, 2**31]),
        ("deadline_ms", [0.5, 2**31 - 1], [0, 2**31]),
    ],
)
async def test_bounds_are_the_same_on_every_route(name: str, good: list[object], bad: list[object]) -> None:
    async with client_of(FakeBackend()) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/generate"):
            for value in (*good, *bad):
                answer = await client.post(path, json={**VALID[path], name: value})
                assert answer.status_code == (200 if value in good else 400), (path, value)
