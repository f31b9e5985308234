"""2,000 requests that no door may serve: each gets a 4xx in OpenAI's form, and none reaches the backend."""

from collections import Counter
from itertools import islice

import httpx

from phalanx_frontend.app import create_app
from phalanx_frontend.limits import Limits
from tests.frontend.fakes import FakeBackend, tiny_assets
from tests.frontend.malformed import VALID, malformed

MAX_BODY_BYTES = 500_000


def client_of(backend: FakeBackend) -> httpx.AsyncClient:
    app = create_app(backend, limits=Limits(max_body_bytes=MAX_BODY_BYTES))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door")


async def test_what_the_fuzz_starts_from_is_served() -> None:
    async with client_of(FakeBackend()) as client:
        for path, body in VALID.items():
            assert (await client.post(path, json=body)).status_code == 200, path


async def test_malformed_requests_get_only_4xx() -> None:
    backend = FakeBackend(assets=tiny_assets(max_model_len=512))
    wrong: list[str] = []
    statuses: Counter[int] = Counter()
    async with client_of(backend) as client:
        for case in islice(malformed(seed=4, max_body_bytes=MAX_BODY_BYTES), 2000):
            answer = await client.request(case.method, case.path, content=case.body, headers=case.headers)
            statuses[answer.status_code] += 1
            is_told = answer.headers["content-type"] == "application/json" and "message" in answer.json().get("error", {})
            if not 400 <= answer.status_code < 500 or not is_told or len(answer.content) > 2000:
                wrong.append(f"{answer.status_code} {case.method} {case.path}: {case.why}; {case.body[:200]!r}")
    assert wrong == []
    assert sum(statuses.values()) == 2000 and set(statuses) == {400, 404, 405, 413}
    assert not backend.requests
