"""The present summary, which `kubectl phalanx explain` reads: endpoint, command, and measurements of the router itself."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from phalanx_api.summary import SNAPSHOT_PATH, RouterSummary
from phalanx_router.__main__ import main
from phalanx_router.routing.ledger import ShortestTime
from phalanx_router.summary import CpuMeter
from tests.polling import until
from tests.router.fakes import TOKEN, FakeLeader, make_request, read_stream
from tests.router.polled_routers import PolledRouter, polled_router


async def snapshot(router: PolledRouter, token: str = TOKEN) -> httpx.Response:
    return await router.http.post(SNAPSHOT_PATH, headers={"authorization": f"Bearer {token}"})


async def test_snapshot_has_waits_links_and_no_effect() -> None:
    async with polled_router(FakeLeader("a")) as router:
        await until(lambda: all(link.group_report.load for link in router.fleet.links.all()))
        await read_stream(router.fleet, make_request(max_tokens=4))
        refused = await snapshot(router, "sk-1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token")
        policy = router.fleet.balancing.policy
        summary = msgspec.json.decode((await snapshot(router)).content, type=RouterSummary)
        assert sum(summary.wait.counts) == 1 and 0 <= summary.cpu_share < 8
        (group,) = summary.groups
        assert group.group == "a" and 0 < group.link_s < 5
        assert router.fleet.balancing.policy is policy


async def test_command_prints_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    async with polled_router(FakeLeader("a")) as router:
        command = ["summary", "--port", str(router.http.base_url.port), "--token-file", str(file)]
        assert await asyncio.to_thread(main, command) == 0
        assert msgspec.json.decode(capsys.readouterr().out, type=RouterSummary).router == "router-0"
        file.write_text("wrong")
        assert await asyncio.to_thread(main, command) == 1
        assert "service token" in capsys.readouterr().err
    assert main(command) == 1
    assert "does not answer" in capsys.readouterr().err


def test_cpu_share_is_of_the_last_periods() -> None:
    used = 0.0
    meter = CpuMeter(lambda: used, 100.0)
    assert meter.share(100.0) == 0.0
    used = 5.0
    assert meter.share(110.0) == 0.5
    assert meter.share(120.0) == 0.0, "since 110"
    used = 14.0
    assert meter.share(128.0) == pytest.approx(9 / 18), "since 110 too"
    assert meter.share(130.0) == pytest.approx(9 / 10), "since 120"


def test_shortest_time_forgets_old_periods() -> None:
    shortest, period_s = ShortestTime(), ShortestTime.PERIOD_S
    assert shortest.value_s == 0.0
    for value_s, now, expected in [(0.3, 0.0, 0.3), (0.1, 1.0, 0.1), (0.2, period_s + 1, 0.1), (0.4, 2 * period_s + 1, 0.2)]:
        shortest.add(value_s, now)
        assert shortest.value_s == expected
    shortest.add(0.5, 9 * period_s)
    assert shortest.value_s == 0.5
