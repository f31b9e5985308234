"""S11, S21, S24, S25, S26, S28, S32: how groups are replaced and leave, with requests where the scenario speaks of them.

Behind them: a revision that goes back by itself, and one that gets a share of the requests.
"""

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
    """A service of one-pod groups, which the tests scale as they need."""
    scene.apply(scene.manifest(replicas=4, pods=1))
    scene.wait_ready(4, 400)
    yield scene
    scene.gone()


def test_s21_image_change_keeps_group_count_within_bounds(rolled: Scene) -> None:
    """One that is on its way out counts: its successor waits for its devices, and no other one goes before that is ready."""
    if rolled.cluster.files is None:
        pytest.skip("an image gets another name on every node: the cluster of this machine only")
    before, image = set(rolled.groups()), rolled.cluster.retagged("runtime", "another")

    def look() -> str:
        ready, there = rolled.ready_groups(), rolled.get("statefulsets")["items"]
        going = [one["metadata"]["name"] for one in there if "deletionTimestamp" in one["metadata"]]
        here = [one["metadata"]["name"] for one in there if one["metadata"]["name"] not in going]
        few = "" if len(ready) >= 3 else f"only {len(ready)} of 4 groups are ready"
        return few or at_most(4, here, "too many groups") or at_most(1, going, "several groups are on their way out")

    with always(look) as wrong:
        rolled.patch({"engine": {"image": image}})
        svc.wait_for(lambda: rolled.is_ready(4) and not before & set(rolled.groups()), 600, "all groups are new")
    assert wrong == []
    containers = [one for pod in rolled.pods().values() for one in pod["spec"]["containers"] if one["name"] == "runtime"]
    assert [one["image"] for one in containers] == [image] * 4


def test_s11_each_group_is_replaced_once(rolled: Scene) -> None:
    rolled.scale(2)
    rolled.wait_ready(2, 300)
    old = {name: body["metadata"]["uid"] for name, body in rolled.sets().items()}
    sets: dict[str, set[str]] = {}
    pods: dict[str, set[str]] = {}

    def look() -> str:
        for body in rolled.get("statefulsets")["items"]:
            sets.setdefault(body["metadata"]["name"], set()).add(body["metadata"]["uid"])
        for name, uid in rolled.uids().items():
            pods.setdefault(name, set()).add(uid)
        return ""

    with always(look):
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
    assert during > 5 and traffic.answered > settled + during, "requests came before, during and after"


def going_too_soon(scene: Scene) -> str:
    """Which group of the newest revision is on its way out although an older one stays; groups are as old as their word."""
    newest = scene.status()["updateRevision"]
    going, old = {}, []
    for one in scene.get("statefulsets")["items"]:
        name, revision = one["metadata"]["name"], one["metadata"]["labels"]["phalanx.dev/revision"]
        if "deletionTimestamp" in one["metadata"] or "phalanx.dev/draining" in one["metadata"].get("annotations", {}):
            going[name] = (revision, one["metadata"].get("deletionTimestamp", "is emptied"))
        elif revision != newest:
            old.append(name)
    early = {name: told for name, told in going.items() if told[0] == newest}
    return f"{early} went before {old}" if early and old else ""


def test_s26_scale_in_during_rollout_removes_old_revision_first(rolled: Scene) -> None:
    """Those that are not ready would go before: so all are, half of them new, when there are to be fewer."""
    rolled.patch({"replicas": 4, "rollout": {"partition": 2}})
    rolled.wait_ready(4, 300)
    old = set(rolled.sets())
    rolled.roll("s26-half")
    svc.wait_for(lambda: rolled.is_ready(4) and len(set(rolled.sets()) - old) == 2, 300, "two of four are new")
    new = set(rolled.sets()) - old
    with always(lambda: going_too_soon(rolled)) as wrong:
        rolled.scale(3)
        rolled.wait_ready(3, 120)
        rolled.scale(2)
        rolled.wait_ready(2, 120)
    assert wrong == []
    assert set(rolled.sets()) == new, "though they are the younger ones"
    rolled.patch({"rollout": {"partition": 0}})


def test_s26_rollout_changed_midway_ends_at_the_latest_spec(rolled: Scene) -> None:
    rolled.scale(3)
    rolled.wait_ready(3, 300)
    before = set(rolled.groups())
    rolled.roll("s26-first")
    svc.wait_for(lambda: before - set(rolled.sets()), 120, "the rollout has begun")
    rolled.scale(4)
    svc.wait_for(lambda: len(rolled.sets()) == 4, 120, "a group more")
    rolled.roll("s26-last")
    rolled.scale(2)
    last = rolled.get("infsvc", "chat")["metadata"]["generation"]
    svc.wait_for(lambda: rolled.status().get("observedGeneration", 0) >= last, 60, "the operator saw it")
    svc.wait_for(lambda: rolled.is_ready(2), 240, "two groups, before the grace of a pod that did not hear is over")
    notes = {pod["metadata"]["annotations"]["example.com/round"] for pod in rolled.pods().values()}
    assert notes == {"s26-last"} and not before & set(rolled.groups())


def long_ones() -> list[dict[str, object]]:
    """Bodies of streams that take seconds."""
    fixed = {"model": "tiny", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    return [{**fixed, "prompt": f"a long one, {i}", "seed": i} for i in range(6)]


def test_s32_stream_survives_scale_in_and_pods_have_prestop(rolled: Scene) -> None:
    rolled.patch({"replicas": 2, "drain": {"preStopSeconds": PRE_STOP_S, "timeoutSeconds": 120}})
    rolled.roll("s32")  # pods have the pause that held when they were made
    rolled.wait_ready(2, 400)
    svc.wait_for(lambda: rolled.condition("Progressing") == ("True", "Complete"), 400, "all have it")
    asked = long_ones()
    began: dict[str, float] = {}
    lived: dict[str, float] = {}

    def look() -> str:
        now, there = time.monotonic(), rolled.pods()
        for name, pod in there.items():
            if "deletionTimestamp" in pod["metadata"]:
                began.setdefault(name, now)
        lived.update({name: now - at for name, at in began.items() if name not in there and name not in lived})
        return ""

    alone = [one.tokens for one in Streams(rolled.url, asked).run()]
    held: dict[str, float] = {}
    moved = rolled.moved()

    def scale_in() -> None:
        held.update({group: rolled.running(group) for group in rolled.groups()})
        rolled.scale(1)

    with always(look):
        streams = Streams(rolled.url, asked, scale_in)
        told = streams.run()
        rolled.wait_ready(1, 300)
        svc.wait_for(lambda: len(rolled.pods()) == 1, 120, "its pod is gone")
        time.sleep(1)
    assert [(one.error, one.finish) for one in told] == [(None, "length")] * len(asked)
    assert [one.tokens for one in told] == alone and len(alone[0]) == TOKENS
    assert streams.spread is not None
    (victim,) = set(held) - set(rolled.sets())
    assert held[victim] > 0 and rolled.moved() > moved, "the group that left had streams, which went on in the other one"
    assert list(lived.values()) and min(lived.values()) >= PRE_STOP_S - 1, lived


def test_s25_groups_that_never_ran_hold_no_rollout_up(rolled: Scene) -> None:
    rolled.patch({"drain": {"preStopSeconds": 0}})
    rolled.gone()
    bad = rolled.manifest(replicas=2, pods=1, engine={"image": "registry.invalid/none:1"})
    rolled.apply(bad)
    svc.wait_for(lambda: rolled.condition("Ready") == ("False", "ImagePullFailed"), 180, "the image is not there")
    old = set(rolled.sets())
    rolled.patch({"engine": {"image": None}})
    svc.wait_for(lambda: not old & set(rolled.sets()), 30, "both are replaced at once")
    rolled.wait_ready(2, 300)


def test_s24_a_surge_without_room_takes_one_group_first(scene: Scene) -> None:
    if scene.cluster.files is None:
        pytest.skip("devices are taken away: the cluster of this machine only")
    scene.gone()
    scene.apply(scene.manifest(replicas=2, pods=1, rollout={"maxSurge": 1, "maxUnavailable": 1, "surgeTimeoutSeconds": 20}))
    scene.wait_ready(2, 300)
    old = set(scene.groups())
    scene.leave(0)
    try:
        began = time.monotonic()

        def look() -> str:
            ready = scene.ready_groups()
            early = time.monotonic() - began < 19 and len(old & set(scene.sets())) < 2
            return "an old group went before the time was over" if early else "" if ready else "no group is ready"

        with always(look) as wrong:
            scene.roll("s24")
            svc.wait_for(lambda: scene.condition("Progressing") == ("True", "SurgeUnschedulable"), 120, "the surge is given up")
            svc.wait_for(lambda: scene.is_ready(2) and not old & set(scene.groups()), 400, "it went on without a device more")
        assert wrong == []
    finally:
        scene.free_all()
    assert scene.condition("CapacityAvailable") == ("True", "Scheduled")


def test_failing_revision_rolls_back_and_no_request_fails(scene: Scene) -> None:
    """Its model is not there. The group that never went serves all the time; a stream of the one that goes first moves to it."""
    scene.gone()
    good_model = scene.manifest(replicas=2, pods=1, rollout={"onFailure": "Rollback", "progressDeadlineSeconds": DEADLINE_S})
    scene.apply(good_model)
    scene.wait_ready(2, 300)
    svc.wait_for(lambda: "configmap/chat-former" in scene.kubectl("get", "configmaps", "-o", "name"), 60, "it is kept")
    good, first = scene.status()["currentRevision"], set(scene.sets())
    with scene.traffic() as traffic:
        streams = Streams(scene.url, long_ones(), lambda: scene.patch({"model": {"uri": "file:///opt/no-such-model"}}))
        told = streams.run()
        svc.wait_for(lambda: len(set(scene.revisions())) == 2, 60, "the bad one is tried")
        svc.wait_for(lambda: scene.condition("Stalled") == ("True", "RolledBack"), DEADLINE_S + 120, "it is given up")
        svc.wait_for(lambda: scene.revisions() == [good, good] and scene.status()["readyReplicas"] == 2, 300, "all are back")
        before = traffic.answered
        time.sleep(3)
    assert streams.spread is not None
    assert [(one.error, one.finish, len(one.tokens)) for one in told] == [(None, "length", TOKENS)] * len(told)
    assert traffic.failed == [] and traffic.answered > before
    status = scene.status()
    note = status["rollback"]
    assert note["to"] == good and note["revision"] == status["updateRevision"] != good
    assert first & set(scene.sets()), "one of them never went"
    assert scene.condition("Ready") == scene.condition("Progressing") == ("False", "RolledBack")
    assert scene.condition("Available") == ("True", "Serving")
    svc.wait_for(lambda: ("Warning", "RolledBack") in scene.events(), 30, "an event")
    uids = scene.uids()
    scene.apply(good_model)
    scene.wait_ready(2, 120)
    assert "rollback" not in scene.status() and scene.condition("Stalled") == ("", "")
    assert scene.uids() == uids, "the former spec is what runs"


def test_canary_gets_its_share_of_requests(scene: Scene) -> None:
    scene.gone()
    scene.apply(scene.manifest(replicas=2, pods=1, rollout={"partition": 1, "canaryWeight": 25}))
    scene.wait_ready(2, 300)
    old = scene.status()["currentRevision"]
    scene.roll("canary")
    svc.wait_for(lambda: len(set(scene.revisions())) == 2 and scene.is_ready(2), 300, "one of each serves")
    new = scene.status()["updateRevision"]
    assert new != old and scene.status()["updatedReplicas"] == 1
    scene.wait_ready(2, 60)
    got = share(scene, new, 400)
    print(f"a canary of weight 25 answered {got:.1%} of 400 requests")
    assert 0.15 < got < 0.35, "chance is within a fiftieth of 0.25 in two of three runs"
    for weight in (100, 0):
        scene.patch({"rollout": {"canaryWeight": weight}})
        wanted = weight / 100
        svc.wait_for(functools.partial(has_share, scene, new, wanted), 60, "routers know the weight")
        assert share(scene, new, 100) == wanted
    scene.patch({"rollout": {"partition": 0, "canaryWeight": None}})
    svc.wait_for(lambda: scene.revisions() == [new, new], 300, "the rest follows")
    scene.wait_ready(2, 300)
    scene.gone()


def share(scene: Scene, revision: str, count: int) -> float:
    """Which part of so many requests, one after another, groups of a revision answered, by the leaders' own count."""
    before = answered(scene)
    url = f"{scene.url}/v1/completions"
    with httpx.Client(timeout=60) as client:
        for number in range(count):
            body = {"model": "tiny", "prompt": f"share {number}", "max_tokens": 1}
            client.post(url, json=body).raise_for_status()
    svc.wait_for(lambda: (answered(scene) - before).total() == count, 30, "all are counted")
    return (answered(scene) - before)[revision] / count


def has_share(scene: Scene, revision: str, wanted: float) -> bool:
    return share(scene, revision, 20) == wanted


def answered(scene: Scene) -> Counter[str]:
    """How many requests groups of one pod have answered, by revision."""
    found: Counter[str] = Counter()
    for pod in scene.pods().values():
        page = httpx.get(f"http://{pod['status']['podIP']}:8000/metrics", timeout=10).text
        found[pod["metadata"]["labels"]["phalanx.dev/revision"]] += int(svc.metric(page, "vllm:request_success_total"))
    return found
