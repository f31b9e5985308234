"""The condition `CacheSized` and `status.cache`, from router reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.cache_curve import NO_TIERS, CacheCurve, TierCurve
from phalanx_api.conditions import find_condition
from phalanx_api.status import CacheStatus, Status
from phalanx_api.summary import GroupSummary
from phalanx_operator.decide.conditions.cache import with_cache_condition
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup
from tests.control.builders import NOW, make_group, make_service, make_snapshot
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

PAGES = 8192
GROUPS = (make_group("a"), make_group("b"), make_group("old", "old"))
LATER = "2027-01-01T00:00:00Z"
FITS = (0.5, 0.62, 0.63, 0.64)
SMALL = (0.3, 0.41, 0.53, 0.55)


def report(
    name: str,
    *hit_rates: float,
    lookups: int = 10 * PAGES,
    pages: int = PAGES,
    page_bytes: int = 2 << 20,
    tiers: TierCurve = NO_TIERS,
) -> GroupSummary:
    curve = CacheCurve(lookups, list(hit_rates), tiers)
    return group(name, cache_curve=curve, total_pages=pages, page_bytes=page_bytes)


def after(
    *reports: GroupSummary,
    status: Status | None = None,
    groups: tuple[ObservedGroup, ...] = GROUPS,
    is_cached: bool = True,
    fleet: Fleet | None = None,
) -> Status:
    """Returns the status after these reports, which follow `status`."""
    snapshot = make_snapshot(*groups, status=status or Status())
    engine = make_service(engine={} if is_cached else {"prefixCaching": False}).spec.engine
    fleet = fleet or fleet_of(summary(*reports))
    new = Status(conditions=snapshot.status.conditions)
    return with_cache_condition(new, engine, fleet=fleet, snapshot=snapshot, revision="new", now=LATER if status else NOW)


def verdict(status: Status) -> tuple[str, str, str] | None:
    condition = find_condition(status.conditions, "CacheSized")
    return (condition.status, condition.reason, condition.message) if condition else None


ENOUGH = "16 GiB of KV cache (8,192 pages) in each group reach a hit rate of {}"
MORE = " in each group instead of 16 GiB of KV cache (8,192 pages) would raise the hit rate of the prefix cache from {}"


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report("a", *FITS)], ("True", "WorkingSetFits", ENOUGH.format("62 %, twice as much 63 %"))),
        (
            [report("a", 0.615, 0.62, 0.63, 0.64)],
            ("True", "WorkingSetFits", ENOUGH.format("62 %, twice as much 63 %") + "; 8 GiB of KV cache (4,096 pages) 62 %"),
        ),
        (
            [report("a", 0.1, 0.2, 0.2, 0.8)],
            (
                "True",
                "WorkingSetFits",
                ENOUGH.format("20 %, twice as much 20 %") + ", 64 GiB of KV cache (32,768 pages) 80 %",
            ),
        ),
        (
            [report("a", *SMALL)],
            ("False", "TooFewPages", "32 GiB of KV cache (16,384 pages)" + MORE.format("41 % to 53 %")),
        ),
        (
            [report("a", 0.3, 0.41, 0.53, 0.6)],
            ("False", "TooFewPages", "64 GiB of KV cache (32,768 pages)" + MORE.format("41 % to 60 %")),
        ),
        (
            [report("a", *SMALL, page_bytes=0)],
            (
                "False",
                "TooFewPages",
                "16,384 pages" + MORE.replace("16 GiB of KV cache (8,192 pages)", "8,192 pages").format("41 % to 53 %"),
            ),
        ),
        ([report("a", *SMALL, lookups=4 * PAGES - 1)], ("Unknown", "TooFewLookups", "")),
        ([report("a", *SMALL, lookups=3 * PAGES), report("b", *SMALL)], ("False", "TooFewPages", None)),
        ([report("a", *SMALL, lookups=999, pages=10)], ("Unknown", "TooFewLookups", "")),
        ([report("a", lookups=0)], None),
        ([report("old", *SMALL)], None),
        ([report("gone", *SMALL)], None),
        ([], None),
    ],
    ids=[
        "fits",
        "half hits as often",
        "only four times would gain",
        "twice the pages",
        "four times the pages",
        "bytes are unknown",
        "too few lookups for the pages",
        "enough lookups in all groups",
        "too few lookups",
        "no lookup",
        "an older revision",
        "an unknown group",
        "no report",
    ],
)
def test_cache_condition_table(reports: list[GroupSummary], expected: tuple[str, str, str | None] | None) -> None:
    found = verdict(after(*reports))
    if expected is None or found is None:
        assert found == expected
    else:
        assert found[:2] == expected[:2] and (expected[2] is None or found[2] == expected[2])


HOST = " in each group would raise the hit rate of the prefix cache from {}"


@pytest.mark.parametrize(
    ("rates", "tiers", "expected"),
    [
        (
            SMALL,
            TierCurve(PAGES, [0.45, 0.5, 0.6, 0.61]),
            (
                "False",
                "TooFewPages",
                "32 GiB of KV cache (16,384 pages)" + MORE.format("41 % to 53 %; 32 GiB of host memory (16,384 pages) to 60 %"),
            ),
        ),
        (
            (0.1, 0.2, 0.2, 0.8),
            TierCurve(PAGES, [0.2, 0.2, 0.3, 0.8]),
            ("False", "TooFewHostPages", "64 GiB of host memory (32,768 pages)" + HOST.format("20 % to 80 %")),
        ),
        (
            SMALL,
            TierCurve(2 * PAGES, [0.5, 0.6, 0.7, 0.72], 0.6, 0.8),
            (
                "False",
                "TooFewHostPages",
                "64 GiB of host memory (32,768 pages) in each group instead of 32 GiB of host memory (16,384 pages) would raise "
                "the hit rate of the prefix cache from 60 % to 70 %",
            ),
        ),
        (
            SMALL,
            TierCurve(2 * PAGES, [0.6, 0.6, 0.61, 0.62], 0.6),
            (
                "True",
                "WorkingSetFits",
                "16 GiB of KV cache (8,192 pages) and 32 GiB of host memory (16,384 pages) in each group reach a hit rate of "
                "60 %, twice the host memory 61 %, half of it 60 %",
            ),
        ),
    ],
    ids=["device and host", "only host memory", "larger host tier", "host tier fits"],
)
def test_host_memory_is_recommended(rates: tuple[float, ...], tiers: TierCurve, expected: tuple[str, str, str]) -> None:
    status = after(report("a", *rates, tiers=tiers))
    assert verdict(status) == expected
    assert status.cache and status.cache.host and status.cache.host.pages == tiers.pages
    assert status.cache.host.is_used == (tiers.host is not None)
    assert status.cache.hit_percent_with_host == (None if tiers.host is None else 60)
    assert status.cache.hit_percent_with_disk == (None if tiers.disk is None else 80)


def test_gain_of_host_memory_is_kept() -> None:
    former = after(report("a", *FITS, tiers=TierCurve(PAGES, [0.62, 0.63, 0.64, 0.68])))
    kept = after(report("a", *FITS, tiers=TierCurve(PAGES, [0.62, 0.63, 0.64, 0.66])), status=former)
    assert [verdict(status)[1] for status in (former, kept) if verdict(status)] == ["TooFewHostPages"] * 2  # type: ignore[index]
    assert kept == former, "no write for two points"


def test_a_tier_that_appears_is_written() -> None:
    former = after(report("a", *FITS, tiers=TierCurve(PAGES, [0.62, 0.62, 0.62, 0.62])))
    now = after(report("a", *FITS, tiers=TierCurve(PAGES, [0.62, 0.62, 0.62, 0.62], 0.62)), status=former)
    assert now.cache and now.cache.hit_percent_with_host == 62
    assert after(report("a", *FITS), status=now).cache != now.cache


def test_tiers_of_groups_are_weighted() -> None:
    a = report("a", *FITS, lookups=30 * PAGES, tiers=TierCurve(PAGES, [0.6, 0.6, 0.6, 0.6], 0.6))
    b = report("b", *FITS, lookups=10 * PAGES, tiers=TierCurve(2 * PAGES, [0.8, 0.8, 0.8, float("nan")], 0.8, 0.9))
    host = after(a, b).cache
    assert host and host.host and (host.host.pages, host.host.hit_percent, host.host.hit_percent_four_times) == (PAGES, 65, 45)
    assert (host.hit_percent_with_host, host.hit_percent_with_disk) == (65, 90)


def test_groups_are_weighted_by_their_lookups() -> None:
    status = after(
        report("a", 0.0, 0.4, 0.4, 0.4, lookups=30 * PAGES, pages=PAGES),
        report("b", 0.4, 0.8, 0.8, 0.8, lookups=10 * PAGES, pages=PAGES + 100),
    )
    assert status.cache == CacheStatus(
        pages=PAGES,
        page_bytes=2 << 20,
        hit_percent_half=10,
        hit_percent=50,
        hit_percent_twice=50,
        hit_percent_four_times=50,
    )


def test_hit_rates_of_a_faulty_program_are_clamped() -> None:
    cache = after(report("a", float("nan"), -1.0, 0.5, 2.0)).cache
    assert cache and (cache.hit_percent_half, cache.hit_percent, cache.hit_percent_four_times) == (0, 0, 100)


@pytest.mark.parametrize(
    ("before", "now", "is_sized"),
    [
        ((0.3, 0.5, 0.51, 0.52), (0.3, 0.5, 0.54, 0.54), "True"),
        ((0.3, 0.5, 0.51, 0.52), (0.3, 0.5, 0.55, 0.55), "False"),
        ((0.3, 0.5, 0.56, 0.56), (0.3, 0.5, 0.54, 0.54), "False"),
        ((0.3, 0.5, 0.56, 0.56), (0.3, 0.5, 0.52, 0.53), "True"),
    ],
    ids=["gain below the threshold", "gain reached", "gain is kept", "gain is lost"],
)
def test_verdict_lasts_between_two_thresholds(before: tuple[float, ...], now: tuple[float, ...], is_sized: str) -> None:
    former = after(report("a", *before))
    condition = find_condition(after(report("a", *now), status=former).conditions, "CacheSized")
    assert condition and condition.status == is_sized


def test_status_is_written_only_for_five_points() -> None:
    former = after(report("a", *FITS))
    assert after(report("a", 0.46, 0.58, 0.59, 0.6), status=former) == former
    assert after(report("a", *FITS, pages=PAGES + 300, lookups=10**6), status=former) == former, "measured sizes differ"
    moved = after(report("a", 0.45, 0.58, 0.59, 0.6), status=former)
    assert moved.cache and (moved.cache.hit_percent_half, moved.cache.hit_percent) == (45, 58)
    resized = after(report("a", *FITS, pages=PAGES // 2), status=former)
    assert resized.cache and resized.cache.pages == PAGES // 2


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 4).map(lambda rates: tuple(sorted(rates))), min_size=2, max_size=8))
def test_small_changes_are_not_written(curves: list[tuple[float, ...]]) -> None:
    status = after(report("a", *curves[0]))
    for curve in curves[1:]:
        new = after(report("a", *curve), status=status)
        assert new.cache and status.cache
        if [c.status for c in new.conditions] == [c.status for c in status.conditions] and new != status:
            assert new.cache.host is None
            fields = ("hit_percent_half", "hit_percent", "hit_percent_twice", "hit_percent_four_times")
            assert max(abs(getattr(new.cache, name) - getattr(status.cache, name)) for name in fields) >= 5
        status = new


def test_restarted_groups_of_the_same_size_keep_the_condition() -> None:
    former = after(report("a", *SMALL))
    assert after(report("a", 0.0, 0.1, 0.1, 0.1, lookups=100), status=former) == former
    assert after(report("a", lookups=0), status=former) == former
    larger = after(report("a", 0.0, 0.1, 0.1, 0.1, lookups=100, pages=4 * PAGES), status=former)
    assert verdict(larger) == ("Unknown", "TooFewLookups", "") and larger.cache is None
    assert verdict(after(report("a", *SMALL), status=larger)) == verdict(former)


def test_silent_routers_keep_the_condition() -> None:
    former = after(report("a", *SMALL))
    assert after(status=former, fleet=Fleet(polled=1)) == former
    assert after(status=former, groups=()) == former, "scaled to zero"


def test_condition_needs_a_prefix_cache() -> None:
    former = after(report("a", *SMALL))
    off = after(report("a", lookups=0), status=former, is_cached=False)
    assert verdict(off) is None and off.cache is None


@pytest.mark.parametrize("rates", [(-1.0, 2.0, 5.0, float("inf")), (0.5,), ()], ids=["out of range", "incomplete", "empty"])
def test_values_of_a_faulty_group_are_clamped(rates: tuple[float, ...]) -> None:
    status = after(report("a", *rates))
    if len(rates) == 4:
        assert status.cache and (status.cache.hit_percent_half, status.cache.hit_percent_four_times) == (0, 100)
    else:
        assert status.cache is None


async def test_recommended_size_reaches_the_service() -> None:
    world = World()
    await world.settle()
    world.cluster.start_router_pods()
    (name,) = world.groups
    world.routers.summary = summary(report(name, *SMALL))
    await world.reconcile()
    assert world.condition("CacheSized") == ("False", "TooFewPages")
    assert world.status.cache and world.status.cache.hit_percent_twice == 53
    assert world.ready == ("True", "Ready"), "it still serves"
    world.routers.summary = summary(report(name, 0.29, 0.4, 0.52, 0.54))
    assert await world.reconcile() == [], "no write for a point"
    world.routers.summary = summary(report(name, *FITS))
    await world.reconcile()
    assert world.condition("CacheSized") == ("True", "WorkingSetFits")
    world.routers.summary = summary(report(name, lookups=0))
    assert await world.reconcile() == []
