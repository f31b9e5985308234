"""S14 and a hanging start: restarts of groups, and their end.

The groups read a model of which a file is missing for a while. Running groups have read it.
"""

import shutil
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.cluster.scenes import Scene
from tests.cluster.watching import always, at_most

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CLAIM = "repaired"
WINDOW_S, PAUSE_S = 300, 60
"""A pause is at most the window; the first is a minute."""
STARTUP_S = 60
WEIGHTS, REMOVED = "model.safetensors", "away"
FREEZE = """
import os, pathlib, signal
for entry in pathlib.Path("/proc").iterdir():
    words = (entry / "cmdline").read_bytes().split(b"\\0") if entry.name.isdigit() else []
    if len(words) > 1 and words[1].endswith(b"/phalanx-runtime"):
        os.kill(int(entry.name), signal.SIGSTOP)
        print("stopped", entry.name)
"""


@pytest.fixture(scope="module")
def model(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    if scene.cluster.files is None:
        pytest.skip("the folder is of this machine")
    folder = tmp_path_factory.mktemp("repaired")
    folder.chmod(0o755)  # pods run as another user
    scene.cluster.claim(scene.namespace, CLAIM, folder)
    return shutil.copytree(tiny_model.folder() / tiny_model.NAME, folder / tiny_model.NAME)


@pytest.fixture
def repaired(scene: Scene, model: Path) -> Iterator[Scene]:
    """A namespace without services. The model is repaired at the end."""
    scene.delete_service()
    yield scene
    scene.delete_service()
    if (model / REMOVED).exists():
        (model / REMOVED).rename(model / WEIGHTS)


def manifest(scene: Scene, replicas: int, pods: int, **policy: Any) -> dict[str, Any]:
    """Returns a service of that model."""
    body = scene.manifest(replicas=replicas, pods=pods, restartPolicy=policy)
    body["spec"]["model"] = {"uri": f"pvc://{CLAIM}/{tiny_model.NAME}"}
    return body


def created_at(body: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(body["metadata"]["creationTimestamp"])


def test_s14_crash_looping_group_is_given_up_others_serve(repaired: Scene, model: Path) -> None:
    """One attempt on each node, then a pause of a minute; the next one succeeds."""
    repaired.apply(manifest(repaired, 2, 1, maxGroupRestarts=1, windowSeconds=WINDOW_S))
    repaired.wait_ready(2, 300)
    untouched = {name: repaired.fingerprints(name) for name in repaired.groups()}
    attempts: dict[str, dict[str, Any]] = {}

    def check() -> str:
        sets = repaired.sets()
        attempts.update({body["metadata"]["uid"]: body for name, body in sets.items() if name not in untouched})
        return at_most(3, list(sets), "too many groups")

    with repaired.traffic() as traffic, always(check) as errors:
        (model / WEIGHTS).rename(model / REMOVED)
        repaired.scale(3)
        svc.wait_for(lambda: repaired.condition("Stalled") == ("True", "RestartBudgetSpent"), 300, "the budget is spent")
        assert_stalled(repaired)
        recovery = repaired.status()["recovery"]
        (model / REMOVED).rename(model / WEIGHTS)
        svc.wait_for(lambda: repaired.is_ready(3), PAUSE_S + 240, "the next attempt serves")
    assert (errors, traffic.failed) == ([], [])
    _, _, third = sorted(attempts.values(), key=created_at)
    pause = created_at(third) - datetime.fromisoformat(recovery["lastTime"])
    print(f"{traffic.answered} answers during the test; the third attempt followed a pause of {pause.total_seconds():.0f} s")
    assert pause >= timedelta(seconds=PAUSE_S)
    assert {name: repaired.fingerprints(name) for name in untouched} == untouched
    assert repaired.condition("Stalled") == ("", "")
    assert repaired.condition("CapacityAvailable") == ("True", "Scheduled")


def assert_stalled(scene: Scene) -> None:
    """Checks the status without further attempts."""
    recovery = scene.status()["recovery"]
    assert (recovery["givenUp"], len(recovery["nodes"])) == (2, 2), "the second attempt was on the other node"
    message = scene.message("Stalled")
    assert f"restarted 2 times within {WINDOW_S} s" in message and "it has no *.safetensors" in message
    assert scene.condition("Ready") == ("False", "RestartBudgetSpent")
    assert scene.condition("Available") == ("True", "Serving")
    assert scene.condition("CapacityAvailable") == ("False", "GangWaiting"), "a group is missing"
    svc.wait_for(lambda: ("Warning", "RestartBudgetSpent") in scene.events(), 30, "an event")


def starting_leader(scene: Scene, former: str) -> str | None:
    """Returns the leader of the other group once its container runs, which needs seconds more to serve."""
    for name, pods in scene.by_group().items():
        leader = pods.get(f"{name}-0", {})
        states = [status.get("state", {}) for status in leader.get("status", {}).get("containerStatuses", [])]
        if name != former and states and all("running" in state for state in states):
            return f"{name}-0"
    return None


def test_hanging_group_loses_all_pods_once_and_then_serves(repaired: Scene) -> None:
    """Its leader is frozen while it loads the model."""
    repaired.apply(manifest(repaired, 1, 2, startupSeconds=STARTUP_S))
    repaired.wait_ready(1, 300)
    (untouched,) = repaired.groups()
    before, observed = repaired.fingerprints(untouched), dict[str, dict[str, dict[str, Any]]]()

    def check() -> str:
        late = [pods for name, pods in repaired.by_group().items() if name != untouched]
        for name, pod in (item for pods in late for item in pods.items()):
            observed.setdefault(name, {})[pod["metadata"]["uid"]] = pod
        return at_most(1, late, "too many groups")

    with repaired.traffic() as traffic, always(check) as errors:
        repaired.scale(2)
        leader = svc.wait_for(lambda: starting_leader(repaired, untouched), 120, "its leader starts")
        freeze = ("exec", leader, f"--namespace={repaired.namespace}", "-c", "runtime", "--", "python3", "-c", FREEZE)
        assert "stopped" in repaired.cluster.kubectl(*freeze)
        svc.wait_for(lambda: [len(pods) for pods in observed.values()] == [2, 2], STARTUP_S + 120, "both pods are replaced")
        repaired.wait_ready(2, 300)
    assert (errors, traffic.failed) == ([], [])
    assert [len(pods) for pods in observed.values()] == [2, 2], "each pod is replaced once"
    for first, second in (sorted(pods.values(), key=created_at) for pods in observed.values()):
        assert created_at(second) >= created_at(first) + timedelta(seconds=STARTUP_S)
    (late,) = set(repaired.groups()) - {untouched}
    assert {group["name"]: group["restarts"] for group in repaired.status()["groups"]} == {untouched: 0, late: 1}
    assert ("Normal", "GroupRestarted") in repaired.events()
    assert repaired.fingerprints(untouched) == before
