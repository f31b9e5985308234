"""Mutual TLS between router, leader and operator, over real sockets."""

import asyncio
import base64
import json
import os
import pathlib
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from phalanx_api.summary import SUMMARY_PATH, BalancePolicy
from phalanx_frontend.tls import Certificate
from phalanx_operator.apply.certificates import OperatorIdentity
from phalanx_operator.kube.client import SECRETS
from phalanx_operator.routers import PollTiming, RouterPoller, RouterTarget
from phalanx_router.__main__ import main
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_runtime.server.link.endpoint import LinkEndpoint
from phalanx_runtime.server.pod_server import guarded_config
from tests.certificates import Authority
from tests.control.fake_kube import FakeKube
from tests.polling import until
from tests.router.api_servers import QuietServer, make_link_settings
from tests.router.fakes import TOKEN, make_request, make_settings, read_stream
from tests.router.http_routers import PrintableEngine
from tests.router.programs import program

KEY = ("team", "chat")


@pytest.fixture
def authority() -> Authority:
    return Authority()


async def _answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


@asynccontextmanager
async def certified_leader(certificate: Certificate) -> AsyncIterator[tuple[int, PrintableEngine]]:
    """Port of the link of a leader over a scripted engine, guarded as in a pod."""
    engine = PrintableEngine()
    routes = [LinkEndpoint(engine, make_link_settings()).route(), Route("/metrics", _answer), Route("/v1/models", _answer)]
    server = QuietServer(guarded_config(Starlette(routes=routes), "127.0.0.1", 0, certificate))
    server.config.lifespan = "off"
    tasks = [asyncio.create_task(engine.run()), asyncio.create_task(server.serve())]
    try:
        await until(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1], engine
    finally:
        server.should_exit = True
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def linked_router(certificate: Certificate | None, port: int, ready: int = 1) -> AsyncIterator[RouterBackend]:
    settings = make_settings(tick_s=0.05)
    settings = replace(settings, link=replace(settings.link, certificate=certificate))
    app, fleet = make_router(settings, StaticLeaders([f"internal://127.0.0.1:{port}"]))
    async with app.router.lifespan_context(app):
        await until(lambda: fleet.links.num_ready == ready)
        yield fleet


async def status_of(port: int, certificate: Certificate, path: str, role: str = "group") -> int:
    """Status of a call with this certificate at a server of this role."""
    async with aiohttp.ClientSession() as http:
        url = f"https://127.0.0.1:{port}{path}"
        async with http.get(url, ssl=certificate.client_context, server_hostname=certificate.peer_name(role)) as answer:
            return answer.status


async def test_link_survives_new_certificates_and_a_new_authority(authority: Authority, tmp_path: pathlib.Path) -> None:
    folders = {role: tmp_path / role for role in ("group", "router")}
    group, router = (authority.certificate(folders[role], role) for role in ("group", "router"))
    async with asyncio.timeout(60), certified_leader(group) as (port, engine), linked_router(router, port) as fleet:
        engine.hold = 3
        stream = asyncio.create_task(read_stream(fleet, make_request(max_tokens=9)))
        await until(lambda: engine.num_submitted == 1)
        authority.add()
        for role, certificate in (("group", group), ("router", router)):
            authority.mount(folders[role], role, issued_by=1)  # both are trusted, the former signs
            certificate.refresh()
            assert await status_of(port, router, "/metrics") == 200
        authority.mount(folders["group"], "group")  # the new one signs
        group.refresh()
        assert await status_of(port, router, "/metrics") == 200
        authority.pairs.pop()  # the former one ends
        for role, certificate in (("group", group), ("router", router)):
            former = certificate.current
            authority.mount(folders[role], role)
            certificate.refresh()
            assert certificate.failure == "" and certificate.current is not former
        assert await status_of(port, router, "/metrics") == 200
        engine.hold = 10**9
        result = await stream
        assert len(result.tokens) == 9, "the stream continued on the first connection"
        assert engine.num_submitted == 1


async def test_former_authority_is_refused_once_it_is_dropped(authority: Authority, tmp_path: pathlib.Path) -> None:
    group = authority.certificate(tmp_path / "group", "group")
    late = authority.certificate(tmp_path / "late", "router")
    async with certified_leader(group) as (port, _):
        assert await status_of(port, late, "/metrics") == 200
        authority.add()
        authority.pairs.pop()
        authority.mount(tmp_path / "group", "group")
        group.refresh()
        with pytest.raises(aiohttp.ClientError):
            await status_of(port, late, "/metrics")


async def test_nothing_is_answered_without_a_certificate(authority: Authority, tmp_path: pathlib.Path) -> None:
    stranger = Authority().certificate(tmp_path / "stranger", "router")
    trusting = ssl.create_default_context(cadata=authority.pairs[0].pem)
    trusting.check_hostname = False
    async with certified_leader(authority.certificate(tmp_path / "group", "group")) as (port, _):
        async with httpx.AsyncClient(trust_env=False, verify=trusting) as http:
            for path in ("/healthz", "/metrics", "/v1/models"):
                with pytest.raises((httpx.TransportError, ssl.SSLError)):
                    await http.get(f"https://127.0.0.1:{port}{path}")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status_of(port, stranger, "/metrics")
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://127.0.0.1:{port}/metrics")


@pytest.mark.parametrize(
    ("role", "path", "status"),
    [
        ("router", "/v1/models", 200),
        ("router", "/metrics", 200),
        ("metrics", "/metrics", 200),
        ("metrics", "/v1/models", 403),
        ("metrics", "/phalanx/link", 403),
        ("group", "/v1/models", 403),
        ("operator", "/v1/models", 403),
    ],
)
async def test_each_role_may_call_its_paths(
    authority: Authority, tmp_path: pathlib.Path, role: str, path: str, status: int
) -> None:
    async with certified_leader(authority.certificate(tmp_path / "group", "group")) as (port, _):
        assert await status_of(port, authority.certificate(tmp_path / role / "own", role), path) == status


async def test_router_trusts_no_pod_with_another_role(
    authority: Authority, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Prometheus that was broken into could otherwise take streams."""
    impostor, router = (authority.certificate(tmp_path / role, role) for role in ("metrics", "router"))
    async with certified_leader(impostor) as (port, engine), linked_router(router, port, ready=0):
        await until(lambda: "Hostname mismatch" in str([record.__dict__.get("why") for record in caplog.records]))
        assert engine.num_submitted == 0


async def test_router_without_a_certificate_names_the_reason(
    authority: Authority, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with certified_leader(authority.certificate(tmp_path / "group", "group")) as (port, _):
        async with linked_router(None, port, ready=0):
            await until(lambda: "needs a certificate" in str([record.__dict__.get("why") for record in caplog.records]))


@asynccontextmanager
async def internal_router(
    authority: Authority, token_file: str, folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[str, int]]:
    """URL for clients of a router program, and its port for the service."""
    authority.mount(folder, "router")
    caplog.set_level("INFO", "phalanx_router")
    flags = ["--internal-tls-dir", str(folder), "--internal-port", "0", "--lame-duck-s", "0", "--drain-s", "0"]
    async with program(token_file, caplog, *flags) as (url, _, serving):
        (port,) = (
            int(record.__dict__["port"]) for record in caplog.records if record.message == "listening for pods of the service"
        )
        yield url, port
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0


async def test_internal_paths_of_routers_need_a_certificate(
    authority: Authority,
    token_file: str,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kube = FakeKube()
    token = base64.b64encode(TOKEN.encode()).decode()
    kube.put(SECRETS, {"metadata": {"name": "chat-token", "namespace": "team"}, "data": {"token": token}})
    kube.put(SECRETS, {"metadata": {"name": "chat-authority", "namespace": "team"}, "data": authority.secret_data})
    folder = tmp_path / "router"
    async with internal_router(authority, token_file, folder, caplog) as (url, port), aiohttp.ClientSession() as http:
        poller = RouterPoller(kube, http, lambda key: None, OperatorIdentity(kube), PollTiming(pause_s=0.01))
        target = RouterTarget("uid-0", f"127.0.0.1:{port}", peer_name="router.chat.team.phalanx.internal")
        try:
            poller.publish(KEY, [target], BalancePolicy(), 15.0)
            await until(lambda: poller.fleet(KEY, [target]).answered == 1)
        finally:
            await poller.close()
        async with httpx.AsyncClient(trust_env=False) as client:
            headers = {"authorization": f"Bearer {TOKEN}"}
            assert (await client.post(f"{url}{SUMMARY_PATH}", headers=headers, content=b"{}")).status_code == 404
            assert (await client.get(f"{url}/metrics")).status_code == 200, "clients and Prometheus use the other port"
        own = authority.certificate(tmp_path / "own", "router")
        assert await status_of(port, own, SUMMARY_PATH, "router") == 403, "only the operator polls"
        assert await status_of(port, own, "/v1/models", "router") == 404, "clients have the other port"
        call = ["summary", "--internal-port", str(port), "--token-file", token_file, "--internal-tls-dir"]
        assert await asyncio.to_thread(main, [*call, str(folder)]) == 0
        assert json.loads(capsys.readouterr().out)["router"]


async def test_router_replicates_journals_by_mutual_tls(
    authority: Authority, token_file: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with internal_router(authority, token_file, tmp_path / "router", caplog) as (_, port):
        settings = make_settings()
        own = authority.certificate(tmp_path / "own", "router")
        settings = replace(settings, link=replace(settings.link, certificate=own))
        app, _ = make_router(settings, StaticLeaders(()), RouterOptions(peers=StaticLeaders([f"internal://127.0.0.1:{port}"])))
        async with app.router.lifespan_context(app):
            await until(lambda: "replicating journals to a peer" in caplog.text)
