"""`spec.adapters` in rendered objects: routers get the list, pods the slots and the Secrets."""

import json
from typing import Any

import pytest

from phalanx_api import labels
from phalanx_api.spec.inference_service import FieldError, InferenceService, parse
from phalanx_operator.decide.state.policy import PolicyInputs, router_policy
from phalanx_operator.render import pods, router
from phalanx_operator.render.pods import GroupBuild
from phalanx_operator.render.revision import revision
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.control.builders import make_service
from tests.control.worlds import IMAGES

SLOTS = {"maxAdapters": 4, "maxLoraRank": 32, "adapterSecrets": ["hub", "store"]}
LEGAL = {"name": "legal", "uri": "hf://org/legal", "revision": "v2", "secretRef": {"name": "hub", "key": "read"}}


def service(*adapters: dict[str, Any], **fields: Any) -> InferenceService:
    return make_service(**{"engine": SLOTS, "adapters": list(adapters)} | fields)


def rendered(service: InferenceService) -> dict[str, Any]:
    return pods.group(service, "chat-g-a", GroupBuild(revision=revision(service), images=IMAGES))


def policy_of(service: InferenceService) -> list[Any]:
    (config,) = [body for body in router.router_objects(service, IMAGES) if body["kind"] == "ConfigMap"]
    adapters: list[Any] = json.loads(config["data"][labels.POLICY_KEY])["adapters"]
    return adapters


def test_adapters_change_the_policy_and_no_group() -> None:
    """The list is in the ConfigMap of routers and in their polls, and restarts nothing."""
    without, with_one = service(), service(LEGAL)
    assert revision(without) == revision(with_one)
    assert rendered(without) == rendered(with_one)
    (before, after) = (
        [body for body in router.router_objects(each, IMAGES) if body["kind"] == "Deployment"] for each in (without, with_one)
    )
    assert before == after
    expected = ["legal", "hf://org/legal", "v2", "hub", "read"]
    assert (policy_of(without), policy_of(with_one)) == ([], [expected])
    assert [adapter.name for adapter in router_policy(with_one.spec, PolicyInputs(routers=1)).adapters] == ["legal"]


def test_claims_of_adapters_are_folders_of_the_pod() -> None:
    model = {"uri": "pvc://models/base"}
    found = policy_of(service({"name": "legal", "uri": "pvc://models/adapters/legal"}, model=model))
    assert [adapter[1] for adapter in found] == [f"file://{labels.MODEL_DIR}/adapters/legal"]


def test_slots_and_secrets_are_flags_and_volumes_of_pods() -> None:
    pod = rendered(service())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = " ".join(container["args"])
    assert "--enable-lora --max-loras 4 --max-lora-rank 32" in words
    assert f"--lora-secrets-dir {labels.ADAPTER_SECRETS_DIR}" in words
    named = {volume["name"]: volume["secret"] for volume in pod["volumes"] if volume["name"].startswith("adapter-secret")}
    assert {name: (secret["secretName"], secret["optional"]) for name, secret in named.items()} == {
        "adapter-secret-0": ("hub", True),
        "adapter-secret-1": ("store", True),
    }
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in named}
    assert mounts == {
        "adapter-secret-0": f"{labels.ADAPTER_SECRETS_DIR}/hub",
        "adapter-secret-1": f"{labels.ADAPTER_SECRETS_DIR}/store",
    }


def test_runtime_takes_the_rendered_flags(tmp_path: Any) -> None:
    slots = service(engine=SLOTS | {"extraArgs": ["--no-lora-experts"]})
    (container,) = rendered(slots)["spec"]["template"]["spec"]["containers"]
    (token := tmp_path / "token").write_text("secret")
    words = [str(token) if word == labels.TOKEN_FILE else word for word in container["args"]]
    settings = read_settings([word.replace("$(PHALANX_POD_INDEX)", "0") for word in words], {})
    assert isinstance(settings, ServeSettings) and settings.model.lora_secrets_dir is not None
    assert (settings.engine.enable_lora, settings.engine.max_loras, settings.engine.max_lora_rank) == (True, 4, 32)
    assert not settings.engine.lora_experts


@pytest.mark.parametrize(
    ("adapter", "fields", "message"),
    [
        ({}, {"engine": {}}, "adapters need engine.maxAdapters"),
        ({}, {"servedNames": ["legal"]}, "a name of servedNames"),
        ({"name": "chat"}, {}, "a name of servedNames, by default the service's name"),
        ({"uri": "pvc://other/legal"}, {"model": {"uri": "pvc://models/base"}}, "the claim of model.uri"),
        ({"secretRef": {"name": "else"}}, {}, "a Secret of engine.adapterSecrets"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(adapter: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    spec = {"model": {"uri": "hf://org/base"}, "engine": SLOTS, "adapters": [{"name": "legal", "uri": "hf://o/n"} | adapter]}
    (error,) = _errors(spec | fields)
    assert error.field == "spec.adapters" and message in error.message


def test_names_of_adapters_are_unique() -> None:
    twice = [{"name": "legal", "uri": "hf://o/n"}] * 2
    (error,) = _errors({"model": {"uri": "hf://org/base"}, "engine": SLOTS, "adapters": twice})
    assert (error.field, error.message) == ("spec.adapters", "names of adapters must be unique")


def _errors(spec: dict[str, Any]) -> list[FieldError]:
    found = parse({"metadata": {"namespace": "team", "name": "chat", "uid": "u"}, "spec": spec})
    assert isinstance(found, list)
    return found
