"""Pods with certificates: rendezvous and HTTP by mutual TLS, probes without, over fake ranks."""

import asyncio
from pathlib import Path

import httpx
import pytest

from bench.frame.programs import free_port
from phalanx_runtime.server.serve import make_server
from phalanx_runtime.server.supervision.incarnation import Event
from phalanx_runtime.server.supervision.rendezvous import LeaderRendezvous, WorkerRendezvous
from tests.certificates import Authority
from tests.polling import until
from tests.runtime.pods import make_model
from tests.runtime.server.serving_pods import Running, make_settings, served


def port_of(running: Running, listener: int) -> int:
    """Port of a listener: 0 needs a certificate, 1 answers probes."""
    return int(running.server.servers[listener].sockets[0].getsockname()[1])


async def probe(running: Running, path: str) -> int:
    return (await running.http.get(f"http://127.0.0.1:{port_of(running, 1)}{path}")).status_code


async def test_group_of_two_pods_serves_by_mutual_tls(tmp_path: Path) -> None:
    authority = Authority()
    port = str(free_port())
    flags = ["-tp", "2", "--nnodes", "2", "--master-port", port, "--health-port", "0", "--internal-tls-dir"]
    folders = [str(authority.mount(tmp_path / f"pod-{pod}", "group")) for pod in (0, 1)]
    folder = make_model(tmp_path / "tiny")
    first, second = (make_settings(folder, *flags, own, "--node-rank", str(pod)) for pod, own in enumerate(folders))
    async with served(first, "ready") as leader, served(second, "ready") as worker:

        async def are_ready() -> bool:
            return [await probe(pod, "/readyz") for pod in (leader, worker)] == [200, 200]

        await until(are_ready)
        router = authority.certificate(tmp_path / "router", "router")
        async with httpx.AsyncClient(trust_env=False, verify=router.client_context) as http:
            url = f"https://127.0.0.1:{port_of(leader, 0)}"
            name = {"sni_hostname": router.peer_name("group")}
            page = (await http.get(f"{url}/metrics", extensions=name)).text
            assert 'phalanx_tls_certificate_not_after_timestamp_seconds{purpose="internal"}' in page
            body = {"model": "tiny", "prompt": "hello"}
            assert (await http.post(f"{url}/v1/completions", json=body, extensions=name)).status_code == 200
        with pytest.raises(httpx.TransportError):
            await leader.get("/metrics")
        assert [await probe(leader, path) for path in ("/healthz", "/metrics", "/v1/models")] == [200, 404, 404]
        assert (await leader.http.post(f"http://127.0.0.1:{port_of(leader, 1)}/readyz")).status_code == 404


@pytest.mark.parametrize("role", ["router", "stranger"])
async def test_pod_of_another_role_or_service_does_not_join(role: str, tmp_path: Path) -> None:
    """It knows the token."""
    authority, events, losses = Authority(), list[Event](), list[str]()
    issuer = Authority() if role == "stranger" else authority
    own = authority.certificate(tmp_path / "leader", "group")
    leader = LeaderRendezvous(lambda: ["token"], 3, events.append, certificate=own)
    port = await leader.listen("127.0.0.1", 0)
    certificate = issuer.certificate(tmp_path / "worker", "group" if role == "stranger" else role)
    worker = WorkerRendezvous(lambda: ["token"], 1, 3, lambda command: None, certificate=certificate)
    joining = asyncio.create_task(worker.run("127.0.0.1", port, losses.append))
    await until(lambda: len(losses) > 0)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    await leader.close()
    assert events == []


def test_pod_with_an_unusable_certificate_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        make_server(make_settings(make_model(tmp_path / "tiny"), "--internal-tls-dir", str(tmp_path / "none")))
    assert caught.value.code == 2
    assert "argument --internal-tls-dir: " in capsys.readouterr().err
