"""Programs of different protocol versions refuse each other and name both versions."""

import asyncio
import logging

import msgspec
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from phalanx_api import wire
from phalanx_api.conditions import find_condition
from phalanx_api.summary import BalancePolicy, RouterSummary, SummaryRequest, UnknownVersion
from phalanx_api.wire import PROTOCOL_VERSION
from phalanx_frontend.backend import BackendError
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.resume import peer_wire
from tests.control.polled_routers import KEY, polled_routers
from tests.control.summaries import summary
from tests.control.worlds import World as Operated
from tests.polling import until
from tests.router.api_servers import http_server
from tests.router.fakes import TOKEN, FakeLeader, Leaders, Script, make_request, make_settings, read_stream
from tests.router.polled_routers import polled_router

OTHER = PROTOCOL_VERSION + 1


async def test_router_reports_a_leader_that_refuses_its_version(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with polled_router(FakeLeader("far", Script(protocol_version=OTHER)), ready=0) as router:
        await until(lambda: any(link.version_error for link in router.fleet.links.all()))
        answer = await router.poll()
        assert [one.group for one in answer.unknown_versions] == ["far"]
        assert f"link version {OTHER}" in answer.unknown_versions[0].why
        assert f"this router supports {PROTOCOL_VERSION}" in answer.unknown_versions[0].why
        with pytest.raises(BackendError, match="no group is ready"):
            await read_stream(router.fleet, make_request())
        logged = [record for record in caplog.records if "4426" in getattr(record, "why", "")]
        assert 1 <= len(logged) <= 2, "one line when it starts, not one per attempt"


async def test_router_reports_a_leader_that_answers_in_another_version() -> None:
    odd = FakeLeader(
        "odd",
        Script(first=wire.encode(wire.Welcome(protocol_version=OTHER, group="odd", revision="r1", page_size=16, assets_hash=""))),
    )
    async with polled_router(odd, ready=0) as router:
        await until(lambda: any(link.version_error for link in router.fleet.links.all()))
        why = f"the leader supports link version {OTHER}, this router {PROTOCOL_VERSION}"
        assert (await router.poll()).unknown_versions == [UnknownVersion("odd", why)]


async def test_a_leader_of_the_right_version_clears_the_report() -> None:
    leader = FakeLeader("far", Script(protocol_version=OTHER))
    async with polled_router(leader, ready=0) as router:
        await until(lambda: any(link.version_error for link in router.fleet.links.all()))
        leader.script.protocol_version = PROTOCOL_VERSION
        await router.until_ready(1)
        assert (await router.poll()).unknown_versions == []


async def test_router_refuses_an_operator_of_another_version(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with polled_router(FakeLeader("a")) as router:
        response = await router.post(msgspec.json.encode(SummaryRequest(BalancePolicy(number=7), 0.0, OTHER)))
        assert (response.status_code, response.json()["error"]["code"]) == (426, "unknown_version")
        assert f"supports summary version {PROTOCOL_VERSION}, the operator sent {OTHER}" in response.text
        assert router.fleet.balancing.policy.number == 0, "the policy is ignored"
        assert any(record.message == "rejected a poll" for record in caplog.records)


@pytest.mark.parametrize("answer", [426, summary(version=OTHER)], ids=["refuses", "other version"])
async def test_operator_names_the_router_of_another_version(answer: RouterSummary | int) -> None:
    async with polled_routers() as scene:
        scene.routers[0].answers.put_nowait(answer)
        scene.publish(number=1)
        await until(lambda: scene.poller.fleet(KEY, scene.targets[:1]).unknown_versions)
        fleet = scene.poller.fleet(KEY, scene.targets[:1])
        assert not fleet.has_quorum and scene.routers[0].address in fleet.unknown_versions[0]
        assert scene.woken
        scene.routers[0].answers.put_nowait(summary())
        await until(lambda: scene.poller.fleet(KEY, scene.targets[:1]).has_quorum)
        assert scene.poller.fleet(KEY, scene.targets[:1]).unknown_versions == ()


async def test_condition_compatible_follows_the_versions() -> None:
    operated = Operated()
    await operated.settle()
    operated.cluster.start_router_pods()
    assert find_condition(operated.status.conditions, "Compatible") is None
    operated.routers.summary = summary(unknown_versions=[UnknownVersion("chat-g-1", "the leader supports link version 9")])
    await operated.reconcile()
    assert operated.condition("Compatible") == ("False", "UnknownVersion")
    assert ("Warning", "UnknownVersion") in operated.events()
    assert await operated.reconcile() == []
    operated.routers.summary = summary()
    await operated.reconcile()
    assert operated.condition("Compatible") == ("True", "VersionsAgree")


async def test_router_refuses_a_peer_of_another_version(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    app, _ = make_router(make_settings(), Leaders(), RouterOptions(peers=Leaders()))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with http_server(app) as address:
        url = f"ws://{address}{peer_wire.PEER_PATH}"
        async with connect(url, additional_headers=headers, proxy=None, compression=None) as connection:
            await connection.send(peer_wire.encode(peer_wire.Greeting("router-9", "life", OTHER)))
            with pytest.raises(ConnectionClosed) as end:
                await asyncio.wait_for(connection.recv(), 10)
    assert end.value.rcvd is not None and end.value.rcvd.code == wire.CLOSE_WRONG_VERSION
    assert any(f"router-9 {OTHER}" in getattr(record, "why", "") for record in caplog.records)
