"""Backend over the local engine: deltas in order, refusals, a lost engine, keep-alives."""

import asyncio

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.trace import ChunkTime, PrefillTime
from phalanx_frontend.backend import BackendError, Delta, KeepAlive
from phalanx_frontend.tracing.tracer import SamplingRules, Tracer
from phalanx_runtime.engine.backend import LocalBackend
from tests.frontend.tracing.span_list import SpanList
from tests.runtime.engine.engine_scene import EngineScene, collect
from tests.runtime.fake_runner import make_request


async def test_the_backend_gives_deltas_in_order_and_the_end(scene: EngineScene) -> None:
    backend = LocalBackend(scene.client)
    reading = asyncio.create_task(collect(backend, make_request(delivered=[1, 2])))
    handle = (await scene.engine.receive_submit()).handle
    await scene.engine.send(wire.Tokens(handles=[handle], epochs=[0], indices=[2], tokens=[7], finished=[]))
    await scene.engine.send(
        wire.Tokens(handles=[handle], epochs=[0], indices=[3], tokens=[8], finished=[wire.Finished(handle, 0, "stop", 4)])
    )
    deltas = [delta for delta in await reading if isinstance(delta, Delta)]
    assert deltas[0].index == 2
    assert [token for delta in deltas for token in delta.tokens] == [7, 8]
    assert (deltas[-1].finish, deltas[-1].cached_tokens) == ("stop", 4)


async def test_queued_tokens_leave_as_one_delta(scene: EngineScene) -> None:
    backend = LocalBackend(scene.client)
    stream = backend.generate(make_request())
    first = asyncio.ensure_future(anext(stream))
    handle = (await scene.engine.receive_submit()).handle
    await scene.engine.send(wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[5], finished=[]))
    assert await first == Delta(index=0, tokens=[5])
    for index in range(1, 4):
        backend.tokens(wire.Tokens(handles=[handle], epochs=[0], indices=[index], tokens=[index], finished=[]))
    assert await anext(stream) == Delta(index=1, tokens=[1, 2, 3])
    backend.tokens(wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[wire.Finished(handle, 0, "length")]))
    assert await anext(stream) == Delta(index=4, tokens=[], finish="length")
    assert [delta async for delta in stream] == []


async def test_closing_the_stream_early_aborts_the_request(scene: EngineScene) -> None:
    stream = LocalBackend(scene.client).generate(make_request())
    reading = asyncio.ensure_future(anext(stream))
    handle = (await scene.engine.receive_submit()).handle
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await scene.engine.receive() == wire.Abort([handle])


async def test_preempted_request_has_both_prefills_and_one_decode(scene: EngineScene) -> None:
    spans = SpanList()
    tracer = Tracer(spans, SamplingRules(ratio=1.0))
    trace = tracer.open("", "completion")
    request = msgspec.structs.replace(make_request(), trace=trace.identity)
    reading = asyncio.create_task(collect(LocalBackend(scene.client, tracer=tracer), request))
    handle = (await scene.engine.receive_submit()).handle
    for index, cached_tokens in ((0, 3), (1, 0)):
        times = wire.Cached(handle, 0, cached_tokens, PrefillTime(0.2, [ChunkTime(0.1, 0.05, 4)]))
        end = [wire.Finished(handle, 0, "length", 3)] if index else []
        frame = wire.Tokens(handles=[handle], epochs=[0], indices=[index], tokens=[5], finished=end, cached=[times])
        await scene.engine.send(frame)
        await asyncio.sleep(0.01)
    deltas = [delta for delta in await reading if isinstance(delta, Delta)]
    assert deltas[-1].cached_tokens == 3
    trace.end()
    found = [(span.name, bool(span.attributes.get("phalanx.preempted"))) for span in spans.spans]
    assert found[:5] == [("queue", False), ("prefill", False), ("queue", True), ("prefill", True), ("decode", False)]
    assert spans.spans[4].attributes["phalanx.tokens"] == 2


async def test_refusal_reaches_the_api_server(scene: EngineScene) -> None:
    reading = asyncio.create_task(collect(LocalBackend(scene.client), make_request()))
    handle = (await scene.engine.receive_submit()).handle
    await scene.engine.send(
        wire.Refused(handle=handle, epoch=0, status=429, code="queue_full", message="full", retry_after_s=2.5)
    )
    with pytest.raises(BackendError) as caught:
        await reading
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 2.5)


async def test_lost_engine_ends_open_streams_after_their_tokens(scene: EngineScene) -> None:
    backend = LocalBackend(scene.client)
    stream = backend.generate(make_request())
    first = asyncio.ensure_future(anext(stream))
    handle = (await scene.engine.receive_submit()).handle
    await scene.engine.send(wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[5], finished=[]))
    await first
    backend.tokens(wire.Tokens(handles=[handle], epochs=[0], indices=[1], tokens=[6], finished=[]))
    scene.client.end_incarnation(2, "rank 0 was killed")
    assert await anext(stream) == Delta(index=1, tokens=[6])
    with pytest.raises(BackendError, match="rank 0 was killed") as caught:
        await anext(stream)
    assert (caught.value.status, caught.value.code) == (503, "group_restarting")
    assert backend.not_ready() == "rank 0 was killed"


async def test_finished_stream_ignores_a_lost_engine(scene: EngineScene) -> None:
    backend = LocalBackend(scene.client)
    stream = backend.generate(make_request())
    first = asyncio.ensure_future(anext(stream))
    handle = (await scene.engine.receive_submit()).handle
    await scene.engine.send(wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[5], finished=[]))
    await first
    backend.tokens(
        wire.Tokens(handles=[handle], epochs=[0], indices=[1], tokens=[6], finished=[wire.Finished(handle, 0, "stop")])
    )
    scene.client.end_incarnation(2, "rank 0 was killed")
    assert await anext(stream) == Delta(index=1, tokens=[6], finish="stop")
    assert [delta async for delta in stream] == []


async def test_a_silent_stream_is_kept_alive(scene: EngineScene) -> None:
    stream = LocalBackend(scene.client, keep_alive_s=0.001).generate(make_request())
    assert await anext(stream) == KeepAlive()
    await stream.aclose()
