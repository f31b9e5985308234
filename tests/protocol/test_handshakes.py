"""Programs of this version beside those of the version before, of a later one, and of one that shares none with us.

The peers of the version before say the recorded bytes; unknown versions are refused with a word, and nothing waits for ever.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from phalanx_api import wire
from phalanx_api.conditions import find_condition
from phalanx_api.summary import Asked, BalancePolicy, RouterSummary, UnknownVersion
from phalanx_api.wire.versions import LINK
from phalanx_frontend.backend import BackendError, Delta
from phalanx_router.backend import Fleet
from phalanx_router.links.endpoints import Endpoint
from phalanx_router.metrics import RouterMetrics
from phalanx_router.resume import peer_wire
from phalanx_router.resume.peers import Peers
from tests.control.summaries import summary
from tests.control.test_asking import Scene, scene
from tests.control.worlds import World as Operated
from tests.protocol import earlier, samples
from tests.protocol.old_leader import KNOWN, RECORDED, OldLeader, recorded, running_old_leader
from tests.protocol.old_peer import running_old_peer
from tests.router.doors import FakeEngine, http_server, running_leader
from tests.router.fakes import TOKEN, FakeLeader, Leaders, Script, expected, hear, make_request, make_settings
from tests.router.test_leader_link import dial, receive
from tests.router.test_peers import make_run, say
from tests.router.test_summary import running_router

__all__ = ["scene"]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


# Routers and leaders


@asynccontextmanager
async def running_fleet(endpoint: Endpoint) -> AsyncIterator[Fleet]:
    """A router's fleet with this leader alone."""
    fleet = Fleet(make_settings(), RouterMetrics(CollectorRegistry()), draw=lambda: 0.0)
    task = asyncio.create_task(fleet.run(Leaders(endpoint)))
    try:
        yield fleet
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def first_delta(fleet: Fleet, request: wire.Request) -> Delta:
    """What comes first of the stream, which is closed then."""
    stream = fleet.generate(request)
    assert isinstance(stream, AsyncGenerator)
    async with asyncio.timeout(20), aclosing(stream):
        async for item in stream:
            if isinstance(item, Delta):
                return item
    raise AssertionError("it ended without a token")


async def submitted(leader: OldLeader, stream: Coroutine[None, None, Delta]) -> "asyncio.Task[Delta]":
    """The stream under way, once the leader has its request."""
    before = len(leader.handles)
    task = asyncio.create_task(stream)
    await until(lambda: len(leader.handles) > before)
    return task


async def test_a_leader_speaks_with_a_router_of_the_version_before() -> None:
    engine = FakeEngine()
    async with running_leader(engine) as (address, _), dial(address) as connection:
        await connection.send(recorded("to_leader", "hello"))
        first = wire.decode_from_leader(await connection.recv(decode=False))
        assert isinstance(first, wire.Welcome) and first.protocol_version == 1
        await connection.send(recorded("to_leader", "send_pages"))
        assert (await receive(connection, wire.PageChanges)).is_snapshot
        await connection.send(wire.encode(wire.Submit(7, make_request(max_tokens=2))))
        await until(lambda: engine.submitted)
        engine.step()
        assert (await receive(connection, wire.Tokens)).tokens == expected([1, 2, 3], 1)
        await connection.send(recorded("to_leader", "abort"))
        await until(lambda: engine.aborted)


async def test_a_router_speaks_with_a_leader_of_the_version_before() -> None:
    """The leader says what it was recorded to say: its tokens are of handles 7 (from its index 2 on, in epoch 1) and 8."""
    requests = [make_request(id=f"earlier-{number}") for number in range(1, 7)]
    requests += [msgspec.structs.replace(samples.REQUEST, deadline_ms=None, can_resume=False), make_request(id="request-8")]
    async with running_old_leader() as (leader, endpoint), running_fleet(endpoint) as fleet:
        await until(lambda: fleet.links.num_ready)
        (link,) = fleet.links.all()
        assert leader.offered == [2, 1] and link.unknown_version == "", "it refused our version, and was asked in its own"
        assert (link.revision, link.told.page_size) == ("r1", 16)
        assert link.state == samples.FROM_LEADER["state"] and link.told.served == samples.FROM_LEADER["state"].served
        streams = [await submitted(leader, first_delta(fleet, request)) for request in requests]
        assert leader.handles == [1, 2, 3, 4, 5, 6, 7, 8]
        await leader.say("load")
        await until(lambda: link.told.load == samples.FROM_LEADER["load"])
        await leader.say("tokens")
        ended = await streams[7]
        assert (ended.index, ended.tokens, ended.finish, ended.cached_tokens) == (0, [32], "length", 3)
        begun = await streams[6]
        assert (begun.index, begun.tokens, begun.finish) == (2, [31], None)
        assert (begun.details, begun.prompt_details) == ([samples.DETAIL], [samples.DETAIL])
        link._send(wire.Disown([2]))
        streams[0].cancel()
        await until(lambda: [1] in [frame[1] for frame in leader.heard if frame[0] == "abort"])
        assert link.is_open and {frame[0] for frame in leader.heard} <= KNOWN, "it was not sent what it does not know"
        for stream in streams[1:]:
            stream.cancel()


async def test_a_later_leader_that_still_speaks_our_version_is_followed() -> None:
    async with running_leader(FakeEngine()) as (address, _), dial(address) as connection:
        await connection.send(wire.encode(wire.Hello(LINK.newest + 1, "router-0", "life", LINK.newest)))
        assert (await receive(connection, wire.Welcome)).protocol_version == LINK.newest


async def test_a_leader_of_an_unknown_version_is_told_of_and_gets_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with running_router(FakeLeader("far", Script(protocol_version=9)), ready=0) as router:
        await until(lambda: any(link.unknown_version for link in router.fleet.links.all()))
        told = await router.ask()
        assert [one.group for one in told.unknown_versions] == ["far"]
        assert "this leader speaks link version 9" in told.unknown_versions[0].why
        assert f"this router speaks {LINK}" in told.unknown_versions[0].why
        with pytest.raises(BackendError, match="no group is ready"):
            await hear(router.fleet, make_request())
        said = [record for record in caplog.records if "4426" in getattr(record, "why", "")]
        assert 1 <= len(said) <= 2, "a line when it begins, not one for each attempt"


async def test_a_leader_that_answers_in_an_unknown_version_is_told_of() -> None:
    odd = FakeLeader("odd", Script(first=wire.encode(wire.Welcome(9, "odd", "r1", 16, ""))))
    async with running_router(odd, ready=0) as router:
        await until(lambda: any(link.unknown_version for link in router.fleet.links.all()))
        told = await router.ask()
        assert told.unknown_versions == [UnknownVersion("odd", f"the leader speaks link version 9, this router {LINK}")]


async def test_a_leader_that_is_upgraded_in_place_is_forgiven() -> None:
    leader = FakeLeader("far", Script(protocol_version=9))
    async with running_router(leader, ready=0) as router:
        await until(lambda: any(link.unknown_version for link in router.fleet.links.all()))
        leader.script.protocol_version = LINK.newest
        await router.until_ready(1)
        assert (await router.ask()).unknown_versions == []


# The operator and routers


async def test_a_router_answers_an_operator_of_the_version_before() -> None:
    async with running_router(FakeLeader("a")) as router:
        response = await router.post(RECORDED["json"]["asked"].replace('"wait_s":3.0', '"wait_s":0').encode())
        assert response.status_code == 200
        assert msgspec.json.decode(response.content, type=RouterSummary).version == 1
        assert router.fleet.balancing.policy.number == 4


async def test_a_router_refuses_a_question_of_an_unknown_version(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with running_router(FakeLeader("a")) as router:
        response = await router.post(msgspec.json.encode(Asked(BalancePolicy(7), 0.0, 9, 8)))
        assert response.status_code == 426 and "answers questions of version 1 to 2" in response.text
        assert router.fleet.balancing.policy.number == 0, "a policy that nobody may understand is not obeyed"
        assert any(record.message == "question refused" for record in caplog.records)


async def test_the_operator_takes_the_summary_of_a_router_of_the_version_before(scene: Scene) -> None:
    scene.routers[0].answers.put_nowait(RECORDED["json"]["summary"].encode())
    scene.tell(number=1)
    await until(lambda: scene.asking.fleet(("team", "chat"), scene.targets[:1]).is_heard)
    fleet = scene.asking.fleet(("team", "chat"), scene.targets[:1])
    assert fleet.queued == 4 and fleet.unknown_versions == ()


async def test_a_router_of_the_version_before_understands_the_operator(scene: Scene) -> None:
    more = {"canary": "r2", "canary_percent": 5, "routing": "RoundRobin", "fails_open": False, "for_good": ["group-a"]}
    policy = msgspec.structs.replace(samples.ASKED.policy, wanted=False, **more)
    scene.routers[0].answers.put_nowait(RECORDED["json"]["summary"].encode())
    scene.asking.tell(("team", "chat"), scene.targets[:1], policy, 3.0)
    await until(lambda: len(scene.routers[0].bodies) == 2)
    first, second = (msgspec.json.decode(body, type=earlier.record("Asked")) for body in scene.routers[0].bodies)
    assert (first.wait_s, second.wait_s) == (0.0, 3.0)
    assert earlier.same_fields(second, samples.ASKED)


@pytest.mark.parametrize("answer", [426, summary(version=9)], ids=["it refuses", "it answers in it"])
async def test_the_operator_says_which_router_it_shares_no_version_with(scene: Scene, answer: RouterSummary | int) -> None:
    scene.routers[0].answers.put_nowait(answer)
    scene.tell(number=1)
    await until(lambda: scene.asking.fleet(("team", "chat"), scene.targets[:1]).unknown_versions)
    fleet = scene.asking.fleet(("team", "chat"), scene.targets[:1])
    assert not fleet.is_heard and scene.routers[0].address in fleet.unknown_versions[0]
    assert scene.woken
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: scene.asking.fleet(("team", "chat"), scene.targets[:1]).is_heard)
    assert scene.asking.fleet(("team", "chat"), scene.targets[:1]).unknown_versions == ()


async def test_the_condition_says_who_shares_no_version_and_ends_with_it() -> None:
    operated = Operated()
    await operated.settle()
    operated.cluster.start_router_pods()
    assert find_condition(operated.status.conditions, "Compatible") is None
    operated.routers.says = summary(unknown_versions=[UnknownVersion("chat-g-1", "the leader speaks link version 9")])
    await operated.look()
    assert operated.condition("Compatible") == ("False", "UnknownVersion")
    assert ("Warning", "UnknownVersion") in operated.notes()
    assert await operated.look() == []
    operated.routers.says = summary()
    await operated.look()
    assert operated.condition("Compatible") == ("True", "VersionsAgree")


# Routers among themselves


async def greeted(greeting: bytes) -> ConnectionClosed | None:
    """How a router's peer door ends a connection that begins so; None when it takes it."""
    from phalanx_router.app import make_router

    app, _ = make_router(make_settings(), Leaders(), peers=Leaders())
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with http_server(app) as address:
        url = f"ws://{address}{peer_wire.PEER_PATH}"
        async with connect(url, additional_headers=headers, proxy=None, compression=None) as connection:
            await connection.send(greeting)
            await connection.send(recorded("peer", "wanted"))
            try:
                answer = peer_wire.decode(await asyncio.wait_for(connection.recv(decode=False), 10))
            except ConnectionClosed as end:
                return end
    assert answer == peer_wire.Told([])
    return None


async def test_a_router_takes_the_greeting_of_the_version_before() -> None:
    assert await greeted(recorded("peer", "greeting")) is None


async def test_a_router_refuses_a_peer_of_an_unknown_version(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    end = await greeted(peer_wire.encode(peer_wire.Greeting("router-9", "life", 9, 8)))
    assert end is not None and end.rcvd is not None and end.rcvd.code == 4426
    assert any("router-9 9" in getattr(record, "why", "") for record in caplog.records)


async def test_a_router_speaks_with_a_peer_of_the_version_before() -> None:
    """The peer gets a journal from its begin to its end, and is asked for a stream that it has."""
    run = make_run("request-9")
    settings = make_settings().link
    async with running_old_peer() as (old, endpoint):
        peers = Peers(settings, lambda: [run])
        task = asyncio.create_task(peers.run(Leaders(endpoint)))
        await until(lambda: old.of("Changes"))
        say(run, 3)
        peers.grown(run)
        await until(lambda: len(old.of("Changes")) == 2)
        peers.closed(run, "length", False)
        await until(lambda: len(old.of("Changes")) == 3)
        assert await peers.ask(["request-1"]) == samples.PEER["told"].copies
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert all(earlier.same_fields(one, peer_wire.Greeting(settings.router, settings.instance)) for one in old.of("Greeting"))
    assert [type(frame) for frame in old.heard[1]] == [earlier.record("Greeting"), earlier.record("Wanted")]
    assert old.of("Wanted")[0].ids == ["request-1"]
    begun, grown, ended = old.of("Changes")
    ((number, copy),) = begun.begun
    assert earlier.same_fields(copy.request, msgspec.structs.replace(run.stream.journal.replay(), delivered=[]))
    assert (grown.numbers, grown.counts, grown.tokens) == ([number], [3], run.stream.journal.delivered)
    assert [(one.number, one.finish, one.forgotten) for one in ended.ended] == [(number, "length", False)]
