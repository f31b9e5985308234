"""A client that cuts its stream and resumes it gets no more than its quota."""

import asyncio

from phalanx_api import wire
from phalanx_frontend.auth.api_keys import Quota
from phalanx_router.resume.journal_store import JournalStore, PeerCopies
from tests.frontend.fakes import tiny_tokenizer
from tests.polling import until
from tests.router.clients import ReceivedStream, chars, read
from tests.router.http_routers import BODY, HttpRouter, PrintableEngine, draw, running_engines, running_router, undisturbed

RESUMED = {**BODY, "seed": 77}


def limit(router: HttpRouter, quota: Quota) -> None:
    router.fleet.dispatcher.quotas.quota_of = lambda name: quota if name == "alice" else None


async def test_tokens_after_a_resume_count_in_the_budget() -> None:
    whole, engine = await undisturbed(RESUMED), PrintableEngine()
    engine.hold = 10
    async with running_engines(engine) as leaders, running_router(*leaders) as router:
        limit(router, Quota(tokens_per_day=70))
        received = await read(router.url, RESUMED, stop=chars(5))
        engine.hold = 10**9
        received = await read(router.url, RESUMED, received)
        assert (received.texts, received.is_done) == (whole.texts, True)
        refused = await read(router.url, BODY)
        assert refused.status == 429 and refused.error["code"] == "insufficient_quota", "40 of 70 tokens are used, and the prompt"


async def test_resumed_streams_count_as_concurrent_but_are_never_refused() -> None:
    engine = PrintableEngine()
    engine.hold = 10
    async with running_engines(engine) as leaders, running_router(*leaders) as router:
        limit(router, Quota(concurrent=1, requests_per_day=1))
        received = await read(router.url, RESUMED, stop=chars(5))
        await until(lambda: not router.fleet.sessions)
        reading = asyncio.create_task(read(router.url, RESUMED, received))
        await until(lambda: router.fleet.sessions)
        refused = await read(router.url, BODY)
        assert refused.status == 429 and "concurrent" in refused.error["message"]
        engine.hold = 10**9
        assert (await reading).is_done
        refused = await read(router.url, BODY)
        assert refused.status == 429 and "1 requests per day" in refused.error["message"]


async def test_added_choices_of_a_resume_are_new_requests() -> None:
    body = {**RESUMED, "n": 2}
    whole, engine = await undisturbed(body), PrintableEngine()
    engine.hold = 10
    async with running_engines(engine) as leaders, running_router(*leaders) as router:
        limit(router, Quota(requests_per_minute=2))
        received = await read(router.url, body, stop=chars(10))
        await until(lambda: not router.fleet.sessions)
        stream = received.last.partition(":")[0]
        more = await read(router.url, {**body, "n": 8}, ReceivedStream({}, {}, f"{stream}:{','.join(['-1'] * 8)}"))
        assert more.error is not None and more.error["code"] == "rate_limit_exceeded"
        await until(lambda: not router.fleet.sessions)
        engine.hold = 10**9
        received = await read(router.url, body, received)
        assert (received.texts, received.is_done) == (whole.texts, True)


async def test_ended_choice_is_not_computed_again_on_resume() -> None:
    """It ended long before the client left, while another choice of its stream went on."""
    body, now, end = {**RESUMED, "n": 2, "stop": ["STOP"]}, [0.0], tiny_tokenizer().encode("STOP").ids

    def stopping(request: wire.Request, index: int) -> int:
        return end[index] if request.id.endswith("-0") and index < len(end) else draw(request, index)

    engine = PrintableEngine()
    engine.draw = stopping
    async with running_engines(engine) as leaders, running_router(*leaders) as router:
        whole = await read(router.url, body)
        assert whole.is_done and whole.texts[0] == "" and whole.texts[1]
        store, registry = JournalStore(lambda: now[0]), router.fleet.stream_registry
        registry.store, registry.copies = store, PeerCopies(store)
        limit(router, Quota(requests_per_minute=2))
        engine.hold, engine.num_submitted = 20, 0
        reading = asyncio.create_task(read(router.url, body, stop=lambda received: now[0] > 0))
        await until(lambda: len(store) == 1)
        for now[0] in (100.0, 200.0):
            assert store.get("another stream") is None and len(store) == 1
        engine.hold = 30
        received = await reading
        assert not received.is_done
        await until(lambda: len(store) == 2)
        now[0] = 250.0
        engine.hold = 10**9
        received = await read(router.url, body, received)
        assert (received.status, received.texts, received.is_done) == (200, whole.texts, True)
        assert engine.num_submitted == 3, "both choices, and the rest of one"
        now[0] = 400.0
        assert store.get("another stream") is None and len(store) == 0
