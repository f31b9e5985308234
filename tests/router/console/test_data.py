"""The data endpoints of the console: who may read and write what, and that no text of a request comes out."""

import asyncio

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, RouterSummary, SummaryRequest
from phalanx_router import drain_requests
from tests.polling import until
from tests.router.console.consoles import KEYS, bearing, leaders, running_console
from tests.router.fakes import TOKEN

READS = ["viewer", "fleet", "requests", "settings", "requests/1"]


@pytest.mark.parametrize("name", READS)
async def test_data_needs_a_key_of_the_api(name: str) -> None:
    async with running_console(*leaders(None), keys=KEYS) as console:
        for key in ("", "sk-eve"):
            refused = await console.get(f"/ui/api/{name}", key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["content-security-policy"]
        assert (await console.get(f"/ui/api/{name}", "sk-alice")).status_code in (200, 404)
        wrong = await console.http.delete(f"/ui/api/{name}", headers=bearing("sk-alice"))
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_tenant_sees_its_own_requests_only() -> None:
    async with running_console(*leaders(None), keys=KEYS) as console:
        await console.complete("hello", "sk-alice", "of-alice")
        await console.complete("hello", "sk-bob", "of-bob")
        for key, names in {
            "sk-alice": ["cmpl-of-alice"],
            "sk-bob": ["cmpl-of-bob"],
            "sk-root": ["cmpl-of-bob", "cmpl-of-alice"],
        }.items():
            found = (await console.data("requests", key))["requests"]
            assert [request["name"] for request in found] == names
        number = (await console.data("requests", "sk-bob"))["requests"][0]["number"]
        for id in (number, "cmpl-of-bob"):
            hidden = await console.get(f"/ui/api/requests/{id}", "sk-alice")
            assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "unknown_request")
            assert (await console.data(f"requests/{id}", "sk-root"))["request"]["tenant"] == "bob"
        assert (await console.get("/ui/api/nothing", "sk-root")).status_code == 404
        viewers = [await console.data("viewer", key) for key in ("sk-alice", "sk-root")]
        assert [(viewer["tenant"], viewer["may_write"]) for viewer in viewers] == [("alice", False), ("root", True)]


async def test_writes_need_a_key_that_may_write(caplog: pytest.LogCaptureFixture) -> None:
    """Refused orders are logged too."""
    async with running_console(*leaders(None), keys=KEYS) as console:
        for name, body in {"drain": {"group": "a"}, "move": {"request": 1, "target": "a"}}.items():
            refused = await console.post(name, body, "sk-alice")
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "console_read_only")
            line = caplog.records[-1].__dict__
            assert (line["verb"], line["caller"], line["outcome"]) == (name, "alice", "refused")
            assert "may only read" in line["why"]
            assert (await console.post(name, body)).status_code == 401
            assert (await console.post(name, {"other": 1}, "sk-root")).status_code == 400
            large = await console.post(name, {"group": "a" * 20_000}, "sk-root")
            assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    async with running_console(*leaders(None)) as console:
        refused = await console.post("drain", {"group": "a"})
        assert refused.json()["error"]["code"] == "console_read_only" and "without API keys" in refused.text
        assert (await console.data("viewer"))["sees_all"]


async def test_moved_request_shows_which_group_computed_what(caplog: pytest.LogCaptureFixture) -> None:
    async with running_console(*leaders(5, 5), keys=KEYS) as console:
        reading = asyncio.create_task(console.complete("hello", "sk-alice", "moved"))
        number = await console.until_delivered(5)
        found = await console.data("requests", "sk-root")
        source = found["requests"][0]["group"]
        target = "b" if source == "a" else "a"
        console.leaders["ab".index(target)].release()
        order = {"instance": found["instance"], "request": number}
        elsewhere = await console.post("move", order | {"instance": "x", "target": target}, "sk-root")
        assert (elsewhere.status_code, elsewhere.json()["error"]["code"]) == (409, "another_router")
        unknown = await console.post("move", order | {"target": "z"}, "sk-root")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_group")
        console.fleet.links.fleet_view.evacuating = frozenset([target])
        leaving = await console.post("move", order | {"target": target}, "sk-root")
        assert (leaving.status_code, leaving.json()["error"]["code"]) == (404, "unknown_group")
        console.fleet.links.fleet_view.evacuating = frozenset()
        same = await console.post("move", order | {"target": source}, "sk-root")
        assert (same.status_code, same.json()["error"]["code"]) == (409, "not_moved")
        with caplog.at_level("INFO", "phalanx.audit"):
            assert (await console.post("move", order | {"target": target}, "sk-root")).status_code == 202
        line = next(record.__dict__ for record in caplog.records if record.__dict__.get("outcome") == "accepted")
        assert (line["verb"], line["object"], line["target"], line["caller"]) == ("move", f"requests/{number}", target, "root")
        await reading
        details = await console.data("requests/cmpl-moved", "sk-alice")
        ended = await console.post("move", order | {"target": target}, "sk-root")
        assert ended.json()["error"]["code"] == "not_moved"
    assert [(part["group"], part["start"], part["end"]) for part in details["segments"]] == [(source, 0, 5), (target, 5, 12)]
    (move,) = details["moves"]
    assert (move["source"], move["target"], move["outcome"], move["reason"]) == (source, target, "moved", "manual")
    assert (move["pages"], move["index"], move["transfer"]) == (2, 5, "precopy")
    kinds = [event["kind"] for event in details["events"]]
    assert kinds == ["arrived", "queued", "chosen", "sent", "first token", "move started", "moved", "ended"]
    request = details["request"]
    assert (request["tokens"], request["moves"], request["replays"], request["end"]) == (12, 1, 0, "length")
    assert 0 <= request["first_token_s"] <= request["duration_s"]


async def test_fleet_has_streams_where_they_are() -> None:
    first, second = leaders(5, 5)
    async with running_console(first, second) as console:
        reading = asyncio.create_task(console.complete("hello"))
        number = await console.until_delivered(5)
        await until(lambda: all(link.group_report.load for link in console.fleet.links.all()))
        fleet = await console.data("fleet")
        assert [group["name"] for group in fleet["groups"]] == ["a", "b"]
        ((stream, group, context, moves, is_moving),) = fleet["streams"]
        assert (stream, moves, is_moving) == (number, 0, False)
        assert fleet["groups"][group]["streams"] == 1 and context > 5
        assert fleet["groups"][group]["pages"] == 10

        async def is_unchanged() -> bool:  # within a period
            known = (await console.get("/ui/api/fleet")).headers["etag"]
            return (await console.get("/ui/api/fleet", **{"if-none-match": known})).status_code == 304

        await until(is_unchanged)
        for leader in (first, second):
            leader.release()
        await reading


async def test_requested_drain_ends_the_operator_s_poll(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "phalanx.audit")
    first, second = leaders(None, None)
    async with running_console(first, second, keys=KEYS) as console:
        unknown = await console.post("drain", {"group": "z"}, "sk-root")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_group")

        async def poll(wait_s: float) -> RouterSummary:
            body = msgspec.json.encode(SummaryRequest(BalancePolicy(), wait_s, explanation=["1. kv: pages are full"]))
            response = await console.http.post(SUMMARY_PATH, content=body, headers=bearing(TOKEN))
            return msgspec.json.decode(response.content, type=RouterSummary)

        assert (await poll(0.0)).drain_requests == []
        explained = [(await console.data("fleet", key))["explanation"] for key in ("sk-root", "sk-alice")]
        assert explained == [["1. kv: pages are full"], []]
        polling = asyncio.create_task(poll(60.0))
        assert (await console.post("drain", {"group": "b"}, "sk-root")).status_code == 202
        assert [request.group for request in (await polling).drain_requests] == ["b"]
        line = next(record.__dict__ for record in caplog.records if record.__dict__.get("outcome") == "accepted")
        assert (line["verb"], line["object"], line["caller"]) == ("drain", "groups/b", "root")
        await second.send(wire.State(serving=False, draining=True, incarnation=1, served=second.state.served))
        await until(lambda: any(link.state.draining for link in console.fleet.links.all()))
        assert (await poll(0.0)).drain_requests == []
        again = await console.post("drain", {"group": "b"}, "sk-root")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "already_draining")


async def test_too_many_requested_drains_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_requests, "MAX_REQUESTS", 1)
    async with running_console(*leaders(None, None), keys=KEYS) as console:
        assert (await console.post("drain", {"group": "a"}, "sk-root")).status_code == 202
        groups = (await console.data("fleet", "sk-root"))["groups"]
        assert [group["drain_requested"] for group in groups] == [True, False]
        refused = await console.post("drain", {"group": "b"}, "sk-root")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_drains")


async def test_joined_request_has_its_own_time_to_first_token() -> None:
    (leader,) = leaders(5)
    async with running_console(leader) as console:
        console.fleet.balancing.set_policy(BalancePolicy(coalesce_requests=True))
        first = asyncio.create_task(console.complete("a b c"))
        await console.until_delivered(5)
        second = asyncio.create_task(console.complete("a b c"))
        await until(lambda: any(not session.is_computing for session in console.fleet.sessions))
        await until(lambda: all(session.first_token_at is not None for session in console.fleet.sessions))
        leader.release()
        assert await first and await second
        joined, computed = (await console.data("requests"))["requests"]
        assert (joined["end"], computed["end"]) == ("length", "length") and len(leader.submitted) == 1
        assert 0 <= joined["first_token_s"] <= joined["duration_s"] < computed["duration_s"]
        details = await console.data(f"requests/{joined['number']}")
        assert [event["kind"] for event in details["events"]][:3] == ["arrived", "joined", "first token"]


async def test_no_text_of_a_request_comes_out() -> None:
    prompt = "the secret marker of a prompt"
    async with running_console(*leaders(None, None), keys=KEYS) as console:
        lines = await console.complete(prompt, "sk-alice", "marked", max_tokens=60)
        output = "".join(msgspec.json.decode(line[6:])["choices"][0]["text"] for line in lines.splitlines() if '"text"' in line)
        assert len(output) > 30
        (request,) = (await console.data("requests", "sk-root"))["requests"]
        for name in ("viewer", "fleet", "requests", "settings", "requests/cmpl-marked", f"requests/{request['number']}"):
            text = (await console.get(f"/ui/api/{name}", "sk-root")).text
            assert "secret" not in text and output[5:20] not in text and "marker" not in text
            assert TOKEN not in text and "sk-" not in text


async def test_secret_stream_name_is_not_shown() -> None:
    async with running_console(*leaders(None)) as console:
        for name in ("", "of-client"):
            lines = await console.complete("hello", name=name)
            secret = next(line for line in lines.splitlines() if line.startswith("id: ")).removeprefix("id: ").partition(":")[0]
            assert len(secret) >= 32 and secret not in (await console.get("/ui/api/requests")).text
