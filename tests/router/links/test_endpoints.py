"""Leaders are the leader pods of the service; while the API server fails the last list remains."""

import asyncio

import msgspec
import pytest

from phalanx_router.links.endpoints import Endpoint, Leaders, Pod, StaticLeaders, leaders_of
from tests.polling import until
from tests.router.kube import FakeApi, make_pod, watching


@pytest.mark.parametrize(
    ("pod", "endpoint"),
    [
        (make_pod("u1"), Endpoint(key="u1", address="10.0.0.1:8000", group="chat-g-u1", created="2026-01-01T00:00:00Z")),
        (
            make_pod("u1", ip="fd00::7"),
            Endpoint(key="u1", address="[fd00::7]:8000", group="chat-g-u1", created="2026-01-01T00:00:00Z"),
        ),
        (
            make_pod("u1", is_leaving=True),
            Endpoint(key="u1", address="10.0.0.1:8000", group="chat-g-u1", created="2026-01-01T00:00:00Z", is_leaving=True),
        ),
        (
            make_pod("u1", draining=True),
            Endpoint(key="u1", address="10.0.0.1:8000", group="chat-g-u1", created="2026-01-01T00:00:00Z", is_leaving=True),
        ),
        (make_pod("u1", ip=""), None),
        (make_pod("u1", phase="Failed"), None),
        (make_pod("u1", phase="Succeeded"), None),
        ({"metadata": {"uid": "u1"}}, None),
    ],
    ids=["running", "IPv6", "leaving", "draining", "no address yet", "failed", "ended", "nothing known"],
)
def test_leaders_of_pods(pod: dict[str, dict[str, object]], endpoint: Endpoint | None) -> None:
    assert leaders_of([msgspec.convert(pod, Pod)]) == ({} if endpoint is None else {"u1": endpoint})


async def test_fixed_list_is_reported_once() -> None:
    recorded: list[Leaders] = []
    task = asyncio.create_task(StaticLeaders(["h:1", "i:2"]).run(recorded.append))
    await until(lambda: bool(recorded))
    task.cancel()
    assert [list(leaders) for leaders in recorded] == [["h:1", "i:2"]]


async def test_pods_are_listed_in_pages_then_followed() -> None:
    api = FakeApi()
    api.page = 2
    api.pods = {uid: make_pod(uid) for uid in "abc"}
    async with watching(api) as recorded:
        await recorded.wait_for("a", "b", "c")
        assert api.lists == 2
        api.change("ADDED", make_pod("d"))
        await recorded.wait_for("a", "b", "c", "d")
        api.change("DELETED", make_pod("a"))
        await recorded.wait_for("b", "c", "d")
        api.change("MODIFIED", make_pod("b", is_leaving=True))
        await until(lambda: recorded.lists[-1]["b"].is_leaving)
        assert api.lists == 2


async def test_irrelevant_change_is_not_reported() -> None:
    api = FakeApi()
    api.pods = {"a": make_pod("a")}
    async with watching(api) as recorded:
        await recorded.wait_for("a")
        api.change("MODIFIED", make_pod("a"))
        api.change("ADDED", make_pod("b"))
        await recorded.wait_for("a", "b")
        assert len(recorded.lists) == 2


async def test_ended_watch_resumes_at_the_last_bookmark() -> None:
    api = FakeApi()
    async with watching(api) as recorded:
        await recorded.wait_for()
        api.emit("BOOKMARK", {"metadata": {"resourceVersion": "77"}})
        api.end_watch()
        await until(lambda: len(api.watches) == 2)
        assert [watch["resourceVersion"] for watch in api.watches] == ["10", "77"]
        assert api.watches[0]["allowWatchBookmarks"].lower() == "true"
        assert (api.watches[0]["timeoutSeconds"], api.lists) == ("60", 1)


@pytest.mark.parametrize(
    "trouble",
    [
        {"code": 410, "message": "too old resource version"},
        {"code": 500, "message": "etcd is away"},
    ],
    ids=["version expired", "server error"],
)
async def test_watch_error_lists_again_and_replaces_all(trouble: dict[str, object]) -> None:
    api = FakeApi()
    api.pods = {"a": make_pod("a")}
    async with watching(api) as recorded:
        await recorded.wait_for("a")
        api.pods = {"b": make_pod("b")}
        api.emit("ERROR", trouble)
        await recorded.wait_for("b")
        assert api.lists == 2


async def test_split_event_is_joined_and_broken_event_lists_again() -> None:
    api = FakeApi()
    async with watching(api) as recorded:
        await recorded.wait_for()
        await until(lambda: len(api.watches) == 1)
        api.emit_raw(b'{"type": "ADDED", "object": {"metadata": {"uid": "a", "resourceVersion": "11"},')
        api.emit_raw(b' "status": {"phase": "Running", "podIP": "10.0.0.9"}}}\n\n')
        await recorded.wait_for("a")
        api.pods = {"b": make_pod("b")}
        api.emit_raw(b"no json\n")
        await recorded.wait_for("b")


@pytest.mark.parametrize("failure", [(500, "away"), (403, "no rights"), (410, "expired")], ids=["500", "403", "410"])
async def test_last_list_is_used_while_the_api_server_fails(failure: tuple[int, str]) -> None:
    api = FakeApi()
    api.pods = {"a": make_pod("a")}
    async with watching(api) as recorded:
        await recorded.wait_for("a")
        api.fail = failure
        api.end_watch()
        await until(lambda: api.failures >= 3)
        assert len(recorded.lists) == 1
        api.fail = None
        api.change("ADDED", make_pod("b"))
        await recorded.wait_for("a", "b")


async def test_a_watch_that_outlives_its_time_is_given_up() -> None:
    api = FakeApi()
    async with watching(api, watch_s=0, slack_s=0.2) as recorded:
        await recorded.wait_for()
        api.pods = {"a": make_pod("a")}
        await recorded.wait_for("a")
