"""What the chaos bench calls wrong, and what it does not."""

import random
from typing import Any

import pytest

from bench.chaos.look import Sample, View, double, lies, orphans, unsettled
from bench.chaos.strikes import NOT_DONE, order, unstruck
from bench.chaos.traffic import lines_of, refusal_of

READY = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def made(name: str, uid: str, owner: str = "", **fields: Any) -> dict[str, Any]:
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
    return made(name, f"set-{name}", "service", spec={"replicas": 2}, metadata=metadata)


def a_pod(group: str, index: int, **fields: Any) -> dict[str, Any]:
    labels = {"phalanx.dev/component": "group", "phalanx.dev/group": group, "apps.kubernetes.io/pod-index": str(index)}
    return made(f"{group}-{index}", f"{group}-{index}", f"set-{group}", labels=labels, **{**READY, **fields})


def view(**fields: Any) -> View:
    status = {"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True"}]}
    service = {"metadata": {"uid": "service", "generation": 1}, "spec": {"replicas": 2}, "status": status}
    deployment = made("r", "deployment", "service", spec={"replicas": 1}, status={"readyReplicas": 1})
    router = made("router", "router", "rs", labels={"phalanx.dev/component": "router"}, **READY)
    pods = [a_pod(group, index) for group in "ab" for index in (0, 1)]
    defaults: dict[str, Any] = {
        "service": service,
        "sets": [a_set("a"), a_set("b")],
        "pods": [*pods, router],
        "replica_sets": [made("rs", "rs", "deployment")],
        "deployments": [deployment],
    }
    return View(**defaults | fields)


def test_a_service_that_is_as_wanted_is_settled() -> None:
    assert unsettled(view()) == orphans(view()) == double(view()) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sets": [a_set("a")]}, "1 StatefulSets"),
        ({"sets": [a_set("a"), a_set("b", annotations={"phalanx.dev/draining": "x"})]}, "1 of them stay"),
        ({"pods": [a_pod("a", 0), a_pod("a", 1)]}, "2 pods of groups, 4 wanted"),
        ({"pods": [a_pod("a", 0, status={})]}, "pod a-0 is not ready"),
        ({"pods": [a_pod("z", 0)]}, "z-0 has no owner"),
        ({"deployments": [made("r", "deployment", "service", spec={"replicas": 2}, status={"readyReplicas": 1})]}, "has 1 ready"),
        ({"service": {**view().service, "status": {"observedGeneration": 1}}}, "not Ready: no status"),
        ({"service": {**view().service, "metadata": {"uid": "service", "generation": 2}}}, "older spec"),
    ],
)
def test_what_is_not_settled_is_named(fields: dict[str, Any], words: str) -> None:
    assert any(words in sentence for sentence in unsettled(view(**fields)))


def test_a_group_too_many_and_a_rank_twice_are_double() -> None:
    assert double(view(sets=[a_set("a"), a_set("b"), a_set("c")])) == ["3 groups stay, 2 wanted"]
    assert double(view(sets=[a_set("a"), a_set("b"), a_set("c", deletionTimestamp="now")])) == []
    assert double(view(pods=[a_pod("a", 0), a_pod("a", 0)])) == ["rank pod 0 of a is there twice"]


def moments(count: int, served_at_s: float = 0.0, **fields: Any) -> list[Sample]:
    defaults = {"is_known": True, "says_ready": True, "has_operator": True}
    return [Sample(float(at), served_at_s=served_at_s, **defaults | fields) for at in range(count)]


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        (moments(11), []),
        (moments(14), [(0.0, 13.0)]),
        (moments(20, served_at_s=12.0), []),
        (moments(30, says_ready=False), []),
        (moments(30, has_operator=False), []),
        ([*moments(9), *moments(1, is_known=False), *moments(9)], []),
    ],
    ids=["short", "a lie", "served", "not ready", "no operator", "no API server between"],
)
def test_the_status_lies_when_it_says_ready_for_long_and_nothing_is_served(samples: list[Sample], found: list[Any]) -> None:
    assert lies(samples, 10.0) == found


def test_every_kind_of_strike_comes_once_before_any_comes_twice_and_a_seed_repeats_it() -> None:
    kinds = ["api", "node", "operator", "pod"]
    one, other = (order(kinds, random.Random(7)) for _ in range(2))
    drawn = [one() for _ in range(12)]
    assert sorted(drawn[:4]) == kinds and drawn == [other() for _ in range(12)]


def test_what_could_never_be_struck_is_wrong_and_what_failed_once_is_not() -> None:
    failed = f"{NOT_DONE}kubectl: busy"
    strikes = [
        ("node", failed, 1.0),
        ("pod", failed, 1.0),
        ("pod", "chat-0 killed", 9.0),
        ("cut", failed, 1.0),
        ("node", failed, 1.0),
    ]
    assert unstruck(strikes) == [f"node was never struck: {failed}"]
    assert unstruck([]) == []


def test_only_a_newline_ends_a_line_of_a_stream() -> None:
    text = 'data: "a\u2028b\x85c"\n\ndata: [DONE]\n'.encode()
    for at in range(len(text)):
        assert list(lines_of([text[:at], text[at:]])) == ['data: "a\u2028b\x85c"', "", "data: [DONE]"]


def test_an_answer_that_is_no_stream_tells_whose_it_is() -> None:
    assert refusal_of(404, b'{"error": {"code": "model_not_found"}}') == "HTTP 404 model_not_found"
    assert refusal_of(404, b'{"detail": "Not Found"}') == """HTTP 404 '{"detail": "Not Found"}'"""
    assert refusal_of(503, b"\xffaway") == "HTTP 503 '\ufffdaway'"
