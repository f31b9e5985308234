"""Groups of a router at /v1/metrics."""

from typing import Any

import msgspec

from phalanx_api import wire
from phalanx_api.cache_curve import CacheCurve
from phalanx_api.speculation import SpeculationCounts
from tests.polling import until
from tests.router.fakes import FakeLeader
from tests.router.polled_routers import KEYS, PolledRouter, polled_router

KEY = {"authorization": f"Bearer {KEYS[0].key}"}


def make_leader(group: str, page_bytes: int, counts: SpeculationCounts) -> FakeLeader:
    leader = FakeLeader(group)
    leader.state = wire.State(serving=True, incarnation=1, served=wire.Served("model", "layout", page_bytes))
    leader.load = msgspec.structs.replace(leader.load, speculation=counts)
    return leader


async def read_document(router: PolledRouter, **values: Any) -> dict[str, Any]:
    """The document, once it has these values."""
    document: dict[str, Any] = {}

    async def is_equal() -> bool:
        document.update((await router.http.get("/v1/metrics", headers=KEY)).json())
        return all(document[name] == value for name, value in values.items())

    await until(is_equal)
    return document


async def test_draft_counts_are_summed_and_token_time_is_averaged() -> None:
    a = make_leader("a", 16 * 4096, SpeculationCounts(paths=4, drafted=[4, 4], accepted=[3, 1]))
    b = make_leader("b", 16 * 2048, SpeculationCounts(paths=2, drafted=[2], accepted=[2]))
    async with polled_router(a, b) as router:
        document = await read_document(router, acceptance_rate=6 / 10)
        assert document["kv_bytes_per_token"] == 4096
        assert document["memory"] == [], "a router has no rank"
        assert document["total_requests"] == 0
        a.load = msgspec.structs.replace(a.load, speculation=SpeculationCounts(paths=14, drafted=[14, 4], accepted=[13, 1]))
        await read_document(router, acceptance_rate=16 / 20)


async def test_cache_curves_are_weighted_by_lookups() -> None:
    a, b, c = FakeLeader("a"), FakeLeader("b"), FakeLeader("c")
    a.load = msgspec.structs.replace(a.load, cache_curve=CacheCurve(300, [0.0, 0.5, 0.5, 1.0]))
    b.load = msgspec.structs.replace(b.load, cache_curve=CacheCurve(100, [1.0, 0.5, 1.0, 1.0]))
    async with polled_router(a, b, c) as router:
        expected = {"lookups": 400, "hit_rate": {"half": 0.25, "now": 0.5, "twice": 0.625, "four_times": 1.0}, "tiers": None}
        await read_document(router, cache=expected)


async def test_silent_groups_have_no_metrics() -> None:
    async with polled_router(FakeLeader("a"), FakeLeader("b")) as router:
        document = await read_document(router)
        assert (document["acceptance_rate"], document["kv_bytes_per_token"]) == (None, None)
        assert document["cache"] is None
