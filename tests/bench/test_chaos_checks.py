"""Checks of the chaos benchmark."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.chaos.checks import (
    FalseReady,
    Sample,
    ServiceState,
    duplicates,
    false_ready_periods,
    leaderless_s,
    orphans,
    unsettled,
    update_since,
)
from bench.chaos.watch import BASIC_KINDS, further_kinds
from bench.frame.resuming import events, refusal_of
from phalanx_operator.kube.client import DEPLOYMENTS, EVENTS, INFERENCE_SERVICES, PODS, RESOURCES, STATEFUL_SETS
from phalanx_operator.observe.api_discovery import POD_GROUPS
from phalanx_operator.render.gangs import NATIVE_API
from tests.control.worlds import World
from tools.errors import Failed

READY = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def make_object(name: str, uid: str, owner: str = "", **fields: Any) -> dict[str, Any]:
    owners = [{"uid": owner, "controller": True}] if owner else []
    metadata = {
        "name": name,
        "uid": uid,
        "labels": fields.pop("labels", {}),
        "ownerReferences": owners,
        **fields.pop("metadata", {}),
    }
    return {"metadata": metadata, **fields}


def a_set(name: str, **metadata: Any) -> dict[str, Any]:
    return make_object(name, f"set-{name}", "service", spec={"replicas": 2}, metadata=metadata)


def a_pod(group: str, index: int, **fields: Any) -> dict[str, Any]:
    labels = {"phalanx.dev/component": "group", "phalanx.dev/group": group, "apps.kubernetes.io/pod-index": str(index)}
    return make_object(f"{group}-{index}", f"{group}-{index}", f"set-{group}", labels=labels, **{**READY, **fields})


def one_of(kind: str, name: str, component: str, owner: str = "service", **fields: Any) -> dict[str, Any]:
    labels = {"phalanx.dev/component": component} | fields.pop("labels", {})
    return make_object(name, f"{kind}-{name}", owner, labels=labels, kind=kind, **fields)


def view(**fields: Any) -> ServiceState:
    status = {"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True"}]}
    service = {"metadata": {"uid": "service", "generation": 1}, "spec": {"replicas": 2}, "status": status}
    deployment = make_object("r", "deployment", "service", spec={"replicas": 1}, status={"readyReplicas": 1})
    router = make_object("router", "router", "rs", labels={"phalanx.dev/component": "router"}, **READY)
    pods = [a_pod(group, index) for group in "ab" for index in (0, 1)]
    defaults: dict[str, Any] = {
        "service": service,
        "sets": [a_set("a"), a_set("b")],
        "pods": [*pods, router],
        "replica_sets": [make_object("rs", "rs", "deployment")],
        "deployments": [deployment],
    }
    return ServiceState(**defaults | fields)


def test_a_service_that_is_as_wanted_is_settled() -> None:
    assert unsettled(view()) == orphans(view()) == duplicates(view()) == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sets": [a_set("a")]}, "1 StatefulSets"),
        ({"sets": [a_set("a"), a_set("b", annotations={"phalanx.dev/draining": "x"})]}, "1 of them remain"),
        ({"pods": [a_pod("a", 0), a_pod("a", 1)]}, "2 pods of groups, 4 wanted"),
        ({"pods": [a_pod("a", 0, status={})]}, "pod a-0 is not ready"),
        ({"pods": [a_pod("z", 0)]}, "z-0 has no owner"),
        (
            {"deployments": [make_object("r", "deployment", "service", spec={"replicas": 2}, status={"readyReplicas": 1})]},
            "has 1 ready",
        ),
        ({"service": {**view().service, "status": {"observedGeneration": 1}}}, "not Ready: no status"),
        ({"service": {**view().service, "metadata": {"uid": "service", "generation": 2}}}, "older spec"),
        ({"others": [one_of("Secret", "chat-token", "group", "former")]}, "Secret chat-token has no owner"),
        ({"others": [one_of("PodGroup", "a", "group", "set-of-before")]}, "PodGroup a has no owner"),
        ({"others": [one_of("Role", "a", "router"), one_of("Role", "b", "router")]}, "2 Roles of router"),
    ],
)
def test_unsettled_state_is_named(fields: dict[str, Any], text: str) -> None:
    assert any(text in sentence for sentence in unsettled(view(**fields)))


def test_extra_group_and_repeated_rank_count_as_duplicates() -> None:
    assert duplicates(view(sets=[a_set("a"), a_set("b"), a_set("c")])) == ["3 groups remain, 2 wanted"]
    assert duplicates(view(sets=[a_set("a"), a_set("b"), a_set("c", deletionTimestamp="now")])) == []
    assert duplicates(view(pods=[a_pod("a", 0), a_pod("a", 0)])) == ["rank pod 0 of a exists twice"]
    of_before = a_pod("a", 1)
    of_before["metadata"]["ownerReferences"][0]["uid"] = "set-a-before"
    assert duplicates(view(pods=[a_pod("a", 0), of_before])) == ["pods of a belong to 2 StatefulSets"]


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ([one_of("Service", "chat", "router"), one_of("Service", "chat-groups", "group")], []),
        ([one_of("Service", "chat", "router"), one_of("Service", "other", "router")], ["2 Services of router"]),
        ([one_of("Service", "a", "router"), one_of("Service", "b", "router", metadata={"deletionTimestamp": "now"})], []),
        ([one_of("PodGroup", name, "group", labels={"phalanx.dev/group": name}) for name in "ab"], []),
        ([one_of("PodGroup", name, "group", labels={"phalanx.dev/group": "a"}) for name in "ab"], ["2 PodGroups of a"]),
    ],
    ids=["one of each component", "two of one", "one of them goes", "one of each group", "two of one group"],
)
def test_second_object_of_a_component_counts_as_duplicate(there: list[Any], found: list[str]) -> None:
    assert duplicates(view(others=there)) == found


async def test_all_rendered_kinds_are_checked_for_owner_and_count() -> None:
    world = World(
        replicas=2,
        parallelism={"tensor": 2, "gpusPerPod": 1},
        monitoring={"serviceMonitor": "Auto"},
        router={"expose": {"type": "Ingress"}},
    )
    world.kube.unknown, world.kube.schedulers = set(), {NATIVE_API}
    await world.settle()
    plural_of = {resource.plural: kind for (_, kind), resource in RESOURCES.items()} | {"podgroups": "PodGroup"}
    of_kinds = {
        resource.plural: list(world.kube.of_kind(resource).values()) for resource in (*RESOURCES.values(), *POD_GROUPS.values())
    }
    existing = {where[0] for where in world.kube.objects}
    unrelated = {INFERENCE_SERVICES.plural, EVENTS.plural, PODS.plural}
    assert existing - unrelated == {plural for plural, found in of_kinds.items() if found}
    assert set(of_kinds) - existing == {"httproutes"}  # the service has an Ingress
    checked = ServiceState(
        world.service,
        of_kinds[STATEFUL_SETS.plural],
        list(world.kube.of_kind(PODS).values()),
        [],
        of_kinds[DEPLOYMENTS.plural],
        [
            {"kind": plural_of[plural]} | one
            for plural, found in of_kinds.items()
            for one in found
            if plural not in {r.plural for r in BASIC_KINDS}
        ],
    )
    assert duplicates(checked) == []
    assert [text for text in orphans(checked) if "Pod " not in text] == []


def test_kinds_that_the_cluster_lacks_are_skipped() -> None:
    served = {
        "/api/v1": ["pods", "services", "secrets", "configmaps", "serviceaccounts"],
        "/apis/policy/v1": ["poddisruptionbudgets"],
    }
    served |= {"/apis/monitoring.coreos.com/v1": ["servicemonitors"], "/apis/apps/v1": ["statefulsets", "deployments"]}
    groups = [{"versions": [{"groupVersion": path.removeprefix("/apis/")}]} for path in served if path.startswith("/apis/")]
    answers: dict[str, Any] = {path: {"resources": [{"name": name} for name in names]} for path, names in served.items()}
    answers["/apis"] = {"groups": groups}
    expected = {"services", "secrets", "configmaps", "serviceaccounts", "poddisruptionbudgets", "servicemonitors"}
    assert {kind.plural for kind in further_kinds(answers.get)} == expected
    for path in ("/apis", "/apis/policy/v1"):
        with pytest.raises(Failed, match=path):
            further_kinds({name: answer for name, answer in answers.items() if name != path}.get)


def test_duplicate_lasts_until_an_observation_without_it() -> None:
    since = update_since({}, ["a"], 1.0, 0.0)
    assert (since := update_since(since, ["a", "b"], 2.0, 1.0)) == {"a": 1.0, "b": 2.0}
    assert (since := update_since(since, ["b"], 3.0, 2.0)) == {"b": 2.0}
    assert update_since(since, [], 4.0, 3.0) == {}


def test_failed_observation_ends_no_duplicate_and_adds_no_time() -> None:
    since = update_since({"a": 1.0}, None, 7.0, 3.0)
    assert since == {"a": 5.0}, "it lasted 2 s before and after"
    assert update_since(since, ["a"], 7.5, 7.0) == {"a": 5.0}


@pytest.mark.parametrize(
    ("holder", "now_s", "leaderless"),
    [("a", 107.9, 0.0), ("a", 108.0, 8.0), ("a", 130.0, 30.0), ("", 100.0, 0.0), ("", 101.5, 1.5)],
    ids=["renewed recently", "run out", "long ago", "released now", "released"],
)
def test_expired_or_released_lease_has_no_leader(holder: str, now_s: float, leaderless: float) -> None:
    assert leaderless_s({"spec": {"holderIdentity": holder}}, 100.0, now_s) == leaderless


def samples_of(marks: str, served_at_s: float = 0.0) -> list[Sample]:
    """Returns an observation each second.

    `R`: Ready; `n`: not Ready; `?`: the API server did not answer; `L`: only the Lease could not be read; `o`: Ready, and without
    a leader, for one second at the first `o`.
    """

    def leaderless(at: int, mark: str) -> float | None:
        return None if mark == "L" else at - marks.index("o") + 1.0 if mark == "o" else 0.0

    return [Sample(float(at), mark != "?", mark not in "?n", leaderless(at, mark), served_at_s) for at, mark in enumerate(marks)]


@pytest.mark.parametrize(
    ("marks", "served_at_s", "found"),
    [
        ("R" * 11, 0.0, []),
        ("R" * 14, 0.0, [FalseReady(0.0, 13.0, 13.0)]),
        ("R" * 20, 12.0, []),
        ("R" * 20, 5.5, [FalseReady(5.5, 19.0, 13.5)]),
        ("n" * 30, 0.0, []),
        ("?" * 30, 0.0, []),
        ("L" * 30, 0.0, []),
        ("o" * 30, 0.0, []),
        ("R" * 10 + "?" + "R" * 9, 0.0, [FalseReady(0.0, 19.0, 18.0)]),
        ("R" * 10 + "L" + "R" * 9, 0.0, [FalseReady(0.0, 19.0, 18.0)]),
        ("R?" * 10, 0.0, []),
        ("R?" * 12, 0.0, [FalseReady(0.0, 22.0, 11.0)]),
        ("R" * 6 + "?" * 25 + "R" * 5, 0.0, []),
        ("R" * 6 + "?" * 25 + "R" * 6, 0.0, [FalseReady(0.0, 36.0, 11.0)]),
        ("R" * 6 + "?" * 5 + "R" * 10, 9.5, []),
        ("R" * 10 + "n" + "R" * 10, 0.0, []),
        ("R" * 10 + "?n?" + "R" * 10, 0.0, []),
        ("R" * 10 + "oo" + "R" * 9, 0.0, [FalseReady(0.0, 20.0, 18.0)]),
        ("R" * 10 + "ooo" + "R" * 10, 0.0, []),
        ("R" * 10 + "oLo" + "R" * 10, 0.0, []),
        ("R" * 14 + "n" + "R" * 14, 0.0, [FalseReady(0.0, 13.0, 13.0), FalseReady(15.0, 28.0, 13.0)]),
    ],
    ids=[
        *("short", "a violation", "served", "served at first", "not ready", "never seen", "never a Lease", "no operator"),
        *("one read failed", "one read of the Lease failed", "every other look failed", "and still a violation"),
        *("the API server was away", "and it was a violation before and after", "served without observation"),
        *("not ready", "not ready between", "handed over", "no operator between", "nor with an unread Lease", "two violations"),
    ],
)
def test_ready_status_without_serving_is_a_violation(marks: str, served_at_s: float, found: list[FalseReady]) -> None:
    assert false_ready_periods(samples_of(marks, served_at_s), 10.0) == found


async def test_only_a_newline_ends_a_line_of_a_stream() -> None:
    text = 'id: a:1\ndata: "a\u2028b\x85c"\n\ndata: [DONE]\n'.encode()

    async def chunks(at: int) -> AsyncIterator[bytes]:
        for chunk in (text[:at], text[at:]):
            yield chunk

    for at in range(len(text)):
        assert [event async for event in events(chunks(at))] == [("a:1", '"a\u2028b\x85c"'), ("", "[DONE]")]


def test_non_stream_answer_reports_its_sender() -> None:
    assert refusal_of(404, b'{"error": {"code": "model_not_found"}}') == "HTTP 404 model_not_found"
    assert refusal_of(404, b'{"detail": "Not Found"}') == """HTTP 404 '{"detail": "Not Found"}'"""
    assert refusal_of(503, b"\xffaway") == "HTTP 503 '\ufffdaway'"
