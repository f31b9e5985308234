"""What the operator renders for the Secret of a model is what the runtime reads: the same names, and the same file."""

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from phalanx_operator.render import pods
from phalanx_operator.render.pods import GroupBuild
from phalanx_runtime.checkpoint.sources import gcs, s3
from phalanx_runtime.checkpoint.sources.oci import Credentials, credentials_of
from phalanx_runtime.checkpoint.sources.s3 import AccessKey
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.control.builders import make_service
from tests.control.render.test_render import IMAGES

S3_KEY = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "hidden"}
LOGIN = {"auths": {"registry.example": {"auth": base64.b64encode(b"bot:hidden").decode()}}}


def hub_token(environment: Mapping[str, str]) -> str | None:
    found = read_settings(["serve", "hf://org/model"], environment)
    assert isinstance(found, ServeSettings)
    return found.model.hf_token


READ: dict[str, Callable[[Mapping[str, str]], object]] = {
    "hf": hub_token,
    "s3": lambda environment: s3.store_of(environment).key,
    "gs": lambda environment: gcs.store_of({"STORAGE_EMULATOR_HOST": "localhost:1", **environment}).token(),
    "oci": lambda environment: credentials_of(environment, "registry.example"),
}
"""Who asks, as the runtime understands its environment."""


def started(pod: dict[str, Any], secret: Mapping[str, str], node: Path) -> dict[str, str]:
    """The variables of the runtime as a kubelet sets them from this Secret; its files are under `node`. KeyError: no such key."""
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    for name, reference in ((one["name"], one.get("valueFrom", {}).get("secretKeyRef")) for one in container["env"]):
        if reference and (reference["key"] in secret or not reference.get("optional")):
            assert reference["name"] == "credentials"
            variables[name] = secret[reference["key"]]
    paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    for volume in pod["volumes"]:
        if volume.get("secret", {}).get("secretName") == "credentials":
            folder = node / paths[volume["name"]].lstrip("/")
            folder.mkdir(parents=True)
            for item in volume["secret"]["items"]:
                (folder / item["path"]).write_text(secret[item["key"]])
            variables = {name: str(folder) if value == paths[volume["name"]] else value for name, value in variables.items()}
    return variables


@pytest.mark.parametrize(
    ("uri", "key", "secret", "who"),
    [
        ("hf://org/model", None, {"token": "hidden"}, "hidden"),
        ("s3://models/tiny", None, S3_KEY, AccessKey("AKID", "hidden")),
        ("s3://models/tiny", None, S3_KEY | {"AWS_SESSION_TOKEN": "for a while"}, AccessKey("AKID", "hidden", "for a while")),
        ("gs://models/tiny", None, {"token": "hidden"}, "hidden"),
        ("gs://models/tiny", "access", {"access": "hidden", "token": "another"}, "hidden"),
        ("oci://registry.example/tiny:v1", None, {".dockerconfigjson": json.dumps(LOGIN)}, Credentials("bot", "hidden")),
    ],
    ids=["hub", "s3", "s3 for a while", "gs", "gs with a key of its own", "oci"],
)
def test_pod_uses_the_credentials_of_its_models_secret(
    uri: str, key: str | None, secret: dict[str, str], who: object, tmp_path: Path
) -> None:
    reference = {"name": "credentials"} | ({"key": key} if key else {})
    service = make_service(model={"uri": uri, "secretRef": reference})
    pod = pods.group(service, "chat-g-a", GroupBuild(revision="r", images=IMAGES))["spec"]["template"]["spec"]
    read = READ[uri.partition("://")[0]]
    assert read(started(pod, secret, tmp_path)) == who
    bare = pods.group(make_service(model={"uri": uri}), "chat-g-a", GroupBuild(revision="r", images=IMAGES))["spec"]["template"][
        "spec"
    ]
    assert not read({"HOME": str(tmp_path), **started(bare, secret, tmp_path)}), "without one it asks as nobody"
