"""The engine client: what reaches which sink, what is measured, and what a lost or drained engine means."""

import asyncio

import msgspec
import pytest

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.client import NO_LOAD, EngineClient
from phalanx_runtime.engine.meter import EndedRequest
from tests.runtime.engine.engine_rig import ASSETS, SERVED, FakeMeter, ListSink, Rig, drain, rig
from tests.runtime.fake_runner import make_request

__all__ = ["rig"]


async def test_each_sink_gets_a_steps_tokens_in_one_call(rig: Rig) -> None:
    one, two = ListSink(), ListSink()
    a, b, c = (rig.client.submit(make_request(5, seed=i), sink) for i, sink in enumerate([one, two, one]))
    assert [(await rig.engine.take_submit()).handle for _ in range(3)] == [a, b, c]
    await rig.engine.say(
        wire.Tokens(
            handles=[a, b, c], epochs=[0, 1, 2], indices=[0, 0, 0], tokens=[10, 11, 12], finished=[wire.Finished(c, 2, "stop")]
        )
    )
    assert await one.next() == wire.Tokens(
        handles=[a, c], epochs=[0, 2], indices=[0, 0], tokens=[10, 12], finished=[wire.Finished(c, 2, "stop")]
    )
    assert await two.next() == wire.Tokens(handles=[b], epochs=[1], indices=[0], tokens=[11], finished=[])


async def test_details_reach_the_requesting_sink_with_its_tokens(rig: Rig) -> None:
    one, two, detail = ListSink(), ListSink(), wire.TokenDetail(logprob=-1.0, rank=0, top_ids=[], top_logprobs=[])
    a, b, c = (rig.client.submit(make_request(5, seed=i), sink) for i, sink in enumerate([one, two, one]))
    told = [wire.PromptDetails(a, 0, 1, [detail])]
    await rig.engine.say(wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[], prompt_details=told))
    assert await one.next() == wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[], prompt_details=told)
    await rig.engine.say(
        wire.Tokens(
            handles=[a, b, c], epochs=[0, 0, 0], indices=[0, 0, 0], tokens=[1, 2, 3], finished=[], details=[None, None, detail]
        )
    )
    assert await one.next() == wire.Tokens(
        handles=[a, c], epochs=[0, 0], indices=[0, 0], tokens=[1, 3], finished=[], details=[None, detail]
    )
    assert await two.next() == wire.Tokens(handles=[b], epochs=[0], indices=[0], tokens=[2], finished=[], details=[None])


async def test_details_wait_in_the_mailbox_for_their_tokens(rig: Rig) -> None:
    detail = wire.TokenDetail(logprob=-1.0, rank=0, top_ids=[], top_logprobs=[])
    stream = LocalBackend(rig.client).generate(make_request())
    first = asyncio.ensure_future(anext(stream))
    handle = (await rig.engine.take_submit()).handle
    await rig.engine.say(
        wire.Tokens(
            handles=[], epochs=[], indices=[], tokens=[], finished=[], prompt_details=[wire.PromptDetails(handle, 0, 1, [detail])]
        )
    )
    await rig.engine.say(wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[5], finished=[], details=[detail]))
    assert await first == Delta(index=0, tokens=[5], finish=None, cached_tokens=0, details=[detail], prompt_details=[detail])
    await rig.engine.say(
        wire.Tokens(
            handles=[handle], epochs=[0], indices=[1], tokens=[6], finished=[wire.Finished(handle, 0, "stop")], details=[detail]
        )
    )
    assert await anext(stream) == Delta(index=1, tokens=[6], finish="stop", cached_tokens=0, details=[detail])
    await stream.aclose()


async def test_cached_tokens_come_with_the_first_token(rig: Rig) -> None:
    backend, other = LocalBackend(rig.client), ListSink()
    stream = backend.generate(make_request())
    first = asyncio.ensure_future(anext(stream))
    a, b = (await rig.engine.take_submit()).handle, rig.client.submit(make_request(5), other)
    cached = [wire.Cached(b, 0, 3), wire.Cached(a, 0, 2), wire.Cached(99, 0, 1)]
    await rig.engine.say(wire.Tokens(handles=[a, b], epochs=[0, 0], indices=[0, 0], tokens=[5, 6], finished=[], cached=cached))
    assert await first == Delta(index=0, tokens=[5], finish=None, cached_tokens=2)
    assert await other.next() == wire.Tokens(handles=[b], epochs=[0], indices=[0], tokens=[6], finished=[], cached=cached[:1])
    await stream.aclose()
    assert [(end.reason, end.cached_tokens) for end in rig.meter.ends] == [("abort", 2)]


async def test_requests_and_tokens_are_measured(rig: Rig) -> None:
    sink = ListSink()
    handle = rig.client.submit(make_request(5), sink)
    await rig.engine.say(wire.Load(waiting=1, running=2, outstanding_tokens=3, free_pages=4, total_pages=5))
    for index in range(3):
        ends = [wire.Finished(handle, 0, "length")] if index == 2 else []
        await rig.engine.say(wire.Tokens(handles=[handle], epochs=[0], indices=[index], tokens=[7], finished=ends))
        await sink.next()
    assert rig.client.load() == wire.Load(waiting=1, running=2, outstanding_tokens=3, free_pages=4, total_pages=5)
    assert rig.meter.loads[-1] == wire.Load(waiting=1, running=2, outstanding_tokens=3, free_pages=4, total_pages=5)
    assert rig.meter.steps == [1, 1, 1]
    assert rig.meter.firsts == [(5, 1.0)]
    assert rig.meter.gaps == [1.0, 1.0]
    assert rig.meter.ends == [
        EndedRequest(
            reason="length", prompt_tokens=5, cached_tokens=0, generated_tokens=3, max_tokens=4, latency_s=3.0, decode_s=2.0
        )
    ]


async def test_tokens_of_an_aborted_request_go_nowhere(rig: Rig) -> None:
    sink = ListSink()
    gone, stays = rig.client.submit(make_request(), sink), rig.client.submit(make_request(), sink)
    rig.client.abort([gone, 999])
    rig.client.abort([gone])
    assert [type(await rig.engine.take()) for _ in range(3)] == [wire.Submit, wire.Submit, wire.Abort]
    ends = [wire.Finished(gone, 0, "stop"), wire.Finished(stays, 0, "stop")]
    await rig.engine.say(wire.Refused(handle=gone, epoch=0, status=429, code="queue_full", message="full"))
    await rig.engine.say(wire.Tokens(handles=[gone, stays], epochs=[0, 0], indices=[0, 0], tokens=[1, 2], finished=ends))
    assert await sink.next() == wire.Tokens(handles=[stays], epochs=[0], indices=[0], tokens=[2], finished=ends[1:])
    assert sink.frames.empty()


async def test_an_unreadable_frame_harms_no_other(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink()
    handle = rig.client.submit(make_request(), sink)
    await rig.engine.say(b"\xc1")
    await rig.engine.say(wire.Refused(handle=handle, epoch=0, status=429, code="queue_full", message="full", retry_after_s=2.5))
    assert await sink.next() == wire.Refused(
        handle=handle, epoch=0, status=429, code="queue_full", message="full", retry_after_s=2.5
    )
    assert "cannot be read" in caplog.text


async def test_lost_incarnation_drops_requests_and_the_next_serves(rig: Rig) -> None:
    sink = ListSink()
    changes: list[wire.State] = []
    unsubscribe = rig.client.subscribe(lambda: changes.append(rig.client.state()))
    lost = rig.client.submit(make_request(), sink)
    rig.client.end_incarnation(2, "rank 1 was killed")
    with pytest.raises(BackendError, match="rank 1 was killed"):
        rig.client.submit(make_request(), sink)
    rig.client.abort([lost])
    assert rig.client.load() == NO_LOAD
    engine = rig.rebind()
    rig.client.serve(ASSETS)
    handle = rig.client.submit(make_request(), sink)
    assert (await engine.take_submit()).handle == handle
    await engine.say(wire.Tokens(handles=[lost, handle], epochs=[0, 0], indices=[0, 0], tokens=[1, 2], finished=[]))
    assert await sink.next() == wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[2], finished=[])
    unsubscribe()
    rig.client.end_incarnation(3, "again")
    assert changes == [
        wire.State(serving=False, incarnation=2, reason="rank 1 was killed"),
        wire.State(serving=True, incarnation=2),
    ]


async def test_loss_names_the_suspected_requests(rig: Rig) -> None:
    rig.client.submit(msgspec.structs.replace(make_request(), alone=True), ListSink())
    assert rig.client.has_lone_request
    rig.client.end_incarnation(2, "rank 1 was killed")
    assert (rig.client.state().cause, rig.client.has_lone_request) == ("alone", False)
    rig.client.end_incarnation(3, "pod 1 left", is_outside=True)
    assert rig.client.state().cause == "outside"


async def test_a_request_can_be_handed_to_another_sink(rig: Rig) -> None:
    first, second = ListSink(), ListSink()
    handle = rig.client.submit(make_request(), first)
    rig.client.reassign([handle, handle + 1], second)
    await rig.engine.take_submit()
    await rig.engine.say(wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[1], finished=[]))
    assert await second.next() == wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[1], finished=[])


async def test_assets_are_unknown_until_an_incarnation_served() -> None:
    client = EngineClient(FakeMeter())
    backend = LocalBackend(client)
    with pytest.raises(BackendError) as caught:
        backend.assets()
    assert (caught.value.status, caught.value.code) == (503, "model_loading")
    assert backend.not_ready() == "starting"
    client.serve(ASSETS)
    assert backend.assets() is ASSETS
    assert backend.not_ready() is None
    client.close()


async def test_however_a_request_ends_it_is_counted_once(rig: Rig) -> None:
    sink = ListSink()
    left, refused, lost = (rig.client.submit(make_request(2), sink) for _ in range(3))
    rig.client.abort([left, left])
    await rig.engine.say(wire.Refused(handle=refused, epoch=0, status=429, code="queue_full", message="no"))
    await rig.engine.say(wire.Tokens(handles=[lost], epochs=[0], indices=[0], tokens=[7], finished=[], queue_times_s=[0.5]))
    while not rig.meter.queue_times_s:
        await asyncio.sleep(0.01)
    rig.client.end_incarnation(2, "gone")
    rig.client.end_incarnation(3, "gone")
    assert [(end.reason, end.generated_tokens) for end in rig.meter.ends] == [("abort", 0), ("error", 0), ("error", 1)]
    assert rig.meter.queue_times_s == [0.5]


async def test_draining_client_finishes_its_requests_only(rig: Rig) -> None:
    backend = LocalBackend(rig.client)
    running = asyncio.create_task(drain(backend, make_request(2)))
    while not rig.client.is_busy:
        await asyncio.sleep(0.01)
    rig.client.drain("leaving")
    assert rig.client.state() == wire.State(serving=False, incarnation=1, reason="leaving", draining=True, served=SERVED)
    assert backend.not_ready() == "leaving"
    with pytest.raises(BackendError) as caught:
        rig.client.submit(make_request(2), ListSink())
    assert (caught.value.status, caught.value.code) == (503, "draining")
    handle = next(iter(rig.client._open))
    await rig.engine.say(
        wire.Tokens(handles=[handle], epochs=[0], indices=[0], tokens=[7], finished=[wire.Finished(handle, 0, "stop")])
    )
    assert await running == [Delta(index=0, tokens=[7], finish="stop")]
    rig.client.serve(ASSETS)
    assert not rig.client.state().serving


async def test_stream_open_after_draining_gets_a_reason(rig: Rig) -> None:
    backend = LocalBackend(rig.client)
    running = asyncio.create_task(drain(backend, make_request(2)))
    while not rig.client.is_busy:
        await asyncio.sleep(0.01)
    rig.client.drain("leaving")
    rig.client.refuse("gone")
    assert rig.client.state() == wire.State(serving=False, incarnation=1, reason="gone", cause="outside")
    with pytest.raises(BackendError, match="gone") as caught:
        await running
    assert (caught.value.status, caught.value.code) == (503, "shutting_down")
    assert "lost its engine" not in caught.value.message


async def test_engine_failure_while_draining_reports_the_stopping_pod(rig: Rig) -> None:
    running = asyncio.create_task(drain(LocalBackend(rig.client), make_request(2)))
    while not rig.client.is_busy:
        await asyncio.sleep(0.01)
    rig.client.drain("the pod is stopping")
    rig.client.end_incarnation(2, "rank 0 was killed")
    with pytest.raises(BackendError, match="the pod is stopping: rank 0 was killed") as caught:
        await running
    assert caught.value.code == "shutting_down"


async def test_tokens_of_one_step_share_the_elapsed_time(rig: Rig) -> None:
    sink = ListSink()
    one, other = (rig.client.submit(make_request(5), sink) for _ in range(2))
    await rig.engine.say(wire.Tokens(handles=[one, other], epochs=[0, 0], indices=[0, 0], tokens=[7, 7], finished=[]))
    await rig.engine.say(
        wire.Tokens(handles=[one, one, one, one, other], epochs=[0] * 5, indices=[1, 2, 3, 4, 1], tokens=[7] * 5, finished=[])
    )
    await sink.next()
    await sink.next()
    assert rig.meter.gaps == [0.25] * 4 + [1.0]
