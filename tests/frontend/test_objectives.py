"""Counts of good and bad events at /metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx_api.summary import LatencyObjectives
from phalanx_frontend.app import create_app
from phalanx_frontend.backend import BackendError, Delta
from phalanx_frontend.objectives import is_fault
from tests.frontend.fakes import FakeBackend, text_script
from tests.frontend.posting import scripted
from tests.polling import until

LOST = BackendError(503, "too_many_replays", "the stream lost its group 3 times")
FULL = BackendError(429, "queue_full", "too many requests wait")
LIMITED = BackendError(429, "rate_limit_exceeded", "60 requests per minute")
NEVER = LatencyObjectives(ttft_s=0.0, itl_s=0.0)
ALWAYS = LatencyObjectives(ttft_s=60.0, itl_s=60.0)


@asynccontextmanager
async def client_of(backend: FakeBackend, targets: LatencyObjectives = ALWAYS) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(backend, latency_targets=lambda: targets)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api-server") as client:
        yield client


async def counts(client: httpx.AsyncClient) -> dict[str, tuple[float, float]]:
    """Good and bad events of each objective."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    (family,) = (family for family in families if family.name == "phalanx_objective_events")
    found = {(s.labels["objective"], s.labels["outcome"]): s.value for s in family.samples if s.name.endswith("_total")}
    return {objective: (found[objective, "good"], found[objective, "bad"]) for objective in ("availability", "ttft", "itl")}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("targets", "ttft", "itl"),
    [(ALWAYS, (1, 0), (2, 0)), (NEVER, (0, 1), (0, 2)), (LatencyObjectives(itl_s=60.0), (0, 0), (2, 0))],
    ids=["met", "missed", "one target"],
)
async def test_tokens_are_judged_by_their_targets(
    targets: LatencyObjectives, ttft: tuple[int, int], itl: tuple[int, int], is_streamed: bool
) -> None:
    async with client_of(FakeBackend(text_script("once upon a")), targets) as client:
        assert (await counts(client))["ttft"] == (0, 0), "series exist before the first event"
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": is_streamed})
        assert answer.status_code == 200
        found = await counts(client)
    assert found == {"availability": (1, 0), "ttft": ttft, "itl": itl}


@pytest.mark.parametrize(
    ("error", "expected"),
    [(LOST, (0, 1)), (FULL, (0, 1)), (LIMITED, (0, 0)), (RuntimeError("a bug"), (0, 1))],
    ids=["lost", "full", "limit of the client", "bug"],
)
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_errors_of_the_service_are_bad(error: Exception, expected: tuple[int, int], num_tokens: int) -> None:
    steps = [Delta(index=index, tokens=[5]) for index in range(num_tokens)]
    async with client_of(scripted(*steps, error)) as client:
        await client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert (await counts(client))["availability"] == expected


async def test_requests_before_any_group_are_bad() -> None:
    backend = FakeBackend()
    backend.current_assets = None
    async with client_of(backend) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        assert (await client.get("/v1/models")).status_code == 503
        assert (await counts(client))["availability"] == (0, 1), "reading the models is no request"


async def test_mistakes_of_clients_count_in_neither() -> None:
    async with client_of(FakeBackend()) as client:
        for body in ({"prompt": "x", "max_tokens": -1}, {"prompt": "x", "model": "other"}, {}):
            assert 400 <= (await client.post("/v1/completions", json=body)).status_code < 500
        assert (await counts(client))["availability"] == (0, 0)


async def test_disconnects_count_in_neither() -> None:
    backend = scripted(Delta(index=0, tokens=[5]), asyncio.Event())
    async with client_of(backend) as client:
        posting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))

        async def has_token() -> bool:
            return (await counts(client))["ttft"] == (1, 0)

        await until(has_token)
        posting.cancel()
        await asyncio.wait_for(backend.aborts.get(), 30)
        assert await counts(client) == {"availability": (0, 0), "ttft": (1, 0), "itl": (0, 0)}


async def test_embeddings_and_entries_of_batches_count() -> None:
    async with client_of(FakeBackend()) as client:
        assert (await client.post("/v1/embeddings", json={"input": ["a", "b"]})).status_code == 200
        assert (await counts(client))["availability"] == (1, 0)
        entries = {"requests": [{"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2}]}
        assert (await client.post("/v1/batch", json=entries)).status_code == 200
        assert (await counts(client))["availability"] == (3, 0)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [(500, None, True), (503, "no_group_ready", True), (429, "overloaded", True), (429, "queue_full", True)]
    + [(429, code, False) for code in ("rate_limit_exceeded", "insufficient_quota")]
    + [(status, None, False) for status in (400, 401, 404, 409, 413)],
)
def test_faults_are_server_errors_and_missing_capacity(status: int, code: str | None, expected: bool) -> None:
    assert is_fault(status, code) == expected


async def test_tokens_that_arrive_together_first_have_no_gap() -> None:
    backend = scripted(Delta(index=0, tokens=[5, 6, 7]), Delta(index=3, tokens=[8], finish="length"))
    async with client_of(backend, LatencyObjectives(itl_s=60.0)) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert (await counts(client))["itl"] == (1, 0)


async def test_clients_that_leave_late_count_as_late() -> None:
    async with client_of(scripted(asyncio.Event()), LatencyObjectives(ttft_s=0.1)) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await client.post("/v1/completions", json={"prompt": "x"})

        async def is_counted() -> bool:
            return (await counts(client))["ttft"] == (0, 1)

        await until(is_counted)
        assert (await counts(client))["availability"] == (0, 0)


async def test_held_stream_that_fails_is_bad() -> None:
    class NeverServed(FakeBackend):
        async def wait_for_assets(self, name: str = "") -> None:
            await asyncio.sleep(0.3)

    backend = NeverServed()
    backend.current_assets = None
    app = create_app(backend, keep_alive_s=0.05)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api-server") as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert answer.status_code == 200 and "not_ready" in answer.text
        assert (await counts(client))["availability"] == (0, 1)


async def test_other_routes_count_nothing() -> None:
    backend = FakeBackend()
    backend.current_assets = None
    async with client_of(backend) as client:
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 503
        assert (await counts(client))["availability"] == (0, 0)
