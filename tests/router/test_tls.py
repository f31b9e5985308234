"""Routers that serve HTTPS: clients, the operator, other routers, and commands in the pod."""

import asyncio
import base64
import json
import logging
import os
import pathlib
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import httpx
import pytest

from phalanx_api.summary import BalancePolicy
from phalanx_operator.apply.certificates import OperatorIdentity
from phalanx_operator.kube.client import SECRETS
from phalanx_operator.routers import PollTiming, RouterPoller, RouterTarget
from phalanx_router.__main__ import main
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.links.endpoints import Metadata, Pod, PodStatus, StaticLeaders, leaders_of
from phalanx_router.program import read_certificates
from tests.certificates import issue, mount_certificate, served_certificate
from tests.control.fake_kube import FakeKube
from tests.polling import until
from tests.router.fakes import TOKEN, FakeLeader, make_settings
from tests.router.programs import program, read

FIRST, SECOND = issue("localhost"), issue("localhost")
BODY = {"prompt": "hello", "max_tokens": 9, "stream": True}


@asynccontextmanager
async def https_router(
    token_file: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[int, FakeLeader, pathlib.Path]]:
    """Port of a router over a leader that holds after three tokens, and the folder of its certificate."""
    folder = tmp_path / "tls"
    mount_certificate(folder, FIRST)
    files = ["--ssl-certfile", str(folder / "tls.crt"), "--ssl-keyfile", str(folder / "tls.key")]
    async with program(token_file, caplog, *files, "--lame-duck-s", "0", "--drain-s", "0") as (url, leader, serving):
        assert url.startswith("https://")
        yield int(url.rpartition(":")[2]), leader, folder
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0


async def test_renewed_certificate_interrupts_no_stream(
    token_file: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    verifying = ssl.create_default_context(cadata=FIRST.certificate)
    async with https_router(token_file, tmp_path, caplog) as (port, leader, folder), asyncio.timeout(30):
        async with httpx.AsyncClient(base_url=f"https://localhost:{port}", trust_env=False, verify=verifying, timeout=20) as http:
            async with http.stream("POST", "/v1/completions", json=BODY) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                mount_certificate(folder, SECOND)
                while await asyncio.to_thread(served_certificate, "127.0.0.1", port) != SECOND.der:
                    await asyncio.sleep(0.1)
                leader.release()
                assert [line async for line in lines if line][-1] == "data: [DONE]"
            page = (await http.get("/metrics")).text  # on the connection that was open
        assert 'phalanx_tls_certificate_reload_failed{purpose="clients"} 0.0' in page and "not_after_timestamp_seconds" in page
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            async with httpx.AsyncClient(trust_env=False, verify=verifying) as other:
                await other.get(f"https://localhost:{port}/healthz")
        with pytest.raises(httpx.RemoteProtocolError):
            async with httpx.AsyncClient(trust_env=False) as plain:
                await plain.get(f"http://localhost:{port}/healthz")


async def test_operator_polls_and_commands_call_by_https(
    token_file: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    kube = FakeKube()
    token = base64.b64encode(TOKEN.encode()).decode()
    kube.put(SECRETS, {"metadata": {"name": "chat-token", "namespace": "team"}, "data": {"token": token}})
    async with https_router(token_file, tmp_path, caplog) as (port, _, folder), aiohttp.ClientSession() as http:
        poller = RouterPoller(kube, http, lambda key: None, OperatorIdentity(kube), PollTiming(pause_s=0.01))
        target = RouterTarget("uid-0", f"127.0.0.1:{port}", is_https=True)
        try:
            poller.publish(("team", "chat"), [target], BalancePolicy(), 15.0)
            await until(lambda: poller.fleet(("team", "chat"), [target]).answered == 1)
        finally:
            await poller.close()
        call = ["summary", "--port", str(port), "--token-file", token_file]
        assert await asyncio.to_thread(main, [*call, "--ssl-certfile", str(folder / "tls.crt")]) == 0
        assert json.loads(capsys.readouterr().out)["router"]
        assert await asyncio.to_thread(main, [*call, "--ssl-certfile", str(folder / "other.crt")]) == 1, "it calls by HTTP"


async def test_router_replicates_journals_to_a_router_with_https(
    token_file: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "phalanx_router.resume.peers")
    async with https_router(token_file, tmp_path, caplog) as (port, *_):
        app, _ = make_router(
            make_settings(), StaticLeaders(()), RouterOptions(peers=StaticLeaders([f"https://127.0.0.1:{port}"]))
        )
        async with app.router.lifespan_context(app):
            await until(lambda: "replicating journals to a peer" in caplog.text)


def test_pods_show_their_scheme_by_annotation() -> None:
    status = PodStatus(phase="Running", pod_ip="10.0.0.1")
    pods = [
        Pod(Metadata(uid="a", annotations={"phalanx.dev/scheme": "https"}), status),
        Pod(Metadata(uid="b", annotations={}), status),
    ]
    assert {key: endpoint.is_https for key, endpoint in leaders_of(pods).items()} == {"a": True, "b": False}


def test_a_certificate_needs_its_key(token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(token_file, "--leaders", "a:1", "--ssl-certfile", "tls.crt")
    assert "--ssl-certfile and --ssl-keyfile together" in capsys.readouterr().err


def test_router_with_an_unusable_certificate_names_the_file(token_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--ssl-certfile", "/nowhere/tls.crt", "--ssl-keyfile", "/nowhere/tls.key"]
    with pytest.raises(SystemExit) as caught:
        read_certificates(read(token_file, "--leaders", "a:1", *files))
    assert caught.value.code == 2
    assert "argument --ssl-certfile: /nowhere/tls.crt cannot be read: No such file" in capsys.readouterr().err
