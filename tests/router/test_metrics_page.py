"""What a router tells of the groups behind it at /v1/metrics."""

import asyncio
from typing import Any

import msgspec

from phalanx_api import wire
from phalanx_api.speculation import SpeculationCounts
from tests.router.fakes import FakeLeader
from tests.router.test_summary import KEYS, Router, running_router

KEY = {"authorization": f"Bearer {KEYS[0].key}"}


def leader(group: str, page_bytes: int, counts: SpeculationCounts) -> FakeLeader:
    made = FakeLeader(group)
    made.state = wire.State(serving=True, incarnation=1, served=wire.Served("model", "layout", page_bytes))
    made.load = msgspec.structs.replace(made.load, speculation=counts)
    return made


async def told(router: Router, **wanted: Any) -> dict[str, Any]:
    """The document, as soon as it says this."""
    async with asyncio.timeout(10):
        while True:
            document: dict[str, Any] = (await router.http.get("/v1/metrics", headers=KEY)).json()
            if all(document[name] == value for name, value in wanted.items()):
                return document
            await asyncio.sleep(0.01)


async def test_draft_counts_are_summed_and_token_time_is_averaged() -> None:
    a = leader("a", 16 * 4096, SpeculationCounts(paths=4, proposed=[4, 4], accepted=[3, 1]))
    b = leader("b", 16 * 2048, SpeculationCounts(paths=2, proposed=[2], accepted=[2]))
    async with running_router(a, b) as router:
        document = await told(router, acceptance_rate=6 / 10)
        assert document["kv_bytes_per_token"] == 4096
        assert document["memory"] == [], "a router has no rank"
        assert document["total_requests"] == 0
        a.load = msgspec.structs.replace(a.load, speculation=SpeculationCounts(paths=14, proposed=[14, 4], accepted=[13, 1]))
        await told(router, acceptance_rate=16 / 20)


async def test_silent_groups_have_no_metrics() -> None:
    async with running_router(FakeLeader("a"), FakeLeader("b")) as router:
        document = await told(router)
        assert (document["acceptance_rate"], document["kv_bytes_per_token"]) == (None, None)
