"""Streams of prompts with images: what is kept for resumption has no pixels, and the client's body has them again."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from phalanx_api import wire
from phalanx_frontend.backend import ResumableStream
from phalanx_frontend.errors import ApiError
from phalanx_frontend.ids import EventId
from phalanx_frontend.stream.resume import find_resumable
from phalanx_router.resume import backlog as backlogs
from phalanx_router.resume import peer_wire
from phalanx_router.resume.backlog import PeerBacklog
from phalanx_router.resume.journal_store import JournalStore, PeerCopies
from phalanx_router.resume.registry import make_copy
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.session import StreamSession
from phalanx_router.streams.stream import Stream
from tests.frontend.fakes import FakeBackend, text_script
from tests.frontend.images.pictures import colour, file_of, image_assets, url_of
from tests.polling import until
from tests.router.api_servers import FakeEngine, running_leader
from tests.router.fakes import make_request
from tests.router.http_routers import PrintableEngine, running_engines, running_router
from tests.router.link_clients import orphan_request, router_link

PIXELS = bytes(200_000)
DIGEST = wire.image_digest(PIXELS, 1, 1, 1)


def image_request(id: str = "a", digest: bytes = DIGEST, **fields: Any) -> wire.Request:
    image = wire.Image(digest=digest, num_tiles=1, height=1, width=1, pixels=PIXELS, spans=[(0, 1)])
    return msgspec.structs.replace(make_request(id=id, max_tokens=10**6), can_resume=True, images=[image], **fields)


def session_of(request: wire.Request) -> StreamSession:
    return StreamSession(stream=Stream(request), tokenizer=None, keys=PromptKeys(request.prompt, "", ""))


def extend(session: StreamSession) -> None:
    journal = session.stream.journal
    journal.accept(journal.epoch, len(journal.delivered), 5)


def test_copies_at_routers_have_no_pixels() -> None:
    copy = make_copy(session_of(image_request()))
    assert copy.request == image_request().without_pixels() and len(peer_wire.encode(copy)) < 500


async def test_orphans_at_leaders_have_no_pixels() -> None:
    engine = FakeEngine()
    async with running_leader(engine) as (address, endpoint):
        await orphan_request(engine, address, image_request(), steps=0)
        await until(lambda: endpoint.num_routers == 0)
        assert [request.images[0].pixels for request, *_ in engine.submitted.values()] == [PIXELS]
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            async with asyncio.timeout(10):
                while not isinstance(frame := wire.decode_from_leader(await second.recv(decode=False)), wire.Adopted):
                    pass
    assert frame.request == image_request().without_pixels() and frame.is_running


async def test_the_body_restores_the_pixels_of_its_stream() -> None:
    backend, requested = FakeBackend(text_script("a")), image_request()
    backend.resumable = {"a": ResumableStream(msgspec.structs.replace(requested.without_pixels(), epoch=3), None)}
    [(known, _)] = await find_resumable(backend, EventId("a", (0,)), [requested], None)
    assert (known.epoch, known.images) == (3, requested.images)
    with pytest.raises(ApiError) as caught:
        await find_resumable(backend, EventId("a", (0,)), [image_request(digest=b"other")], None)
    assert caught.value.code == "resume_differs"


def test_frames_to_peers_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlogs, "MAX_OPENED_BYTES", 1)
    copies, sessions = PeerCopies(JournalStore(lambda: 0.0)), [session_of(image_request(id)) for id in "abcd"]
    receiver, backlog, frames = copies.receiver(), PeerBacklog(sessions[:3]), list[int]()

    def send() -> None:
        if (changes := backlog.take()) is not None:
            frames.append(len(changes.opened))
            receiver.apply(changes)

    send()
    extend(sessions[0])
    backlog.extended(sessions[0])
    backlog.opened(sessions[3])
    send()
    sessions[0].model_hash = "weights"  # it is copied again: its token must not be added to that copy
    backlog.extended(sessions[0])
    backlog.closed(sessions[1], "stop", False)
    for _ in range(5):
        send()
    assert frames == [1] * 5 and len(copies) == 3
    for session in (sessions[0], sessions[2], sessions[3]):
        [copy] = copies.find([session.stream.journal.id])
        assert copy.request == session.stream.journal.replay().without_pixels()
    assert copies.find(["b"])[0].finish == "stop"


async def read_chat(url: str, events: list[tuple[str, str]], enough: int) -> None:
    """Appends (id, text) of a streamed chat with an image, resuming after the last one, up to `enough` characters."""
    part = {"type": "image_url", "image_url": {"url": url_of(file_of(colour(255)))}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 40, "seed": 5, "stream": True}
    headers = {"authorization": "Bearer sk-1"} | ({"last-event-id": events[-1][0]} if events else {})
    async with (
        asyncio.timeout(30),
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        id = ""
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            id = value if name == "id" else id
            if name == "data" and value != "[DONE]":
                events.append((id, json.loads(value)["choices"][0]["delta"].get("content") or ""))
            if len(text(events)) >= enough:
                return


def text(events: Sequence[tuple[str, str]]) -> str:
    return "".join(text for _, text in events)


@pytest.mark.parametrize("groups", [1, 2], ids=["at its group", "after the loss of its group"])
async def test_chats_with_images_survive_their_router(groups: int) -> None:
    whole, events, engines = list[tuple[str, str]](), list[tuple[str, str]](), [PrintableEngine() for _ in range(groups)]
    for engine in engines:
        engine.known_assets = image_assets()
    async with running_engines(*engines) as leaders, running_router(*leaders) as first:
        await first.until_linked(groups)
        await read_chat(first.url, whole, 10**9)
        for engine in engines:
            engine.submitted.clear()
            engine.hold = 20
        await read_chat(first.url, events, 5)
        await first.kill()
        async with running_router(*leaders, name="router-2") as second:
            await second.until_linked(groups)
            reading = asyncio.create_task(read_chat(second.url, events, 10**9))
            await until(lambda: second.fleet.sessions)
            [session] = second.fleet.sessions
            assert session.stream.journal.replay().images[0].pixels
            if groups == 2:
                dying = next(engine for engine in engines if engine.submitted)
                dying.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
            for engine in engines:
                engine.hold = 10**9
            await reading
    assert text(events) == text(whole) != ""
