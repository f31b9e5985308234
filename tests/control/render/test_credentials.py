"""The runtime reads a model's credentials from the variables and files that the operator renders."""

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from phalanx_operator.render import pods
from phalanx_operator.render.pods import GroupBuild
from phalanx_runtime.checkpoint.sources import gcs, s3
from phalanx_runtime.checkpoint.sources.oci import Credentials, read_credentials
from phalanx_runtime.checkpoint.sources.s3 import AccessKey
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.control.builders import make_service
from tests.control.render.documents import IMAGES

S3_KEY = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "hidden"}
LOGIN = {"auths": {"registry.example": {"auth": base64.b64encode(b"bot:hidden").decode()}}}


def hub_token(environment: Mapping[str, str]) -> str | None:
    settings = read_settings(["serve", "hf://org/model"], environment)
    assert isinstance(settings, ServeSettings)
    return settings.model.hf_token


def gcs_token(environment: Mapping[str, str]) -> str:
    auth = gcs.read_store({"STORAGE_EMULATOR_HOST": "localhost:1", **environment}).auth
    signed = next(auth.auth_flow(httpx.Request("GET", "http://localhost:1")))
    return str(signed.headers.get("Authorization", "")).removeprefix("Bearer ")


READERS: dict[str, Callable[[Mapping[str, str]], object]] = {
    "hf": hub_token,
    "s3": lambda environment: s3.read_store(environment).key,
    "gs": gcs_token,
    "oci": lambda environment: read_credentials(environment, "registry.example"),
}
"""How the runtime reads credentials from its environment, by URI scheme."""


def kubelet_environment(pod: dict[str, Any], secret: Mapping[str, str], node: Path) -> dict[str, str]:
    """Returns the variables that a kubelet sets from this Secret. Mounts are under `node`. Raises KeyError for a missing key."""
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    for variable in container["env"]:
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        if reference and (reference["key"] in secret or not reference.get("optional")):
            assert reference["name"] == "credentials"
            variables[variable["name"]] = secret[reference["key"]]
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
    ("uri", "key", "secret", "credentials"),
    [
        ("hf://org/model", None, {"token": "hidden"}, "hidden"),
        ("s3://models/tiny", None, S3_KEY, AccessKey("AKID", "hidden")),
        ("s3://models/tiny", None, S3_KEY | {"AWS_SESSION_TOKEN": "temporary"}, AccessKey("AKID", "hidden", "temporary")),
        ("gs://models/tiny", None, {"token": "hidden"}, "hidden"),
        ("gs://models/tiny", "access", {"access": "hidden", "token": "another"}, "hidden"),
        ("oci://registry.example/tiny:v1", None, {".dockerconfigjson": json.dumps(LOGIN)}, Credentials("bot", "hidden")),
    ],
    ids=["hub", "s3", "s3 temporary", "gs", "gs other key", "oci"],
)
def test_pod_uses_the_credentials_of_its_models_secret(
    uri: str, key: str | None, secret: dict[str, str], credentials: object, tmp_path: Path
) -> None:
    reference = {"name": "credentials"} | ({"key": key} if key else {})
    service = make_service(model={"uri": uri, "secretRef": reference})
    pod = pods.group(service, "chat-g-a", GroupBuild(revision="r", images=IMAGES))["spec"]["template"]["spec"]
    read = READERS[uri.partition("://")[0]]
    assert read(kubelet_environment(pod, secret, tmp_path)) == credentials
    public = make_service(model={"uri": uri})
    bare = pods.group(public, "chat-g-a", GroupBuild(revision="r", images=IMAGES))["spec"]["template"]["spec"]
    anonymous = (None, "", AccessKey(), Credentials())
    assert read({"HOME": str(tmp_path), **kubelet_environment(bare, secret, tmp_path)}) in anonymous
