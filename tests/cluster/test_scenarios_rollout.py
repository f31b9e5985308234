"""S11, S21, S24, S25, S26, S28, S32: rollouts and scale-in, some under load; rollback; canaries."""

import functools
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster import service as svc
from tests.cluster.clients import Streams
from tests.cluster.scenes import Scene
from tests.cluster.watching import always, at_most

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PRE_STOP_S = 8
TOKENS = 900
DEADLINE_S = 60


@pytest.fixture(scope="module")
def rolled(scene: Scene) -> Iterator[Scene]:
    """A service of one-pod groups, scaled by each test."""
    scene.apply(scene.manifest(replicas=4, pods=1))
    scene.wait_ready(4, 400)
    yield scene
    scene.delete_service()


def test_s21_image_change_keeps_group_count_within_bounds(rolled: Scene) -> None:
    """A terminating group counts: its successor waits for its devices."""
    if rolled.cluster.files is None:
        pytest.skip("tags an image on every node: only in the cluster of this machine")
    before, image = set(rolled.groups()), rolled.cluster.retagged("runtime", "another")

    def check() -> str:
        ready, items = rolled.ready_groups(), rolled.get("statefulsets")["items"]
        terminating = [body["metadata"]["name"] for body in items if "deletionTimestamp" in body["metadata"]]
        live = [body["metadata"]["name"] for body in items if body["metadata"]["name"] not in terminating]
        few = "" if len(ready) >= 3 else f"only {len(ready)} of 4 groups are ready"
        return few or at_most(4, live, "too many groups") or at_most(1, terminating, "several groups terminate")

    with always(check) as errors:
        rolled.patch({"engine": {"image": image}})
        svc.wait_for(lambda: rolled.is_ready(4) and not before & set(rolled.groups()), 600, "all groups are new")
    assert errors == []
    containers = [c for pod in rolled.pods().values() for c in pod["spec"]["containers"] if c["name"] == "runtime"]
    assert [c["image"] for c in containers] == [image] * 4


def test_s11_each_group_is_replaced_once(rolled: Scene) -> None:
    rolled.scale(2)
    rolled.wait_ready(2, 300)
    old = {name: body["metadata"]["uid"] for name, body in rolled.sets().items()}
    sets: dict[str, set[str]] = {}
    pods: dict[str, set[str]] = {}

    def check() -> str:
        for body in rolled.get("statefulsets")["items"]:
            sets.setdefault(body["metadata"]["name"], set()).add(body["metadata"]["uid"])
        for name, uid in rolled.uids().items():
            pods.setdefault(name, set()).add(uid)
        return ""

    with always(check):
        rolled.roll("s11")
        svc.wait_for(lambda: rolled.is_ready(2) and not set(old) & set(rolled.groups()), 400, "both groups are new")
    assert len(sets) == 4 and all(len(uids) == 1 for uids in sets.values()), sets
    assert all(len(uids) == 1 for uids in pods.values()), pods
    assert rolled.restarts() == 0 and {rolled.incarnation(group) for group in rolled.groups()} == {1}


def test_s28_rollout_fails_no_request(rolled: Scene) -> None:
    rolled.scale(2)
    rolled.wait_ready(2, 300)
    before = set(rolled.groups())
    with rolled.traffic() as traffic:
        settled = traffic.answered
        rolled.roll("s28")
        svc.wait_for(lambda: rolled.is_ready(2) and not before & set(rolled.groups()), 400, "both groups are new")
        during = traffic.answered - settled
        time.sleep(5)
    assert traffic.failed == []
    assert during > 5 and traffic.answered > settled + during, "requests before, during and after the rollout"


def premature_deletion(scene: Scene) -> str:
    """Returns an error if a group of the newest revision terminates while an older one is live."""
    newest = scene.status()["updateRevision"]
    terminating, old = {}, []
    for body in scene.get("statefulsets")["items"]:
        name, revision = body["metadata"]["name"], body["metadata"]["labels"]["phalanx.dev/revision"]
        if "deletionTimestamp" in body["metadata"] or "phalanx.dev/draining" in body["metadata"].get("annotations", {}):
            terminating[name] = (revision, body["metadata"].get("deletionTimestamp", "is evacuated"))
        elif revision != newest:
            old.append(name)
    early = {name: state for name, state in terminating.items() if state[0] == newest}
    return f"{early} terminated before {old}" if early and old else ""


def test_s26_scale_in_during_rollout_removes_old_revision_first(rolled: Scene) -> None:
    """Unready groups would be removed first, so all are ready."""
    rolled.patch({"replicas": 4, "rollout": {"partition": 2}})
    rolled.wait_ready(4, 300)
    old = set(rolled.sets())
    rolled.roll("s26-half")
    svc.wait_for(lambda: rolled.is_ready(4) and len(set(rolled.sets()) - old) == 2, 300, "two of four are new")
    new = set(rolled.sets()) - old
    with always(lambda: premature_deletion(rolled)) as errors:
        rolled.scale(3)
        rolled.wait_ready(3, 120)
        rolled.scale(2)
        rolled.wait_ready(2, 120)
    assert errors == []
    assert set(rolled.sets()) == new, "the newer groups remain"
    rolled.patch({"rollout": {"partition": 0}})


def test_s26_rollout_changed_midway_ends_at_the_latest_spec(rolled: Scene) -> None:
    rolled.scale(3)
    rolled.wait_ready(3, 300)
    before = set(rolled.groups())
    rolled.roll("s26-first")
    svc.wait_for(lambda: before - set(rolled.sets()), 120, "the rollout has started")
    rolled.scale(4)
    svc.wait_for(lambda: len(rolled.sets()) == 4, 120, "four groups")
    rolled.roll("s26-last")
    rolled.scale(2)
    last = rolled.get("infsvc", "chat")["metadata"]["generation"]
    svc.wait_for(lambda: rolled.status().get("observedGeneration", 0) >= last, 60, "the operator has observed it")
    svc.wait_for(lambda: rolled.is_ready(2), 240, "two groups, before a stuck pod's grace period ends")
    rounds = {pod["metadata"]["annotations"]["example.com/round"] for pod in rolled.pods().values()}
    assert rounds == {"s26-last"} and not before & set(rolled.groups())


def long_requests() -> list[dict[str, object]]:
    """Returns requests that take seconds."""
    fixed = {"model": "tiny", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    return [{**fixed, "prompt": f"a long request, {i}", "seed": i} for i in range(6)]


def test_s32_stream_survives_scale_in_and_pods_have_prestop(rolled: Scene) -> None:
    rolled.patch({"replicas": 2, "drain": {"preStopSeconds": PRE_STOP_S, "timeoutSeconds": 120}})
    rolled.roll("s32")  # existing pods keep their former preStop
    rolled.wait_ready(2, 400)
    svc.wait_for(lambda: rolled.condition("Progressing") == ("True", "Complete"), 400, "all pods have it")
    requests = long_requests()
    deleted_s: dict[str, float] = {}
    terminations_s: dict[str, float] = {}

    def check() -> str:
        now, pods = time.monotonic(), rolled.pods()
        for name, pod in pods.items():
            if "deletionTimestamp" in pod["metadata"]:
                deleted_s.setdefault(name, now)
        terminations_s.update({n: now - at for n, at in deleted_s.items() if n not in pods and n not in terminations_s})
        return ""

    expected = [result.tokens for result in Streams(rolled.url, requests).run()]
    running: dict[str, float] = {}
    moves = rolled.num_moves()

    def scale_in() -> None:
        running.update({group: rolled.running(group) for group in rolled.groups()})
        rolled.scale(1)

    with always(check):
        streams = Streams(rolled.url, requests, scale_in)
        results = streams.run()
        rolled.wait_ready(1, 300)
        svc.wait_for(lambda: len(rolled.pods()) == 1, 120, "its pod is deleted")
        time.sleep(1)
    assert [(result.error, result.finish) for result in results] == [(None, "length")] * len(requests)
    assert [result.tokens for result in results] == expected and len(expected[0]) == TOKENS
    assert streams.spread is not None
    (victim,) = set(running) - set(rolled.sets())
    assert running[victim] > 0 and rolled.num_moves() > moves, "streams of the deleted group continued in the other"
    assert terminations_s and min(terminations_s.values()) >= PRE_STOP_S - 1, terminations_s


def test_s25_groups_that_never_ran_delay_no_rollout(rolled: Scene) -> None:
    rolled.patch({"drain": {"preStopSeconds": 0}})
    rolled.delete_service()
    bad = rolled.manifest(replicas=2, pods=1, engine={"image": "registry.invalid/none:1"})
    rolled.apply(bad)
    svc.wait_for(lambda: rolled.condition("Ready") == ("False", "ImagePullFailed"), 180, "the missing image is reported")
    old = set(rolled.sets())
    rolled.patch({"engine": {"image": None}})
    svc.wait_for(lambda: not old & set(rolled.sets()), 30, "both are replaced at once")
    rolled.wait_ready(2, 300)


def test_s24_surge_without_room_removes_one_group_first(scene: Scene) -> None:
    if scene.cluster.files is None:
        pytest.skip("occupies devices: only in the cluster of this machine")
    scene.delete_service()
    scene.apply(scene.manifest(replicas=2, pods=1, rollout={"maxSurge": 1, "maxUnavailable": 1, "surgeTimeoutSeconds": 20}))
    scene.wait_ready(2, 300)
    old = set(scene.groups())
    scene.occupy_all_but(0)
    try:
        started_s = time.monotonic()

        def check() -> str:
            ready = scene.ready_groups()
            early = time.monotonic() - started_s < 19 and len(old & set(scene.sets())) < 2
            return "an old group terminated before the surge timeout" if early else "" if ready else "no group is ready"

        with always(check) as errors:
            scene.roll("s24")
            svc.wait_for(lambda: scene.condition("Progressing") == ("True", "SurgeUnschedulable"), 120, "the surge has ended")
            svc.wait_for(lambda: scene.is_ready(2) and not old & set(scene.groups()), 400, "the rollout completes")
        assert errors == []
    finally:
        scene.release_devices()
    assert scene.condition("CapacityAvailable") == ("True", "Scheduled")


def test_failing_revision_rolls_back_and_no_request_fails(scene: Scene) -> None:
    """The new revision's model is missing. One group serves all the time; a stream of the other moves to it."""
    scene.delete_service()
    good_model = scene.manifest(replicas=2, pods=1, rollout={"onFailure": "Rollback", "progressDeadlineSeconds": DEADLINE_S})
    scene.apply(good_model)
    scene.wait_ready(2, 300)
    svc.wait_for(lambda: "configmap/chat-former" in scene.kubectl("get", "configmaps", "-o", "name"), 60, "it is stored")
    good, first = scene.status()["currentRevision"], set(scene.sets())
    with scene.traffic() as traffic:
        streams = Streams(scene.url, long_requests(), lambda: scene.patch({"model": {"uri": "file:///opt/no-such-model"}}))
        results = streams.run()
        svc.wait_for(lambda: len(set(scene.revisions())) == 2, 60, "it is attempted")
        svc.wait_for(lambda: scene.condition("Stalled") == ("True", "RolledBack"), DEADLINE_S + 120, "it is rolled back")
        svc.wait_for(
            lambda: scene.revisions() == [good, good] and scene.status()["readyReplicas"] == 2,
            300,
            "all are restored",
        )
        before = traffic.answered
        time.sleep(3)
    assert streams.spread is not None
    assert [(result.error, result.finish, len(result.tokens)) for result in results] == [(None, "length", TOKENS)] * len(results)
    assert traffic.failed == [] and traffic.answered > before
    status = scene.status()
    rollback = status["rollback"]
    assert rollback["to"] == good and rollback["revision"] == status["updateRevision"] != good
    assert first & set(scene.sets()), "one group never terminated"
    assert scene.condition("Ready") == scene.condition("Progressing") == ("False", "RolledBack")
    assert scene.condition("Available") == ("True", "Serving")
    svc.wait_for(lambda: ("Warning", "RolledBack") in scene.events(), 30, "an event")
    uids = scene.uids()
    scene.apply(good_model)
    scene.wait_ready(2, 120)
    assert "rollback" not in scene.status() and scene.condition("Stalled") == ("", "")
    assert scene.uids() == uids, "no pod is replaced"


def test_rollout_to_compressed_pages_recomputes_streams(scene: Scene) -> None:
    """The layouts of bf16 and int8 pages differ, so streams of the draining group continue without its pages."""
    scene.delete_service()
    surge = {"maxSurge": 1, "maxUnavailable": 0}
    scene.apply(scene.manifest(replicas=1, pods=1, engine={"dtype": "bfloat16"}, rollout=surge))
    scene.wait_ready(1, 300)
    old, results, end_s = set(scene.groups()), [], time.monotonic() + 400
    with scene.traffic() as traffic:
        scene.patch({"engine": {"kvCacheDtype": "int8"}})
        while not (scene.is_ready(1) and not old & set(scene.groups())):
            assert time.monotonic() < end_s, "the rollout does not complete"
            results += Streams(scene.url, long_requests()).run()
    assert [(result.error, result.finish, len(result.tokens)) for result in results] == [(None, "length", TOKENS)] * len(results)
    assert results and traffic.failed == []
    assert scene.num_takeovers() > 0 and scene.router_metric("phalanx_router_move_bytes_total") == 0
    scene.delete_service()


def test_canary_gets_its_share_of_requests(scene: Scene) -> None:
    scene.delete_service()
    scene.apply(scene.manifest(replicas=2, pods=1, rollout={"partition": 1, "canaryWeight": 25}))
    scene.wait_ready(2, 300)
    old = scene.status()["currentRevision"]
    scene.roll("canary")
    svc.wait_for(lambda: len(set(scene.revisions())) == 2 and scene.is_ready(2), 300, "one group of each revision serves")
    new = scene.status()["updateRevision"]
    assert new != old and scene.status()["updatedReplicas"] == 1
    scene.wait_ready(2, 60)
    measured = share(scene, new, 400)
    print(f"a canary of weight 25 answered {measured:.1%} of 400 requests")
    assert 0.15 < measured < 0.35, "the standard deviation is about a fiftieth"
    for weight in (100, 0):
        scene.patch({"rollout": {"canaryWeight": weight}})
        expected = weight / 100
        svc.wait_for(functools.partial(has_share, scene, new, expected), 60, "routers apply the weight")
        assert share(scene, new, 100) == expected
    scene.patch({"rollout": {"partition": 0, "canaryWeight": None}})
    svc.wait_for(lambda: scene.revisions() == [new, new], 300, "the rollout completes")
    scene.wait_ready(2, 300)
    scene.delete_service()


def share(scene: Scene, revision: str, count: int) -> float:
    """Sends requests one at a time and returns the share that a revision answered, by the leaders' metrics."""
    before = num_answered(scene)
    url = f"{scene.url}/v1/completions"
    with httpx.Client(timeout=60) as client:
        for number in range(count):
            body = {"model": "tiny", "prompt": f"share {number}", "max_tokens": 1}
            client.post(url, json=body).raise_for_status()
    svc.wait_for(lambda: (num_answered(scene) - before).total() == count, 30, "all requests are counted")
    return (num_answered(scene) - before)[revision] / count


def has_share(scene: Scene, revision: str, expected: float) -> bool:
    return share(scene, revision, 20) == expected


def num_answered(scene: Scene) -> Counter[str]:
    """Returns the answered requests of one-pod groups by revision."""
    counts: Counter[str] = Counter()
    for pod in scene.pods().values():
        page = httpx.get(f"http://{pod['status']['podIP']}:8000/metrics", timeout=10).text
        counts[pod["metadata"]["labels"]["phalanx.dev/revision"]] += int(svc.metric(page, "vllm:request_success_total"))
    return counts
