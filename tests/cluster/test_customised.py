"""A service whose chat template, router pods and origins are those of its team."""

import httpx
import pytest

from tests.cluster.chat import ROUTERS
from tests.cluster.scenes import Scene

pytestmark = pytest.mark.cluster
ORIGIN = "https://chat.example"


def test_template_routers_and_origins_follow_the_spec(scene: Scene) -> None:
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    metadata = {"name": "templates", "namespace": scene.namespace}
    scene.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"own": template}})
    pod = {"metadata": {"annotations": {"example.com/team": "a"}}, "spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}
    scene.apply(
        scene.manifest(
            pods=1,
            engine={"chatTemplate": {"configMapKeyRef": {"name": "templates", "key": "own"}}},
            router={"podTemplate": pod, "allowedOrigins": [ORIGIN]},
        )
    )
    scene.wait_ready(1)
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    with httpx.Client(base_url=scene.url, timeout=60) as client:
        of_chat = client.post("/tokenize", json=fields).json()["tokens"]
        of_text = client.post("/tokenize", json={"model": "tiny", "prompt": "<user>hello", "add_special_tokens": False}).json()
        answer = client.post("/v1/chat/completions", json={**fields, "max_tokens": 4}, headers={"origin": ORIGIN})
        asked = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = client.options("/v1/chat/completions", headers=asked)
    assert of_chat == of_text["tokens"], "the template is that of the ConfigMap"
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, ORIGIN)
    routers = scene.pods(ROUTERS)
    assert routers
    for router in routers.values():
        assert router["metadata"]["annotations"]["example.com/team"] == "a"
        assert router["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
