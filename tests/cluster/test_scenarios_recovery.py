"""S14, and a start that hangs: what the operator does where ranks and containers do not come to serve, and when it stops.

The groups read a model of the scenarios' own, of which something is missing for a while. Those that serve have read it.
"""

import os
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
CLAIM = "mended"
WINDOW_S, PAUSE_S = 300, 60
"""A pause is never longer than the window; the first one is a minute."""
STARTUP_S = 60
WEIGHTS, AWAY, INDEX = "model.safetensors", "away", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    if scene.cluster.files is None:
        pytest.skip("the folder is of this machine")
    folder = tmp_path_factory.mktemp("mended")
    folder.chmod(0o755)  # pods do not run as the user who made it
    scene.cluster.claim(scene.namespace, CLAIM, folder)
    return shutil.copytree(tiny_model.folder() / tiny_model.NAME, folder / tiny_model.NAME)


@pytest.fixture
def mended(scene: Scene, model: Path) -> Iterator[Scene]:
    """A namespace without a service, before and after. Its scenario does something to the model, which is whole again then."""
    scene.gone()
    yield scene
    scene.gone()
    (model / INDEX).unlink(missing_ok=True)
    if (model / AWAY).exists():
        (model / AWAY).rename(model / WEIGHTS)


def manifest(scene: Scene, replicas: int, pods: int, **policy: Any) -> dict[str, Any]:
    """A service of that model."""
    made = scene.manifest(replicas=replicas, pods=pods, restartPolicy=policy)
    made["spec"]["model"] = {"uri": f"pvc://{CLAIM}/{tiny_model.NAME}"}
    return made


def made(body: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(body["metadata"]["creationTimestamp"])


def test_s14_crash_looping_group_is_given_up_others_serve(mended: Scene, model: Path) -> None:
    """One on each node, and then none for a minute; the next one finds what was missing."""
    mended.apply(manifest(mended, 2, 1, maxGroupRestarts=1, windowSeconds=WINDOW_S))
    mended.wait_ready(2, 300)
    calm = {name: mended.fingerprints(name) for name in mended.groups()}
    tries: dict[str, dict[str, Any]] = {}

    def look() -> str:
        sets = mended.sets()
        tries.update({one["metadata"]["uid"]: one for name, one in sets.items() if name not in calm})
        return at_most(3, list(sets), "too many groups")

    with mended.traffic() as traffic, always(look) as wrong:
        (model / WEIGHTS).rename(model / AWAY)
        mended.scale(3)
        svc.wait_for(lambda: mended.condition("Stalled") == ("True", "RestartBudgetSpent"), 300, "the budget is spent")
        assert_stalled(mended)
        spent = mended.status()["recovery"]
        (model / AWAY).rename(model / WEIGHTS)
        svc.wait_for(lambda: mended.is_ready(3), PAUSE_S + 240, "the next one serves")
    assert (wrong, traffic.failed) == ([], [])
    _, _, third = sorted(tries.values(), key=made)
    pause = made(third) - datetime.fromisoformat(spent["lastTime"])
    print(f"{traffic.answered} answers meanwhile; the third one was made after a pause of {pause.total_seconds():.0f} s")
    assert pause >= timedelta(seconds=PAUSE_S)
    assert {name: mended.fingerprints(name) for name in calm} == calm
    assert mended.condition("Stalled") == ("", "")
    assert mended.condition("CapacityAvailable") == ("True", "Scheduled")


def assert_stalled(scene: Scene) -> None:
    """What the status says while nothing more is tried."""
    recovery = scene.status()["recovery"]
    assert (recovery["givenUp"], len(recovery["nodes"])) == (2, 2), "the second one was elsewhere"
    said = scene.message("Stalled")
    assert f"restarted 2 times within {WINDOW_S} s" in said and "it has no *.safetensors" in said
    assert scene.condition("Ready") == ("False", "RestartBudgetSpent")
    assert scene.condition("Available") == ("True", "Serving")
    assert scene.condition("CapacityAvailable") == ("False", "GangWaiting"), "a group that is wanted is not made"
    svc.wait_for(lambda: ("Warning", "RestartBudgetSpent") in scene.events(), 30, "and an event")


def test_hanging_group_loses_all_pods_once_and_then_serves(mended: Scene, model: Path) -> None:
    """Its ranks read a file whose storage does not answer; pods that are made later find none."""
    mended.apply(manifest(mended, 1, 2, startupSeconds=STARTUP_S))
    mended.wait_ready(1, 300)
    (calm,) = mended.groups()
    before, seen = mended.fingerprints(calm), dict[str, dict[str, dict[str, Any]]]()

    def look() -> str:
        late = [pods for name, pods in mended.by_group().items() if name != calm]
        for name, pod in (one for pods in late for one in pods.items()):
            seen.setdefault(name, {})[pod["metadata"]["uid"]] = pod
        return at_most(1, late, "too many groups")

    with mended.traffic() as traffic, always(look) as wrong:
        os.mkfifo(model / INDEX)
        mended.scale(2)
        svc.wait_for(lambda: [len(pods) for pods in seen.values()] == [2, 2], STARTUP_S + 120, "both pods are new")
        (model / INDEX).unlink()
        mended.wait_ready(2, 300)
    assert (wrong, traffic.failed) == ([], [])
    assert [len(pods) for pods in seen.values()] == [2, 2], "once, and no other one"
    for first, second in (sorted(pods.values(), key=made) for pods in seen.values()):
        assert made(second) >= made(first) + timedelta(seconds=STARTUP_S)
    (late,) = set(mended.groups()) - {calm}
    assert {group["name"]: group["restarts"] for group in mended.status()["groups"]} == {calm: 0, late: 1}
    assert ("Normal", "GroupRestarted") in mended.events()
    assert mended.fingerprints(calm) == before
