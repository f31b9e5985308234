"""The engine client: routing of tokens to sinks, measurements, loss and drain of the engine."""

import asyncio

import msgspec
import pytest

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta
from phalanx_runtime.engine import client
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.channel import EngineSocket
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.engine.load_feed import NO_LOAD
from phalanx_runtime.engine.open_requests import EndedRequest
from tests.polling import until
from tests.runtime.engine.engine_scene import ASSETS, SERVED, EngineScene, FakeMeter, QueueSink, collect
from tests.runtime.fake_runner import make_request


async def test_each_sink_gets_a_steps_tokens_in_one_call(scene: EngineScene) -> None:
    first, second = QueueSink(), QueueSink()
    a, b, c = (scene.client.submit(make_request(5, seed=i), sink) for i, sink in enumerate([first, second, first]))
    assert [(await scene.engine.receive_submit()).handle for _ in range(3)] == [a, b, c]
    await scene.engine.send(
        wire.Tokens(
            handles=[a, b, c], epochs=[0, 1, 2], indices=[0, 0, 0], tokens=[10, 11, 12], finished=[wire.Finished(c, 2, "stop")]
        )
    )
    assert await first.next() == wire.Tokens(
        handles=[a, c], epochs=[0, 2], indices=[0, 0], tokens=[10, 12], finished=[wire.Finished(c, 2, "stop")]
    )
    assert await second.next() == wire.Tokens(handles=[b], epochs=[1], indices=[0], tokens=[11], finished=[])


async def test_details_reach_the_requesting_sink_with_its_tokens(scene: EngineScene) -> None:
    first, second, detail = QueueSink(), QueueSink(), wire.TokenDetail(logprob=-1.0, rank=0, top_ids=[], top_logprobs=[])
    a, b, c = (scene.client.submit(make_request(5, seed=i), sink) for i, sink in enumerate([first, second, first]))
    prompt = [wire.PromptDetails(a, 0, 1, [detail])]
    await scene.engine.send(wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[], prompt_details=prompt))
    assert await first.next() == wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[], prompt_details=prompt)
    await scene.engine.send(
        wire.Tokens(
            handles=[a, b, c], epochs=[0, 0, 0], indices=[0, 0, 0], tokens=[1, 2, 3], finished=[], details=[None, None, detail]
        )
    )
    assert await first.next() == wire.Tokens(
        handles=[a, c], epochs=[0, 0], indices=[0, 0], tokens=[1, 3], finished=[], details=[None, detail]
    )
    assert await second.next() == wire.Tokens(handles=[b], epochs=[0], indices=[0], tokens=[2], finished=[], details=[None])


async def test_details_wait_in_the_mailbox_for_their_tokens(scene: EngineScene) -> None:
    detail = wire.TokenDetail(logprob=-1.0, rank=0, top_ids=[], top_logprobs=[])
    stream = LocalBackend(scene.client).generate(make_request())
    first = asyncio.ensure_future(anext(stream))
    handle = (await scene.engine.receive_submit()).handle
    await scene.engine.send(
        wire.Tokens(
            handles=[], epochs=[], indices=[], tokens=[], finished=[], prompt_details=[wire.PromptDetails(handle, 0, 1, [detail])]
        )
    )
    await scene.engine.send(wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[5], finished=[], details=[detail]))
    assert await first == Delta(index=0, tokens=[5], finish=None, cached_tokens=0, details=[detail], prompt_details=[detail])
    await scene.engine.send(
        wire.Tokens(
            handles=[handle], epochs=[0], indices=[1], tokens=[6], finished=[wire.Finished(handle, 0, "stop")], details=[detail]
        )
    )
    assert await anext(stream) == Delta(index=1, tokens=[6], finish="stop", cached_tokens=0, details=[detail])
    await stream.aclose()


async def test_cached_tokens_come_with_the_first_token(scene: EngineScene) -> None:
    backend, other = LocalBackend(scene.client), QueueSink()
    stream = backend.generate(make_request())
    first = asyncio.ensure_future(anext(stream))
    a, b = (await scene.engine.receive_submit()).handle, scene.client.submit(make_request(5), other)
    cached = [wire.Cached(b, 0, 3), wire.Cached(a, 0, 2), wire.Cached(99, 0, 1)]
    await scene.engine.send(wire.Tokens(handles=[a, b], epochs=[0, 0], indices=[0, 0], tokens=[5, 6], finished=[], cached=cached))
    assert await first == Delta(index=0, tokens=[5], finish=None, cached_tokens=2)
    assert await other.next() == wire.Tokens(handles=[b], epochs=[0], indices=[0], tokens=[6], finished=[], cached=cached[:1])
    await stream.aclose()
    assert [(end.reason, end.cached_tokens) for end in scene.meter.ends] == [("abort", 2)]


async def test_vector_reaches_the_backend_and_the_meter(scene: EngineScene) -> None:
    backend = LocalBackend(scene.client)
    request = msgspec.structs.replace(make_request(5, 0), pooling="last")
    answer = asyncio.ensure_future(collect(backend, request))
    handle = (await scene.engine.receive_submit()).handle
    end = wire.Finished(handle, 0, "stop", 2, b"vector..")
    await scene.engine.send(wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[end]))
    assert await answer == [Delta(index=0, tokens=[], finish="stop", cached_tokens=2, vector=b"vector..")]
    assert scene.meter.embedded_tokens == 5 and not scene.meter.firsts
    [ended] = scene.meter.ends
    assert (ended.reason, ended.prompt_tokens, ended.cached_tokens, ended.generated_tokens) == ("stop", 5, 2, 0)


async def test_requests_and_tokens_are_measured(scene: EngineScene) -> None:
    sink = QueueSink()
    handle = scene.client.submit(make_request(5), sink)
    await scene.engine.send(wire.Load(waiting=1, running=2, outstanding_tokens=3, free_pages=4, total_pages=5))
    for index in range(3):
        ends = [wire.Finished(handle, 0, "length")] if index == 2 else []
        await scene.engine.send(wire.Tokens(handles=[handle], epochs=[0], indices=[index], tokens=[7], finished=ends))
        await sink.next()
    assert scene.client.load() == wire.Load(waiting=1, running=2, outstanding_tokens=3, free_pages=4, total_pages=5)
    assert scene.meter.loads[-1] == wire.Load(waiting=1, running=2, outstanding_tokens=3, free_pages=4, total_pages=5)
    assert scene.meter.steps == [1, 1, 1]
    assert scene.meter.firsts == [(5, 1.0)]
    assert scene.meter.gaps == [1.0, 1.0]
    assert scene.meter.ends == [
        EndedRequest(
            reason="length", prompt_tokens=5, cached_tokens=0, generated_tokens=3, max_tokens=4, latency_s=3.0, decode_s=2.0
        )
    ]


async def test_tokens_of_an_aborted_request_are_dropped(scene: EngineScene) -> None:
    sink = QueueSink()
    aborted, running = scene.client.submit(make_request(), sink), scene.client.submit(make_request(), sink)
    scene.client.abort([aborted, 999])
    scene.client.abort([aborted])
    assert [type(await scene.engine.receive()) for _ in range(3)] == [wire.Submit, wire.Submit, wire.Abort]
    ends = [wire.Finished(aborted, 0, "stop"), wire.Finished(running, 0, "stop")]
    await scene.engine.send(wire.Refused(handle=aborted, epoch=0, status=429, code="queue_full", message="full"))
    await scene.engine.send(wire.Tokens(handles=[aborted, running], epochs=[0, 0], indices=[0, 0], tokens=[1, 2], finished=ends))
    assert await sink.next() == wire.Tokens(handles=[running], epochs=[0], indices=[0], tokens=[2], finished=ends[1:])
    assert sink.frames.empty()


async def test_an_unreadable_frame_harms_no_other(scene: EngineScene, caplog: pytest.LogCaptureFixture) -> None:
    sink = QueueSink()
    handle = scene.client.submit(make_request(), sink)
    await scene.engine.send(b"\xc1")
    await scene.engine.send(
        wire.Refused(handle=handle, epoch=0, status=429, code="queue_full", message="full", retry_after_s=2.5)
    )
    assert await sink.next() == wire.Refused(
        handle=handle, epoch=0, status=429, code="queue_full", message="full", retry_after_s=2.5
    )
    assert "frame of the engine cannot be read" in caplog.messages


async def test_lost_incarnation_drops_requests_and_the_next_serves(scene: EngineScene) -> None:
    sink = QueueSink()
    changes: list[wire.State] = []
    unsubscribe = scene.client.subscribe(lambda: changes.append(scene.client.state()))
    lost = scene.client.submit(make_request(), sink)
    scene.client.end_incarnation(2, "rank 1 was killed")
    with pytest.raises(BackendError, match="rank 1 was killed"):
        scene.client.submit(make_request(), sink)
    scene.client.abort([lost])
    assert scene.client.load() == NO_LOAD
    engine = scene.rebind()
    scene.client.serve(ASSETS)
    handle = scene.client.submit(make_request(), sink)
    assert (await engine.receive_submit()).handle == handle
    await engine.send(wire.Tokens(handles=[lost, handle], epochs=[0, 0], indices=[0, 0], tokens=[1, 2], finished=[]))
    assert await sink.next() == wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[2], finished=[])
    unsubscribe()
    scene.client.end_incarnation(3, "again")
    assert changes == [
        wire.State(serving=False, incarnation=2, reason="rank 1 was killed"),
        wire.State(serving=True, incarnation=2),
    ]


async def test_loss_names_the_suspected_requests(scene: EngineScene) -> None:
    scene.client.submit(msgspec.structs.replace(make_request(), alone=True), QueueSink())
    assert scene.client.has_lone_request
    scene.client.end_incarnation(2, "rank 1 was killed")
    assert (scene.client.state().cause, scene.client.has_lone_request) == ("alone", False)
    scene.client.end_incarnation(3, "pod 1 left", is_outside=True)
    assert scene.client.state().cause == "outside"


async def test_request_can_be_reassigned_to_another_sink(scene: EngineScene) -> None:
    first, second = QueueSink(), QueueSink()
    handle = scene.client.submit(make_request(), first)
    scene.client.reassign([handle, handle + 1], second)
    await scene.engine.receive_submit()
    await scene.engine.send(wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[1], finished=[]))
    assert await second.next() == wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[1], finished=[])


async def test_assets_are_unknown_until_an_incarnation_served() -> None:
    client = EngineClient(FakeMeter(), EngineSocket())
    backend = LocalBackend(client)
    with pytest.raises(BackendError) as caught:
        backend.assets()
    assert (caught.value.status, caught.value.code) == (503, "model_loading")
    assert backend.not_ready() == "starting"
    client.serve(ASSETS)
    assert backend.assets() is ASSETS
    assert backend.not_ready() is None
    client.close()


async def test_each_ended_request_is_counted_once(scene: EngineScene) -> None:
    sink = QueueSink()
    aborted, refused, lost = (scene.client.submit(make_request(2), sink) for _ in range(3))
    scene.client.abort([aborted, aborted])
    await scene.engine.send(wire.Refused(handle=refused, epoch=0, status=429, code="queue_full", message="no"))
    await scene.engine.send(wire.Tokens(handles=[lost], epochs=[0], indices=[0], tokens=[7], finished=[], queue_times_s=[0.5]))
    await until(lambda: scene.meter.queue_times_s)
    scene.client.end_incarnation(2, "lost")
    scene.client.end_incarnation(3, "lost")
    assert [(end.reason, end.generated_tokens) for end in scene.meter.ends] == [("abort", 0), ("error", 0), ("error", 1)]
    assert scene.meter.queue_times_s == [0.5]


async def test_draining_client_finishes_its_requests_only(scene: EngineScene) -> None:
    backend = LocalBackend(scene.client)
    running = asyncio.create_task(collect(backend, make_request(2)))
    await until(lambda: scene.client.is_busy)
    scene.client.drain("leaving")
    assert scene.client.state() == wire.State(serving=False, incarnation=1, reason="leaving", draining=True, served=SERVED)
    assert backend.not_ready() == "leaving"
    with pytest.raises(BackendError) as caught:
        scene.client.submit(make_request(2), QueueSink())
    assert (caught.value.status, caught.value.code) == (503, "draining")
    handle = scene.client.open_handles[0]
    await scene.engine.send(
        wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[7], finished=[wire.Finished(handle, 0, "stop")])
    )
    assert await running == [Delta(index=0, tokens=[7], finish="stop")]
    scene.client.serve(ASSETS)
    assert not scene.client.state().serving


async def test_stream_open_after_draining_gets_a_reason(scene: EngineScene) -> None:
    backend = LocalBackend(scene.client)
    running = asyncio.create_task(collect(backend, make_request(2)))
    await until(lambda: scene.client.is_busy)
    scene.client.drain("leaving")
    scene.client.stop("stopped")
    assert scene.client.state() == wire.State(serving=False, incarnation=1, reason="stopped", cause="outside")
    with pytest.raises(BackendError, match="stopped") as caught:
        await running
    assert (caught.value.status, caught.value.code) == (503, "shutting_down")
    assert "lost its engine" not in caught.value.message


async def test_engine_failure_while_draining_reports_the_stopping_pod(scene: EngineScene) -> None:
    running = asyncio.create_task(collect(LocalBackend(scene.client), make_request(2)))
    await until(lambda: scene.client.is_busy)
    scene.client.drain("the pod is stopping")
    scene.client.end_incarnation(2, "rank 0 was killed")
    with pytest.raises(BackendError, match="the pod is stopping: rank 0 was killed") as caught:
        await running
    assert caught.value.code == "shutting_down"


async def test_tokens_of_one_step_share_the_elapsed_time(scene: EngineScene) -> None:
    sink = QueueSink()
    first, second = (scene.client.submit(make_request(5), sink) for _ in range(2))
    await scene.engine.send(wire.Tokens(handles=[first, second], epochs=[0, 0], indices=[0, 0], tokens=[7, 7], finished=[]))
    await scene.engine.send(
        wire.Tokens(
            handles=[first, first, first, first, second], epochs=[0] * 5, indices=[1, 2, 3, 4, 1], tokens=[7] * 5, finished=[]
        )
    )
    await sink.next()
    await sink.next()
    assert scene.meter.gaps == [0.25] * 4 + [1.0]


def with_image(**fields: object) -> wire.Request:
    """Returns a request with three bytes of pixels."""
    image = wire.Image(digest=bytes(16), num_tiles=1, height=1, width=1, pixels=b"abc", spans=[(0, 1)])
    return msgspec.structs.replace(make_request(5), images=[image], **fields)


async def test_tenants_share_the_memory_of_images(scene: EngineScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant gets at most as much as is left free, and another one then finds room."""
    monkeypatch.setattr(client, "MAX_IMAGE_BYTES", 12)
    first, _ = (scene.client.submit(with_image(tenant="alice"), QueueSink()) for _ in range(2))
    with pytest.raises(BackendError) as caught:
        scene.client.submit(with_image(tenant="alice"), QueueSink())
    assert (caught.value.status, caught.value.code) == (429, "image_memory_full")
    scene.client.submit(with_image(tenant="bob"), QueueSink())
    scene.client.abort([first])
    scene.client.submit(with_image(tenant="carol"), QueueSink())


async def test_images_of_all_routers_are_bounded(scene: EngineScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them bounds its own. A request that ends makes room, one without images needs none."""
    monkeypatch.setattr(client, "MAX_IMAGE_BYTES", 5)
    request = with_image()
    first = scene.client.submit(request, QueueSink())
    with pytest.raises(BackendError) as caught:
        scene.client.submit(request, QueueSink())
    assert (caught.value.status, caught.value.code) == (429, "image_memory_full")
    scene.client.submit(make_request(5), QueueSink())
    for started in ({"epoch": 1}, {"delivered": [7]}):  # its former group is lost, or it moves here
        scene.client.submit(msgspec.structs.replace(request, **started), QueueSink())
    scene.client.abort([first])
    scene.client.abort([first + 2, first + 3])
    scene.client.submit(request, QueueSink())
