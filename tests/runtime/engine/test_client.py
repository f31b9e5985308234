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
    await rig.engine.say(wire.Tokens([a, b, c], [0, 1, 2], [0, 0, 0], [10, 11, 12], [wire.Finished(c, 2, "stop")]))
    assert await one.next() == wire.Tokens([a, c], [0, 2], [0, 0], [10, 12], [wire.Finished(c, 2, "stop")])
    assert await two.next() == wire.Tokens([b], [1], [0], [11], [])


async def test_details_reach_the_requesting_sink_with_its_tokens(rig: Rig) -> None:
    one, two, detail = ListSink(), ListSink(), wire.TokenDetail(-1.0, 0, [], [])
    a, b, c = (rig.client.submit(make_request(5, seed=i), sink) for i, sink in enumerate([one, two, one]))
    told = [wire.PromptDetails(a, 0, 1, [detail])]
    await rig.engine.say(wire.Tokens([], [], [], [], [], prompt_details=told))
    assert await one.next() == wire.Tokens([], [], [], [], [], prompt_details=told)
    await rig.engine.say(wire.Tokens([a, b, c], [0, 0, 0], [0, 0, 0], [1, 2, 3], [], details=[None, None, detail]))
    assert await one.next() == wire.Tokens([a, c], [0, 0], [0, 0], [1, 3], [], details=[None, detail])
    assert await two.next() == wire.Tokens([b], [0], [0], [2], [], details=[None])


async def test_details_wait_in_the_mailbox_for_their_tokens(rig: Rig) -> None:
    detail = wire.TokenDetail(-1.0, 0, [], [])
    stream = LocalBackend(rig.client).generate(make_request())
    first = asyncio.ensure_future(anext(stream))
    handle = (await rig.engine.take_submit()).handle
    await rig.engine.say(wire.Tokens([], [], [], [], [], prompt_details=[wire.PromptDetails(handle, 0, 1, [detail])]))
    await rig.engine.say(wire.Tokens([handle], [0], [0], [5], [], details=[detail]))
    assert await first == Delta(0, [5], None, 0, [detail], [detail])
    await rig.engine.say(wire.Tokens([handle], [0], [1], [6], [wire.Finished(handle, 0, "stop")], details=[detail]))
    assert await anext(stream) == Delta(1, [6], "stop", 0, [detail])
    await stream.aclose()


async def test_cached_tokens_come_with_the_first_token(rig: Rig) -> None:
    backend, other = LocalBackend(rig.client), ListSink()
    stream = backend.generate(make_request())
    first = asyncio.ensure_future(anext(stream))
    a, b = (await rig.engine.take_submit()).handle, rig.client.submit(make_request(5), other)
    cached = [wire.Cached(b, 0, 3), wire.Cached(a, 0, 2), wire.Cached(99, 0, 1)]
    await rig.engine.say(wire.Tokens([a, b], [0, 0], [0, 0], [5, 6], [], cached=cached))
    assert await first == Delta(0, [5], None, 2)
    assert await other.next() == wire.Tokens([b], [0], [0], [6], [], cached=cached[:1])
    await stream.aclose()
    assert [(end.reason, end.cached_tokens) for end in rig.meter.ends] == [("abort", 2)]


async def test_requests_and_tokens_are_measured(rig: Rig) -> None:
    sink = ListSink()
    handle = rig.client.submit(make_request(5), sink)
    await rig.engine.say(wire.Load(1, 2, 3, 4, 5))
    for index in range(3):
        ends = [wire.Finished(handle, 0, "length")] if index == 2 else []
        await rig.engine.say(wire.Tokens([handle], [0], [index], [7], ends))
        await sink.next()
    assert rig.client.load() == wire.Load(1, 2, 3, 4, 5)
    assert rig.meter.loads[-1] == wire.Load(1, 2, 3, 4, 5)
    assert rig.meter.steps == [1, 1, 1]
    assert rig.meter.firsts == [(5, 1.0)]
    assert rig.meter.gaps == [1.0, 1.0]
    assert rig.meter.ends == [EndedRequest("length", 5, 0, 3, 4, 3.0, 2.0)]


async def test_tokens_of_an_aborted_request_go_nowhere(rig: Rig) -> None:
    sink = ListSink()
    gone, stays = rig.client.submit(make_request(), sink), rig.client.submit(make_request(), sink)
    rig.client.abort([gone, 999])
    rig.client.abort([gone])
    assert [type(await rig.engine.take()) for _ in range(3)] == [wire.Submit, wire.Submit, wire.Abort]
    ends = [wire.Finished(gone, 0, "stop"), wire.Finished(stays, 0, "stop")]
    await rig.engine.say(wire.Refused(gone, 0, 429, "queue_full", "full"))
    await rig.engine.say(wire.Tokens([gone, stays], [0, 0], [0, 0], [1, 2], ends))
    assert await sink.next() == wire.Tokens([stays], [0], [0], [2], ends[1:])
    assert sink.frames.empty()


async def test_an_unreadable_frame_harms_no_other(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink()
    handle = rig.client.submit(make_request(), sink)
    await rig.engine.say(b"\xc1")
    await rig.engine.say(wire.Refused(handle, 0, 429, "queue_full", "full", 2.5))
    assert await sink.next() == wire.Refused(handle, 0, 429, "queue_full", "full", 2.5)
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
    await engine.say(wire.Tokens([lost, handle], [0, 0], [0, 0], [1, 2], []))
    assert await sink.next() == wire.Tokens([handle], [0], [0], [2], [])
    unsubscribe()
    rig.client.end_incarnation(3, "again")
    assert changes == [wire.State(False, 2, "rank 1 was killed"), wire.State(True, 2)]


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
    await rig.engine.say(wire.Tokens([handle], [0], [0], [1], []))
    assert await second.next() == wire.Tokens([handle], [0], [0], [1], [])


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
    await rig.engine.say(wire.Refused(refused, 0, 429, "queue_full", "no"))
    await rig.engine.say(wire.Tokens([lost], [0], [0], [7], [], queue_times_s=[0.5]))
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
    assert rig.client.state() == wire.State(False, 1, "leaving", draining=True, served=SERVED)
    assert backend.not_ready() == "leaving"
    with pytest.raises(BackendError) as caught:
        rig.client.submit(make_request(2), ListSink())
    assert (caught.value.status, caught.value.code) == (503, "draining")
    handle = next(iter(rig.client._open))
    await rig.engine.say(wire.Tokens([handle], [0], [0], [7], [wire.Finished(handle, 0, "stop")]))
    assert await running == [Delta(0, [7], "stop")]
    rig.client.serve(ASSETS)
    assert not rig.client.state().serving


async def test_stream_open_after_draining_gets_a_reason(rig: Rig) -> None:
    backend = LocalBackend(rig.client)
    running = asyncio.create_task(drain(backend, make_request(2)))
    while not rig.client.is_busy:
        await asyncio.sleep(0.01)
    rig.client.drain("leaving")
    rig.client.refuse("gone")
    assert rig.client.state() == wire.State(False, 1, "gone", cause="outside")
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
    await rig.engine.say(wire.Tokens([one, other], [0, 0], [0, 0], [7, 7], []))
    await rig.engine.say(wire.Tokens([one, one, one, one, other], [0] * 5, [1, 2, 3, 4, 1], [7] * 5, []))
    await sink.next()
    await sink.next()
    assert rig.meter.gaps == [0.25] * 4 + [1.0]
