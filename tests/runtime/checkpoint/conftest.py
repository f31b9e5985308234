"""A hub and object stores on local ports."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.checkpoint.hub import HubServer, running_hub
from tests.runtime.checkpoint.store_kinds import HANDLERS, Kind
from tests.runtime.checkpoint.stores import REGION, running_store

VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"),
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
    *("GOOGLE_OAUTH_ACCESS_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST"),
)


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    """An object store of the parametrized kind, with a local server."""
    scheme: str = request.param
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with running_store(HANDLERS[scheme]) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        monkeypatch.setenv("AWS_REGION", REGION)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.host)
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        yield Kind(scheme, store, tmp_path, monkeypatch.setenv)


@pytest.fixture
def server() -> Iterator[HubServer]:
    """A hub with the weights in LFS."""
    with running_hub() as hub:
        hub.large.add("model.safetensors")
        yield hub
