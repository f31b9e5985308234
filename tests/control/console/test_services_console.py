"""The operator's console shows services with the rights of its user."""

import itertools
from typing import Any

import pytest

from phalanx_operator.console.services import Trouble, service_row
from phalanx_operator.decide.scaling.scale import ScaleDecision
from phalanx_operator.kube.client import Gone, Retry
from phalanx_operator.scaling_history import INTERVAL_S, SPAN_S, ScalingHistory
from tests.control.console.consoles import running_services_console, service

STATUS = {
    "replicas": 3,
    "readyReplicas": 2,
    "drainingReplicas": 1,
    "rebalancing": {"hotspots": [{"group": "chat-g-a", "cause": "decode"}]},
    "autoscaling": {"desired": 4, "minReplicas": 1, "maxReplicas": 8, "reason": "Out", "message": "more load"},
    "conditions": [
        {"type": "Ready", "status": "False", "reason": "GroupsNotReady", "message": "2 of 3"},
        {"type": "Reconciling", "status": "False", "reason": "Done", "message": ""},
        {"type": "Stalled", "status": "True", "reason": "ImagePull", "message": "no such image"},
        {"type": "Balanced", "status": "True", "reason": "Balanced", "message": ""},
        {"type": "CacheSized", "status": "Unknown", "reason": "NoTraffic", "message": ""},
    ],
}
KEY = ("team", "chat")
"""The service of the history."""


def test_a_row_names_what_needs_attention() -> None:
    row = service_row(service(status=STATUS, router={"console": True}))
    assert (row.state, row.is_ready, row.ready_groups, row.draining_groups) == ("GroupsNotReady", False, 2, 1)
    assert (row.hotspots, row.has_console, row.model) == (["chat-g-a"], True, "pvc://models/m")
    assert row.troubles == [Trouble("Ready", "GroupsNotReady", "2 of 3"), Trouble("Stalled", "ImagePull", "no such image")]
    assert row.scaling is not None and (row.scaling.desired, row.scaling.max_replicas) == (4, 8)


@pytest.mark.parametrize("spec", [{}, {"replicas": "many", "model": "wrong", "router": []}])
def test_a_service_without_status_has_a_row(spec: dict[str, Any]) -> None:
    row = service_row(service(**spec))
    assert (row.state, row.is_ready, row.scaling, row.troubles) == ("NotObserved", False, None, [])


def test_a_row_shows_the_scheme_of_the_routers() -> None:
    urls = {"http://chat.team.svc": False, "https://chat.team.svc": True}
    assert {url: service_row(service(status={"url": url})).is_https for url in urls} == urls


def test_a_suspended_service_wants_no_group() -> None:
    assert service_row(service(suspend=True)).wanted_groups == 0


async def test_a_user_sees_what_the_token_may_read() -> None:
    async with running_services_console(service("b"), service("a"), service("c", "other")) as console:
        found = (await console.get("/ui/api/services")).json()
        assert [(row["namespace"], row["name"]) for row in found["services"]] == [("other", "c"), ("team", "a"), ("team", "b")]
        assert not found["is_truncated"]
        own = (await console.get("/ui/api/services?namespace=team", "team-token")).json()["services"]
        assert [row["name"] for row in own] == ["a", "b"]
        refused = await console.get("/ui/api/services", "team-token")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert (await console.get("/ui/api/scaling/other/c", "team-token")).status_code == 403


@pytest.mark.parametrize("token", ["", "unknown", "bad token"])
async def test_data_needs_a_valid_token(token: str) -> None:
    async with running_services_console(service()) as console:
        for path in ("/ui/api/services", "/ui/api/scaling/team/chat"):
            refused = await console.get(path, token)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token")


async def test_failures_have_a_code() -> None:
    async with running_services_console(service()) as console:
        assert (await console.get("/ui/api/scaling/team/absent")).status_code == 404
        assert (await console.get("/ui/api/services?namespace=..%2Fx")).status_code == 404
        console.kube.failures["get inferenceservices chat"] = Retry("the API server is busy")
        failed = await console.get("/ui/api/scaling/team/chat")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "kubernetes_unavailable")
        assert "busy" not in failed.text and failed.headers["cache-control"] == "no-store", (
            "an address of the server is no user's"
        )
        console.kube.failures["list inferenceservices"] = Gone("410 the continue token has expired")
        assert (await console.get("/ui/api/services")).status_code == 503


async def test_the_page_is_open_and_has_strict_headers() -> None:
    async with running_services_console() as console:
        for path in ("/ui", "/ui/", "/ui/services.js", "/ui/style.css"):
            page = await console.get(path, "")
            assert page.status_code == 200
            assert page.headers["content-security-policy"].startswith("default-src 'self';")
        again = await console.http.get("/ui", headers={"If-None-Match": (await console.get("/ui", "")).headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await console.get("/ui/absent.js", "")).json()["error"]["code"] == "not_found"
        assert (await console.get("/ui/api/absent")).status_code == 404


@pytest.mark.parametrize("leads", [True, False])
async def test_the_history_of_the_autoscaler_is_shown(leads: bool) -> None:
    async with running_services_console(service(), leads=leads) as console:
        console.history.add(KEY, decision(2, 1), 900.0)
        console.history.add(KEY, decision(3, 3), 940.0)
        found = (await console.get("/ui/api/scaling/team/chat")).json()
        expected = [{"ago_s": 100.0, "desired": 2, "needed": 1}, {"ago_s": 60.0, "desired": 3, "needed": 3}]
        assert found == {"leads": leads, "points": expected}


def decision(groups: int, needed: int | None) -> ScaleDecision:
    return ScaleDecision(groups=groups, verdict="Hold", why="why", needed=needed)


def test_the_history_keeps_changes_of_an_hour() -> None:
    history, now_s = ScalingHistory(), 3 * SPAN_S
    for step in range(int(2 * now_s / INTERVAL_S) + 1):
        history.add(KEY, decision(2, step), step * INTERVAL_S / 2)
    points = history.of(KEY, now_s)
    assert len(points) == SPAN_S / INTERVAL_S + 1
    assert {round(later[0] - earlier[0]) for earlier, later in itertools.pairwise(points)} == {INTERVAL_S}
    history.add(KEY, decision(5, None), now_s + 1)
    assert history.of(KEY, now_s + 1)[-1][1] == 5
    assert history.of(KEY, now_s + 2 * SPAN_S) == []
    history.forget(KEY)
    assert history.of(KEY, now_s) == []
