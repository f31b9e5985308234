"""The program: settings, start, drain, exit."""

import asyncio
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.frame.programs import free_port
from phalanx_api import labels
from phalanx_api.summary import BalancePolicy
from phalanx_router.__main__ import main
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.links.endpoints import Leaders, StaticLeaders
from phalanx_router.links.leader_watch import WatchedLeaders
from phalanx_router.program import make_peers, make_source, serve
from phalanx_router.settings import parse_flags
from tests.frontend.auth.issuer import AUDIENCE, running_issuer
from tests.polling import until
from tests.router.fakes import TOKEN, make_settings
from tests.router.programs import program, read

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def test_a_policy_is_followed_from_the_start(token_file: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "policy.json"
    file.write_bytes(msgspec.json.encode(BalancePolicy(mode="Route", max_held=5)))
    settings = read(token_file, "--leaders", "a:1", "--policy-file", str(file))
    assert (settings.policy.mode, settings.policy.max_held) == ("Route", 5)
    assert read(token_file, "--leaders", "a:1").policy == BalancePolicy()


@pytest.mark.parametrize("text", [None, "{", '{"mode": "Sometimes"}'])
def test_a_policy_that_cannot_be_read_is_named(
    token_file: str, tmp_path: pathlib.Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        read(token_file, "--leaders", "a:1", "--policy-file", str(file))
    assert "--policy-file" in capsys.readouterr().err


def test_settings_of_the_contract(token_file: str) -> None:
    settings = read(
        token_file,
        *("--host", "0.0.0.0", "--port", "8000", "--service", "chat", "--namespace", "ns", "--served-model-name", "a", "b"),
    )
    assert (settings.host, settings.port, settings.service, settings.namespace) == ("0.0.0.0", 8000, "chat", "ns")
    assert (settings.served_names, settings.token.current, settings.leaders) == (("a", "b"), TOKEN, ())


def test_flags_of_a_file_give_way_to_flags(token_file: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("leaders: a:1,b:2\nport: 1\nserved-model-name: [a, b]\nconsole: true\napi-key: k1\n")
    settings = read(token_file, "--config", str(file), "--port", "2")
    assert (settings.leaders, settings.port, settings.served_names) == (("a:1", "b:2"), 2, ("a", "b"))
    assert settings.has_console and len(settings.api_keys) == 1
    file.write_text("group: g-1\ncount: 5\n")
    assert (parse_flags(["move", "--config", str(file)]).group, parse_flags(["move", "g-2", "--config", str(file)]).count) == (
        "g-1",
        5,
    )
    with pytest.raises(SystemExit) as end:
        read(token_file, "--config", str(file))
    assert end.value.code == 2 and f"--config {file}: group is no flag of serve" in capsys.readouterr().err


async def test_router_with_keys_requires_a_key(token_file: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice sk-alice -1")
    settings = read(token_file, "--leaders", "a:1", "--api-key", "sk-1", "--api-keys-file", str(file))
    assert [(key.name, key.priority) for key in settings.api_keys] == [("key-1", None), ("alice", -1)]
    app, _ = make_router(make_settings(), StaticLeaders(("a:1",)), RouterOptions(keys=settings.api_keys))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 401
        known = {"authorization": "Bearer sk-alice"}
        assert (await http.post("/v1/completions", json={"prompt": "x"}, headers=known)).status_code == 503  # no group yet
        assert (await http.get("/healthz")).status_code == 200


async def test_router_with_an_issuer_requires_a_token(token_file: str, caplog: pytest.LogCaptureFixture) -> None:
    with running_issuer() as issuer:
        flags = ("--lame-duck-s", "0", "--drain-s", "0", "--oidc-issuer", issuer.url, "--oidc-audience", AUDIENCE)
        async with program(token_file, caplog, *flags) as (url, _, serving):
            await until(lambda: issuer.num_reads)
            async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
                assert (await http.get("/v1/models")).status_code == 401
                headers = {"authorization": f"Bearer {issuer.token()}"}
                assert (await http.get("/v1/models", headers=headers)).status_code == 200
            os.kill(os.getpid(), signal.SIGTERM)
            assert await serving == 0


async def test_web_pages_of_allowed_origins_reach_the_router(token_file: str, caplog: pytest.LogCaptureFixture) -> None:
    page = {"origin": "https://chat.example"}
    flags = ("--lame-duck-s", "0", "--drain-s", "0", "--allowed-origins", page["origin"], "--api-key", "sk-1")
    async with program(token_file, caplog, *flags) as (url, _, serving):
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            preflight = await http.options("/v1/models", headers=page | {"access-control-request-method": "GET"})
            assert preflight.status_code == 200
            answers = [await http.get("/v1/models", headers=page | key) for key in ({"authorization": "Bearer sk-1"}, {})]
            assert [answer.status_code for answer in answers] == [200, 401]
            for answer in (preflight, *answers):
                assert answer.headers["access-control-allow-origin"] == page["origin"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0


def test_the_namespace_may_come_from_the_pod(token_file: str) -> None:
    assert read(token_file, "--service", "chat", POD_NAMESPACE="ns").namespace == "ns"


def test_short_drains_leave_streams_their_patience(token_file: str) -> None:
    """The operator sets `--drain-s` to `spec.drain.timeoutSeconds`; a lost group may take minutes to return."""
    drains = ("10", "3600")
    assert [read(token_file, "--leaders", "h:1", "--drain-s", drain).patience_s for drain in drains] == [600.0, 3600.0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000", "--leaders", "h:1"], ["--port", "70000"]),
        (["--port", "x", "--leaders", "h:1"], ["--port", "x"]),
        (["--leaders", "nowhere"], ["--leaders", "nowhere"]),
        (["--leaders", "h:1", "--peers", "nowhere"], ["--peers", "nowhere"]),
        (["--leaders", "h:1", "--service", "chat"], ["--leaders", "--service"]),
        ([], ["--leaders", "--service"]),
        (["--service", "chat"], ["--namespace"]),
        (["--leaders", "h:1", "--patience-s", "-1"], ["--patience-s", "-1"]),
        (["--leaders", "h:1", "--heartbeat-timeout-s", "1"], ["--heartbeat-timeout-s", "1 is too short"]),
        (["--leaders", "h:1", "--allowed-origins", "a.example"], ["--allowed-origins", "'a.example' is no origin"]),
        (["--leaders", "h:1", "--token-file", "/no/such"], ["--token-file", "/no/such"]),
        (["--leaders", "h:1", "--token-file", os.devnull], ["--token-file", "is empty"]),
        (["--leaders", "h:1", "--api-keys-file", "/no/such"], ["--api-keys-file", "/no/such"]),
        (
            ["--leaders", "h:1", "--oidc-issuer", "http://a.example", "--oidc-audience", "b"],
            ["--oidc-issuer", "http://a.example"],
        ),
    ],
    ids=[
        "port",
        "no number",
        "address",
        "peer",
        "two sources",
        "no source",
        "namespace",
        "seconds",
        "heartbeat",
        "origin",
        "no token",
        "empty token",
        "no keys",
        "no TLS",
    ],
)
def test_invalid_flag_ends_the_program_with_name_and_value(
    token_file: str, flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(token_file, *flags)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words)


async def test_leaders_come_from_the_list_or_the_cluster(
    token_file: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(await make_source(read(token_file, "--leaders", "h:1,i:2")), StaticLeaders)
    watched = read(token_file, "--service", "chat", "--namespace", "ns")
    config = tmp_path / "config"
    config.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}],"
        " users: [{name: u, user: {}}], contexts: [{name: c, context: {cluster: k, user: u}}]}"
    )
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
    for source in (await make_source(watched), await make_peers(watched)):
        assert isinstance(source, WatchedLeaders)
    assert isinstance(await make_peers(read(token_file, "--leaders", "h:1", "--peers", "i:2")), StaticLeaders)
    config.unlink()
    with pytest.raises(SystemExit) as caught:
        await make_source(watched)
    assert caught.value.code == 2


def test_main_refuses_bad_flags_before_it_starts() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--leaders", "nowhere"])
    assert caught.value.code == 2


def test_garbage_collections_exclude_the_imports(token_file: str, tmp_path: pathlib.Path) -> None:
    program = (
        "import gc, sys\nfrom phalanx_router.__main__ import main\n"
        "try: main(sys.argv[1:])\nfinally: print(gc.get_freeze_count(), len(gc.get_objects()))"
    )
    flags = ["--leaders", "127.0.0.1:9", "--token-file", token_file, "--internal-tls-dir", str(tmp_path)]
    ended = subprocess.run([sys.executable, "-c", program, "serve", *flags], capture_output=True, text=True)
    frozen, read_again = map(int, ended.stdout.split())
    assert frozen > 4 * read_again


class Broken:
    async def run(self, found: Callable[[Leaders], None]) -> None:
        raise RuntimeError("a bug")


async def test_router_of_a_cluster_answers_over_ipv4_and_ipv6(token_file: str) -> None:
    port = free_port()
    flags = ["--host", labels.ALL_ADDRESSES, "--port", str(port), "--leaders", "127.0.0.1:9", "--lame-duck-s", "0"]
    serving = asyncio.create_task(serve(read(token_file, *flags)))
    async with httpx.AsyncClient(trust_env=False) as http:

        async def answers(host: str) -> bool:
            with suppress(httpx.ConnectError):
                return (await http.get(f"http://{host}:{port}/healthz")).status_code == 200
            return False

        for host in ("127.0.0.1", "[::1]"):
            await until(lambda host=host: answers(host))  # type: ignore[misc]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0


async def test_stopped_leader_watch_ends_the_program() -> None:
    received: asyncio.Queue[BaseException] = asyncio.Queue()
    app, _ = make_router(make_settings(), Broken(), RouterOptions(on_error=received.put_nowait))
    async with app.router.lifespan_context(app), asyncio.timeout(10):
        assert str(await received.get()) == "a bug"


async def test_terminating_router_finishes_its_streams(token_file: str, caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--lame-duck-s", "0", "--drain-s", "10", "--served-model-name", "mine"]
    async with program(token_file, caplog, *flags) as (url, leader, serving), asyncio.timeout(20):
        async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
            assert (await http.get(f"{url}/readyz")).status_code == 200
            body = {"model": "mine", "prompt": "hello", "max_tokens": 9, "stream": True}
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.1)
                async with httpx.AsyncClient(trust_env=False) as other:
                    assert (await other.get(f"{url}/readyz")).status_code == 503
                    late = await other.post(f"{url}/v1/completions", json=body)
                assert late.status_code == 503
                assert late.json()["error"]["code"] == "router_leaving" and late.headers["retry-after"]
                leader.release()
                assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await serving == 0


async def test_terminating_router_closes_connections_after_answers(token_file: str, caplog: pytest.LogCaptureFixture) -> None:
    """On an open connection further requests would reach this router and be refused."""
    flags = ["--lame-duck-s", "1", "--drain-s", "10"]
    async with program(token_file, caplog, *flags) as (url, leader, serving), asyncio.timeout(20):
        port = int(url.rpartition(":")[2])
        (idle, idle_writer), (busy, busy_writer), (again, again_writer) = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(3)
        ]
        for reader, writer in ((idle, idle_writer), (again, again_writer)):
            writer.write(HEALTH)
            assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"prompt": "hello", "max_tokens": 9, "ignore_eos": True}).encode()
        fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        busy_writer.write(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
        await until(lambda: leader.steps == 3)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        again_writer.write(HEALTH)
        assert b"200 OK" in (answer := await again.read()) and b"connection: close" in answer, "it ends with its next answer"
        await idle.read()  # to its end, when the router begins to refuse
        leader.release()
        assert b"200 OK" in await busy.read(), "it ends with its answer"
        for writer in (idle_writer, busy_writer, again_writer):
            writer.close()
            await writer.wait_closed()
        assert await serving == 0


async def test_terminated_router_gives_clients_the_id_to_resume(token_file: str, caplog: pytest.LogCaptureFixture) -> None:
    async with program(token_file, caplog, "--lame-duck-s", "0", "--drain-s", "0.2") as (url, leader, serving):
        async with asyncio.timeout(20), httpx.AsyncClient(trust_env=False, timeout=20) as http:
            body = {"prompt": "hello", "max_tokens": 9, "stream": True}
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                os.kill(os.getpid(), signal.SIGTERM)
                *_, id, error = [line async for line in lines if line]
        assert "router_leaving" in error and id.removeprefix("id: ") in error
        assert await serving == 0
        assert leader.aborted == []


def test_signal_during_import_ends_the_program_cleanly() -> None:
    """The imports take a while."""
    code = (
        "import signal, sys\n"
        "class Now:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'phalanx_router.program': signal.raise_signal(signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Now())\n"
        "from phalanx_router.__main__ import main\n"
        "main(['serve', '--leaders', 'nowhere'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b""), "it exits before the flags are parsed"


@pytest.mark.parametrize(
    ("log_format", "line"), [("text", r"\d\d:\d\d:\d\d INFO    .*"), ("json", r'\{"time": .*'), ("auto", r'\{"time": .*')]
)
def test_log_lines_have_the_chosen_format(token_file: str, log_format: str, line: str) -> None:
    flags = ["--token-file", token_file, "--leaders", "127.0.0.1:9", "--port", "0", "--log-format", log_format]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "phalanx_router", "serve", *flags]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert re.fullmatch(line, process.stderr.readline().strip())
            assert Path(f"/proc/{process.pid}/coredump_filter").read_text().strip() == "00000000", "dumps have no memory"
        finally:
            process.kill()
