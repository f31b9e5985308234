"""The consoles of router and operator on a real cluster: a drain by a key, and services by the rights of a token."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster.scenes import Scene

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
KEYS = [{"name": "team", "key": "sk-team"}, {"name": "admin", "key": "sk-admin", "console": "write"}]


@pytest.fixture(scope="module", autouse=True)
def served(scene: Scene) -> Iterator[None]:
    """A service of two groups with a console."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "console-keys"},
        "stringData": {"keys": json.dumps(KEYS)},
    }
    scene.apply(secret)
    scene.apply(scene.manifest(replicas=2, pods=1, router={"console": True, "apiKeys": {"name": "console-keys"}}))
    scene.wait_ready(2, 300)
    yield
    scene.delete_service()


def call(url: str, token: str, body: dict[str, str] | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    method = "GET" if body is None else "POST"
    return httpx.request(method, url, json=body, headers=headers, timeout=30)


def test_a_drain_in_the_console_replaces_the_group(scene: Scene) -> None:
    api = f"{scene.url}/ui/api"
    groups = {group["name"] for group in call(f"{api}/fleet", "sk-team").json()["groups"]}
    assert groups == set(scene.sets())
    drained = min(groups)
    assert call(f"{api}/drain", "sk-team", {"group": drained}).status_code == 403
    assert call(f"{api}/drain", "sk-admin", {"group": drained}).status_code == 202
    svc.wait_for(lambda: drained not in scene.sets(), 120, "the group is drained and deleted")
    scene.wait_ready(2, 300)
    assert len(set(scene.sets()) - groups) == 1


def test_the_operator_shows_what_a_token_may_read(scene: Scene) -> None:
    pods = json.loads(scene.cluster.kubectl("get", "pods", "-n", installation.NAMESPACE, "-o", "json"))["items"]
    page = f"http://{pods[0]['status']['podIP']}:8080/ui"
    assert httpx.get(page, timeout=30).status_code == 200
    assert call(f"{page}/api/services", "unknown").status_code == 401
    scene.kubectl("create", "serviceaccount", "reader")
    token = scene.kubectl("create", "token", "reader").strip()
    namespace = f"{page}/api/services?namespace={scene.namespace}"
    assert call(namespace, token).status_code == 403, "it has no right yet"
    account = f"--serviceaccount={scene.namespace}:reader"
    scene.kubectl("create", "rolebinding", "reader", "--clusterrole=view", account)
    svc.wait_for(lambda: call(namespace, token).status_code == 200, 30, "the role view includes services")
    (row,) = call(namespace, token).json()["services"]
    assert (row["name"], row["is_ready"], row["ready_groups"], row["has_console"]) == ("chat", True, 2, True)
    assert call(f"{page}/api/services", token).status_code == 403, "of all namespaces"
    assert call(f"{page}/api/scaling/{scene.namespace}/chat", token).json()["points"] == []
