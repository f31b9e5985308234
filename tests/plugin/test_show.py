"""The plugin's output."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from phalanx_api.cache_curve import CacheCurve, CacheUse, TierCurve
from phalanx_api.explain.findings import Explanation
from phalanx_kubectl import show
from phalanx_kubectl.gauges import CacheLoad, GroupLoad, RouterLoad, merge, read_router
from tests.plugin.services import METRICS, make_body

TIERS = TierCurve(16384, [0.45, 0.5, 0.55, 0.6], 0.5)
USE = CacheUse(reuse_pages=420.0, residency_s=61.5, unused_share=0.07, compacted_bytes=1 << 30)
CACHE = CacheLoad(pages=8192, page_bytes=2 << 20, curve=CacheCurve(90_000, [0.3, 0.41, 0.53, 0.55], TIERS), use=USE)
BARE = {"metadata": {"namespace": "team", "name": "new", "generation": 1}, "spec": {}}


def test_columns_fit_their_cells() -> None:
    assert show.table(["A", "LONG"], [("xyz", 1), (None, "")]) == "A     LONG\nxyz   1\n-     -\n"


def test_control_characters_never_reach_the_terminal() -> None:
    assert show.table(["A", "B"], [("a\x1b]0;x\x07", "two\nlines")]) == "A         B\na ]0;x    two lines\n"
    explained = show.explanation(Explanation(state="0 of 1 ready\nidle", cost="tenant \x1b[2J\n3. queue: 50%", findings=[]))
    assert explained == "0 of 1 ready\nidle.\ntenant  [2J 3. queue: 50%.\n"


def test_services_are_listed_with_and_without_status() -> None:
    assert show.services([make_body(), BARE], with_namespace=False) == (
        "NAME   READY     REASON       GROUPS   UPDATED   DRAINING   REVISION\n"
        "chat   False     RollingOut   1/2      1         0          r2\n"
        "new    Unknown   -            0/0      0         0          -\n"
    )
    assert show.services([make_body()], with_namespace=True).splitlines()[1].startswith("team        chat")
    assert show.services([], with_namespace=True) == "no inference services found\n"


def test_status_of_a_service() -> None:
    assert show.status(make_body()) == (
        "Service:  team/chat\n"
        "URL:      http://chat.team.svc\n"
        "Model:    hf://a/b\n"
        "Revision: r1 -> r2\n"
        "Groups:   1 of 2 ready, 0 draining, 0 may be disrupted now\n"
        "\n"
        "CONDITION   STATUS   REASON       SINCE                  MESSAGE\n"
        "Ready       False    RollingOut   2026-01-02T03:04:05Z   1 of 2\n"
        "Balanced    True     Balanced     2026-01-02T03:00:00Z   -\n"
        "\n"
        "What limits it: kubectl phalanx explain chat -n team\n"
    )


def test_model_version_is_shown_if_known() -> None:
    service = make_body()
    service["status"]["model"] = {"resolvedRevision": "c0ffee", "cachedNodes": 2}
    assert "Model:    hf://a/b at c0ffee\n" in show.status(service)
    service["status"]["model"] = {"resolvedRevision": "", "cachedNodes": 0}
    assert "Model:    hf://a/b\n" in show.status(service)


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({"observedGeneration": 2}, "Note:     the operator has not observed the last change yet"),
        ({"autoscaling": {"desired": 3, "minReplicas": 1, "maxReplicas": 8}}, "Scaling:  3 groups desired, 1 to 8 allowed\n"),
        ({"autoscaling": {"desired": 3, "reason": "Out", "message": "kv 90"}}, "3 groups desired, 0 to 0 allowed (Out: kv 90)"),
        (
            {"rebalancing": {"hotspots": [{"group": "g", "cause": "kv", "since": "s", "action": "shed"}]}},
            "g         kv      s       shed",
        ),
        ({"currentRevision": "r2"}, "Revision: r2\n"),
        (
            {"adapters": [{"name": "legal", "state": "Refused", "loaded": 0, "message": "r 64 exceeds 16"}]},
            "legal     Refused   0        -           r 64 exceeds 16\n",
        ),
        (
            {"adapters": [{"name": "legal", "state": "Loaded", "loaded": 3, "groups": ["chat-g-a", "chat-g-b"]}]},
            "legal     Loaded   3        chat-g-a,chat-g-b and 1 more   -\n",
        ),
        (
            {
                "adapters": [
                    {"name": "legal", "refusals": [{"group": "chat-g-c", "state": "Failing", "message": "no answer"}]},
                ]
            },
            "legal     chat-g-c        Failing   no answer\n",
        ),
    ],
)
def test_status_details_table(status: dict[str, Any], line: str) -> None:
    assert line in show.status(make_body(**status))


def test_unobserved_service() -> None:
    assert show.status(BARE) == (
        "Service:  team/new\nGroups:   0 of 0 ready, 0 draining, 0 may be disrupted now\n"
        "Note:     the operator has not observed the last change yet\n"
    )
    assert show.groups(BARE, {}) == "no groups\n"
    assert show.top(BARE, {}, {}) == "no groups\n"


def test_groups_are_shown_with_and_without_router_reports() -> None:
    assert show.groups(make_body(), {"chat-g-a": GroupLoad(streams=7, incarnation=3)}) == (
        "NAME       REVISION   PHASE      PODS   INCARNATION   STREAMS   NODES   REASON\n"
        "chat-g-b   r2         Starting   1/2    -             -         n1      ErrImagePull\n"
        "chat-g-a   r1         Ready      2/2    3             7         n1,n2   -\n"
    )


def test_unlisted_groups_are_counted() -> None:
    assert show.groups(make_body(replicas=70, drainingReplicas=1), {}).endswith("and 69 more ready groups\n")


def test_top_lists_groups_and_routers() -> None:
    load = GroupLoad(streams=7, running=6, waiting=1, kv=0.456, step_s=0.0314, incarnation=3, busy=0.97, bandwidth=0.86)
    assert show.top(make_body(), {"chat-router-x": RouterLoad(7, 2, 1)}, {"chat-g-a": load}) == (
        "GROUP      STREAMS   RUNNING   WAITING   KV    STEP   BUSY   MBU   MFU\n"
        "chat-g-a   7         6         1         46%   31ms   97%    86%   -\n"
        "chat-g-b   -         -         -         -     -      -      -     -\n"
        "\n"
        "ROUTER          STREAMS   QUEUED   HELD\n"
        "chat-router-x   7         2        1\n"
    )


STORED = {
    "pages": 8192,
    "pageBytes": 2 << 20,
    "hitPercentHalf": 30,
    "hitPercent": 41,
    "hitPercentTwice": 53,
    "hitPercentFourTimes": 55,
    "hitPercentWithHost": 50,
    "host": {
        "pages": 16384,
        "isUsed": True,
        "hitPercentHalf": 45,
        "hitPercent": 50,
        "hitPercentTwice": 55,
        "hitPercentFourTimes": 60,
    },
}
SMALL = {"type": "CacheSized", "status": "False", "reason": "TooFewPages", "message": "32 GiB would raise it"}


def test_cache_shows_groups_their_mean_and_the_stored_status() -> None:
    loads = {
        "chat-g-a": GroupLoad(
            cache=replace(CACHE, curve=CacheCurve(90_000, CACHE.curve.hit_rates, msgspec.structs.replace(TIERS, disk=0.7)))
        ),
        "chat-g-c": GroupLoad(cache=CacheLoad(pages=100, curve=CacheCurve(30_000, [0.1, 0.2, 0.3, 0.4]))),
    }
    assert show.cache(make_body(cache=STORED, conditions=[SMALL]), loads) == (
        "GROUP          PAGES   MEMORY   LOOKUPS   HALF   NOW   TWICE   FOUR TIMES   HOST   DISK\n"
        "chat-g-a       8192    16Gi     90000     30%    41%   53%     55%          50%    70%\n"
        "chat-g-b       -       -        -         -      -     -       -            -      -\n"
        "chat-g-c       100     -        30000     10%    20%   30%     40%          -      -\n"
        "all            -       -        120000    25%    36%   47%     51%          50%    70%\n"
        "status.cache   8192    16Gi     -         30%    41%   53%     55%          50%    -\n"
        "\n"
        "WITH HOST PAGES   PAGES   MEMORY   HALF   FULL   TWICE   FOUR TIMES\n"
        "chat-g-a          16384   32Gi     45%    50%    55%     60%\n"
        "status.cache      16384   32Gi     45%    50%    55%     60%\n"
        "\n"
        "PAGES OF   REUSE   RESIDENCY   HOST RESIDENCY   UNUSED SLOTS   COMPACTED   RECLAIMED\n"
        "chat-g-a   420     62s         -                7%             1Gi         -\n"
        "\n"
        "CacheSized False, TooFewPages: 32 GiB would raise it\n"
    )


def test_cache_without_reports() -> None:
    assert show.cache(BARE, {}) == "no groups\n"
    unknown = {"type": "CacheSized", "status": "Unknown", "reason": "TooFewLookups"}
    assert show.cache(make_body(conditions=[unknown]), {}).endswith("\n\nCacheSized Unknown, TooFewLookups\n")


def test_router_metrics_are_parsed() -> None:
    router = read_router(METRICS)
    assert (router.streams, router.queued, router.held) == (5, 2, 0)
    assert router.groups == {
        "g-a": GroupLoad(streams=5, running=8, kv=0.25, incarnation=2, busy=0.5, bandwidth=0.25, flops=0.125, cache=CACHE)
    }


def test_stream_counts_are_summed_over_routers() -> None:
    other = RouterLoad(groups={"g-a": GroupLoad(streams=3, running=8, kv=0.5, incarnation=1), "g-c": GroupLoad(streams=1)})
    assert merge([read_router(METRICS), other]) == {
        "g-a": GroupLoad(streams=8, running=8, kv=0.5, incarnation=2, busy=0.5, bandwidth=0.25, flops=0.125, cache=CACHE),
        "g-c": GroupLoad(streams=1),
    }


def test_groups_without_lookups_keep_their_pages() -> None:
    loads = merge([RouterLoad(groups={"g": GroupLoad(cache=CacheLoad(pages=100, page_bytes=1 << 30))})] * 2)
    assert "\ng       100     100Gi" in show.cache(BARE, loads)


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"holderIdentity": "op-1", "renewTime": "2026-01-02T03:04:00.5Z", "leaseDurationSeconds": 15}, "op-1 leads"),
        (
            {"holderIdentity": "op-1", "renewTime": "2026-01-02T03:00:00Z", "leaseDurationSeconds": 15},
            "op-1 renewed its lease 245 s ago: the status below may be out of date",
        ),
        ({"holderIdentity": "", "renewTime": "2026-01-02T03:04:00Z"}, "no leader: the status below may be out of date"),
        ({}, "no leader: the status below may be out of date"),
    ],
    ids=["leads", "silent", "released", "never"],
)
def test_missing_leader_is_shown_with_the_age_of_status(spec: dict[str, Any], line: str) -> None:
    assert show.leader({"spec": spec}, "2026-01-02T03:04:05Z") == line
    assert f"Operator: {line}\n" in show.status(make_body(), line)
