"""Moves that an administrator orders over HTTP, and by the router's command."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.moves import MoveOut
from phalanx_api.summary import BalancePolicy, Budgets
from phalanx_router.__main__ import main
from phalanx_router.migration.manual import MAX_OPEN
from phalanx_router.operator_endpoint import MOVES_PATH
from tests.polling import until
from tests.router.fakes import TOKEN, group_of
from tests.router.moves.held_streams import streams_at_a
from tests.router.moves.moving_leaders import SERVED, MoveScript, MovingLeader
from tests.router.polled_routers import PolledRouter, polled_router


async def order(router: PolledRouter, *, token: str = TOKEN, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return await router.http.post(MOVES_PATH, json=fields, headers=headers)


async def test_streams_move_to_the_emptiest_groups() -> None:
    async with streams_at_a() as router:
        answer = await order(router, group="a", count=2)
        assert (answer.status_code, answer.json()) == (200, {"targets": {"b": 1, "c": 1}, "obstacles": []})
        await until(lambda: sorted(map(group_of, router.fleet.sessions)) == ["a", "b", "c"])


async def test_streams_move_to_a_named_group() -> None:
    async with streams_at_a() as router:
        assert (await order(router, group="a", target="c", count=9)).json()["targets"] == {"c": 3}
        await until(lambda: sorted(map(group_of, router.fleet.sessions)) == ["c", "c", "c"])


async def test_a_moving_stream_is_an_obstacle() -> None:
    async with streams_at_a(b=MoveScript(ignored=(wire.Prepare,)), c=MoveScript(ignored=(wire.Prepare,))) as router:
        assert (await order(router, group="a", count=3)).json()["targets"].keys() == {"b", "c"}
        again = (await order(router, group="a")).json()
        assert again == {"targets": {}, "obstacles": ["the stream is moving already"]}


async def test_a_group_that_drains_gets_no_stream() -> None:
    async with streams_at_a() as router:
        router.fleet.links.fleet_view.evacuating = frozenset("b")
        refused = await order(router, group="a", target="b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_group")
        assert (await order(router, group="a", count=3)).json()["targets"] == {"c": 3}


async def test_a_group_of_another_model_gets_no_stream() -> None:
    other = MoveScript(served=msgspec.structs.replace(SERVED, model_hash="model-2"))
    async with streams_at_a(b=other) as router:
        assert (await order(router, group="a", count=3)).json() == {"targets": {"c": 3}, "obstacles": []}
        assert (await order(router, group="c", target="b")).json()["targets"] == {}


async def test_moves_of_an_order_share_the_budget() -> None:
    async with streams_at_a() as router:
        await router.poll(policy=BalancePolicy(mode="Off", budgets=Budgets(bytes_per_s=6e8)))
        await order(router, group="a", count=2)
        (source,) = (leader for leader in router.leaders if leader.group == "a")
        assert isinstance(source, MovingLeader)
        await until(lambda: sum(isinstance(frame, MoveOut) for frame in source.frames) == 2)
        assert {frame.bytes_per_s for frame in source.frames if isinstance(frame, MoveOut)} == {3e8}


async def test_open_moves_are_bounded() -> None:
    slow = MoveScript(ignored=(wire.Prepare,))
    async with streams_at_a(MAX_OPEN + 2, b=slow, c=slow) as router:
        answer = (await order(router, group="a", count=MAX_OPEN + 2)).json()
        assert sum(answer["targets"].values()) == MAX_OPEN, answer
        assert answer["obstacles"] == [f"{MAX_OPEN} moves are in progress"]


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"group": "x"}, 404, "unknown_group"),
        ({"group": "a", "target": "a"}, 404, "unknown_group"),
        ({"group": "a", "count": 0}, 400, None),
        ({"group": "a", "counts": 1}, 400, None),
        ({}, 400, None),
    ],
)
async def test_a_wrong_order_is_refused(fields: dict[str, Any], status: int, code: str | None) -> None:
    async with polled_router(*(MovingLeader(group, []) for group in "ab")) as router:
        answer = await order(router, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert (await order(router, token="wrong", group="a")).status_code == 401


async def test_the_only_group_keeps_its_streams() -> None:
    async with polled_router(MovingLeader("a", [])) as router:
        assert (await order(router, group="a")).json()["error"]["code"] == "not_moved"


async def test_command_orders_at_the_router_of_its_pod(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    async with streams_at_a() as router:
        common = ["--port", str(router.http.base_url.port), "--token-file", str(file)]
        assert await asyncio.to_thread(main, ["move", "a", "--to", "b", "--count", "2", *common]) == 0
        assert json.loads(capsys.readouterr().out) == {"targets": {"b": 2}, "obstacles": []}
        assert await asyncio.to_thread(main, ["move", "x", *common]) == 1
        assert "no group x" in capsys.readouterr().err
