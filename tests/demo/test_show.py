"""Parts of the show: ports, users, the script of faults, and its service."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from demo.faults import SCRIPT, SCRIPT_S, Fault, Stage, play
from demo.ports import forward, listen
from demo.problems import PROBLEMS
from demo.show import keys_file, tenants
from demo.traffic import Outcome, streamed
from phalanx_api.spec.inference_service import InferenceService, parse
from tests.cluster.scraping import rules, targets
from tools.errors import Failed

ROOT = Path(__file__).parents[2]


async def test_a_forwarded_connection_carries_both_directions() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read())[::-1])
        writer.close()

    listener = listen(0)
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as far:
        forwarding = asyncio.create_task(forward(listener, *far.sockets[0].getsockname()))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"abc")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b"cba"
        writer.close()
        forwarding.cancel()
        await asyncio.gather(forwarding, return_exceptions=True)


async def test_a_connection_to_nothing_is_closed() -> None:
    listener, closed = listen(0), listen(0)
    far = closed.getsockname()
    closed.close()
    forwarding = asyncio.create_task(forward(listener, *far))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    forwarding.cancel()
    await asyncio.gather(forwarding, return_exceptions=True)


def test_a_taken_port_is_replaced() -> None:
    first = listen(0)
    second = listen(first.getsockname()[1])
    assert second.getsockname()[1] not in (0, first.getsockname()[1])
    first.close()
    second.close()


def event(number: int, text: str) -> str:
    return f"id: r:{number}\ndata: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


class Router:
    """Sends an answer in pieces; each piece ends its connection."""

    def __init__(self, *pieces: str | int) -> None:
        self._pieces: Iterator[str | int] = iter(pieces)
        self.resumed_from = list[str | None]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.resumed_from.append(request.headers.get("Last-Event-ID"))
        piece = next(self._pieces)
        if isinstance(piece, int):
            return httpx.Response(piece)
        if piece.endswith("[DONE]\n\n"):
            return httpx.Response(200, text=piece)
        return httpx.Response(200, stream=Broken(piece.encode()))


class Broken(httpx.AsyncByteStream):
    """A connection that is lost after some bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self):  # type: ignore[no-untyped-def]
        yield self._content
        raise httpx.ReadError("lost")


async def answer_of(router: Router, outcome: Outcome) -> str:
    async with httpx.AsyncClient(transport=httpx.MockTransport(router), base_url="http://router") as client:
        return await streamed(client, {}, outcome)


async def test_a_user_resumes_a_lost_stream() -> None:
    router, outcome = Router(event(0, "one "), 503, event(1, "two") + "data: [DONE]\n\n"), Outcome()
    assert await answer_of(router, outcome) == "one two"
    assert router.resumed_from == [None, "r:0", "r:0"]
    assert outcome.resumed == 1


@pytest.mark.parametrize(
    ("piece", "reason"), [(400, "HTTP 400"), ('data: {"error": {"code": "group_lost"}}\n\ndata: [DONE]\n\n', "error group_lost")]
)
async def test_an_error_ends_an_answer(piece: str | int, reason: str) -> None:
    with pytest.raises(Failed, match=reason):
        await answer_of(Router(piece), Outcome())


def test_the_script_lasts_two_minutes() -> None:
    lines, waits = list[str](), list[float]()
    stage = Stage("demo", lambda _: None)
    scripted = [Fault(fault.at_s, fault.what, fault.look, lambda _: "done") for fault in SCRIPT]
    play(stage, lines.append, waits.append, scripted)
    assert lines == [line for fault in SCRIPT for line in (f"{fault.what}. {fault.look}", "done")]
    assert waits[-1] == pytest.approx(SCRIPT_S, abs=5)
    assert sorted(fault.at_s for fault in SCRIPT) == [fault.at_s for fault in SCRIPT]


@pytest.mark.parametrize("problem", [None, *PROBLEMS])
def test_the_service_is_valid_and_has_rules(problem: str | None) -> None:
    manifest = yaml.safe_load((ROOT / "demo/show.yaml").read_text())
    manifest["metadata"] |= {"namespace": "demo", "uid": "u"}
    if problem is not None:
        manifest["spec"]["engine"] |= PROBLEMS[problem].engine
    service = parse(manifest)
    assert isinstance(service, InferenceService)
    names = [group["name"] for group in rules(service)["groups"]]
    assert names == ["phalanx-demo-chat", "phalanx-operator"]


def test_one_key_may_write_in_the_console() -> None:
    rows = json.loads(keys_file(tenants(), "k"))
    assert [row["name"] for row in rows if row.get("console") == "write"] == ["admin"]
    assert len({row["key"] for row in rows}) == 3


def pod(
    name: str, labels: dict[str, str], namespace: str = "demo", ip: str = "10.0.0.1", phase: str = "Running"
) -> dict[str, object]:
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "status": {"podIP": ip, "phase": phase}}


def test_targets_are_routers_leaders_and_operators() -> None:
    service = {"phalanx.dev/service": "chat", "phalanx.dev/component": "group", "phalanx.dev/group": "g"}
    pods = [
        pod("g-0", service | {"apps.kubernetes.io/pod-index": "0"}),
        pod("g-1", service | {"apps.kubernetes.io/pod-index": "1"}),
        pod("starting", service, ip=""),
        pod("gone", service, phase="Succeeded"),
        pod("router", service | {"phalanx.dev/component": "router"}),
        pod("other", {}),
        pod("operator", {}, "phalanx-system"),
    ]
    found = {each["labels"]["pod"]: each for each in targets(pods)}
    assert {name: each["targets"] for name, each in found.items()} == {
        "g-0": ["10.0.0.1:8000"],
        "router": ["10.0.0.1:8000"],
        "operator": ["10.0.0.1:8080"],
    }
    assert found["g-0"]["labels"]["phalanx_dev_group"] == "g"
    assert found["router"]["labels"]["namespace"] == "demo"
