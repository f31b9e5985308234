"""The list of adapters of a running service: downloads from a private hub, refusals in the status, removal, no new revision.

The list changes under traffic, and groups load an adapter while no operator runs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.cluster.config import API_IP
from tests.cluster.scenes import Scene
from tests.runtime.checkpoint.hub import HubServer, running_hub

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SECRET, TOKEN = "hub", "hub-token"
ENGINE = {"maxAdapters": 2, "maxLoraRank": 8, "adapterSecrets": [SECRET]}
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "seed": 7, "return_token_ids": True}


def repository(name: str) -> str:
    return f"org/{name}"


def declared(*names: str) -> dict[str, Any]:
    """Returns a spec with these adapters of the hub."""
    fields = [{"name": name, "uri": f"hf://{repository(name)}", "secretRef": {"name": SECRET}} for name in names]
    return {"adapters": fields}


def complete(scene: Scene, model: str) -> httpx.Response:
    return httpx.post(f"{scene.url}/v1/completions", json=BODY | {"model": model}, timeout=120)


def tokens(scene: Scene, model: str) -> list[int]:
    answer = complete(scene, model)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def listed(scene: Scene) -> list[str]:
    """Returns the model names of the service."""
    return [card["id"] for card in httpx.get(f"{scene.url}/v1/models", timeout=10).json()["data"]]


def states(scene: Scene) -> dict[str, str]:
    return {adapter["name"]: adapter["state"] for adapter in scene.status().get("adapters", [])}


def by_group(scene: Scene) -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
    """Returns, by adapter, the groups that hold it, and why others cannot load it."""
    adapters = scene.status().get("adapters", [])
    held = {adapter["name"]: adapter.get("groups", []) for adapter in adapters}
    refusals = {a["name"]: {refusal["group"]: refusal["message"] for refusal in a.get("refusals", [])} for a in adapters}
    return held, refusals


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A hub whose adapters need a token."""
    from tests.runtime.adapters import save_adapter  # imports torch, which takes seconds

    folder, base = tmp_path_factory.mktemp("adapters"), tiny_model.folder() / tiny_model.NAME
    with running_hub(API_IP) as hub:
        for seed, name in enumerate(("legal", "code", "late", "wide")):
            path: Path = save_adapter(folder / name, base, seed, rank=16 if name == "wide" else 4)
            hub.add(repository(name), {file.name: file.read_bytes() for file in path.iterdir()})
            hub.private[repository(name)] = TOKEN
        yield hub


@pytest.fixture(scope="module")
def adapting(scene: Scene, hub: HubServer) -> Iterator[Scene]:
    """Two groups with slots for adapters, and none declared."""
    if scene.cluster.files is None:
        pytest.skip("the hub is on this machine")
    scene.kubectl("create", "secret", "generic", SECRET, f"--from-literal=token={TOKEN}")
    manifest = scene.manifest(replicas=2, pods=1, engine=ENGINE)
    (runtime,) = [c for c in manifest["spec"]["podTemplate"]["spec"]["containers"] if c["name"] == "runtime"]
    runtime.setdefault("env", []).append({"name": "HF_ENDPOINT", "value": hub.endpoint})
    scene.apply(manifest)
    scene.wait_ready(2, 300)
    yield scene
    scene.delete_service()


def test_adapters_change_under_traffic_without_a_new_revision(adapting: Scene) -> None:
    uids, revision = adapting.uids(), adapting.status()["updateRevision"]
    with adapting.traffic() as traffic:
        adapting.patch(declared("legal", "code", "wide"))
        svc.wait_for(lambda: listed(adapting) == ["tiny", "legal", "code", "wide"], 60, "routers have the list")
        base = tokens(adapting, "tiny")
        answers = [tokens(adapting, name) for name in ("legal", "code", "legal", "code")]
        assert answers[:2] == answers[2:] and base not in answers and answers[0] != answers[1]
        refused = complete(adapting, "wide")
        assert refused.status_code == 400 and "r 16 exceeds --max-lora-rank 8" in refused.json()["error"]["message"]
        expected = {"legal": "Loaded", "code": "Loaded", "wide": "Refused"}
        svc.wait_for(lambda: states(adapting) == expected, 90, "the status has the state of each adapter")
        held, refused_by = by_group(adapting)
        assert set(held) == {"legal", "code", "wide"} and held["legal"] and held["code"] and not held["wide"]
        assert refused_by["wide"] and "r 16 exceeds --max-lora-rank 8" in next(iter(refused_by["wide"].values()))
        assert adapting.condition("AdaptersReady") == ("False", "AdapterRefused")
        assert "wide: " in adapting.message("AdaptersReady")
        svc.wait_for(lambda: ("Warning", "AdapterRefused") in adapting.events(), 30, "an event reports it")

        adapting.patch(declared("legal"))
        svc.wait_for(lambda: complete(adapting, "code").status_code == 404, 60, "the removed adapter is unknown")
        assert tokens(adapting, "legal") == answers[0]
        svc.wait_for(lambda: states(adapting) == {"legal": "Loaded"}, 90, "the status follows the list")
        assert adapting.condition("AdaptersReady") == ("True", "AdaptersUsable")
    assert traffic.failed == []
    assert adapting.uids() == uids and adapting.restarts() == 0
    assert adapting.status()["updateRevision"] == revision


def test_groups_load_adapters_while_no_operator_runs(adapting: Scene) -> None:
    adapting.patch(declared("legal", "late"))
    svc.wait_for(lambda: listed(adapting) == ["tiny", "legal", "late"], 60, "routers have the list")
    adapting.stop_operator()
    try:
        assert tokens(adapting, "late") != tokens(adapting, "tiny")
    finally:
        adapting.start_operator()


def test_wrong_secrets_fail_until_they_are_corrected(adapting: Scene, hub: HubServer) -> None:
    """The kubelet updates a mounted Secret within about a minute."""
    hub.private[repository("code")] = "another token"
    adapting.patch(declared("code"))
    svc.wait_for(lambda: complete(adapting, "code").status_code == 503, 60, "the download fails")
    svc.wait_for(lambda: adapting.condition("AdaptersReady") == ("False", "AdapterFailing"), 90, "the condition reports it")
    assert "refuses the token" in adapting.message("AdaptersReady")
    adapting.kubectl("patch", "secret", SECRET, "-p", '{"stringData": {"token": "another token"}}')
    svc.wait_for(lambda: complete(adapting, "code").status_code == 200, 180, "the download succeeds")
    svc.wait_for(lambda: states(adapting) == {"code": "Loaded"}, 90, "the status reports it")
