"""A real API server merges the tokens of services that share cached pages."""

import base64
from typing import Any

import pytest

from phalanx_api.wire.holders import holder_token
from tests.cluster.scenes import Scene
from tests.polling import wait_until
from tools.errors import Failed

pytestmark = pytest.mark.cluster
SHARED = "phalanx-shared-pages"


def tokens(scene: Scene) -> dict[str, str]:
    """Returns the tokens of the namespace's Secret, by service."""
    try:
        secret: dict[str, Any] = scene.get("secret", SHARED)
    except Failed:
        return {}
    return {name: base64.b64decode(text).decode() for name, text in secret.get("data", {}).items()}


def test_each_service_keeps_its_own_token(scene: Scene) -> None:
    """Suspended services have routers and no groups."""
    for name in ("chat", "code"):
        scene.apply(scene.manifest(name=name, suspend=True, rebalancing={"sharePages": True}))
    wait_until(lambda: set(tokens(scene)) == {"chat", "code"}, 120)
    own = base64.b64decode(scene.get("secret", "code-token")["data"]["token"]).decode()
    assert tokens(scene)["code"] == holder_token(own)
    scene.patch({"rebalancing": {"sharePages": False}})
    wait_until(lambda: set(tokens(scene)) == {"code"}, 120)
    owners = scene.get("secret", SHARED)["metadata"]["ownerReferences"]
    assert [owner["name"] for owner in owners] == ["code"]
    scene.kubectl("delete", "infsvc", "code")
    wait_until(lambda: not tokens(scene), 120)
