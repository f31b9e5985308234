"""Pods, Services, policies and monitoring with `spec.security.tls: Internal`."""

from typing import Any

import pytest

from phalanx_api.spec.inference_service import parse
from phalanx_operator.render import monitoring, pods, router, services
from phalanx_operator.render.pods import GroupBuild
from phalanx_operator.render.revision import revision
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.control.builders import make_body, make_service
from tests.control.conftest import Check
from tests.control.render.documents import IMAGES, as_yaml

SERVICE = make_service(security={"tls": "Internal"}, parallelism={"tensor": 2, "gpusPerPod": 1})
PLAIN = make_service(parallelism={"tensor": 2, "gpusPerPod": 1})


def group(service: Any = SERVICE) -> Any:
    return pods.group(service, "chat-g-a", GroupBuild(revision="r", images=IMAGES))


def test_golden_internal_tls(golden: Check) -> None:
    deployment = router.router_objects(SERVICE, IMAGES)[-1]
    groups = services.groups_service(SERVICE, is_internal=True)
    golden("objects/internal-tls.yaml", as_yaml(group(), deployment, groups, monitoring.objects(SERVICE)[0]))


def test_the_field_is_a_new_revision() -> None:
    assert revision(SERVICE) != revision(PLAIN)
    assert revision(make_service(security={"tls": "None"})) == revision(make_service())


def test_probes_of_groups_need_no_certificate() -> None:
    (container,) = group()["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert {probe["port"] for probe in probes} == {8001} and not any("scheme" in probe for probe in probes)


def test_pods_mount_their_own_role_only() -> None:
    for body, role in ((group(), "group"), (router.router_objects(SERVICE, IMAGES)[-1], "router")):
        spec = body["spec"]["template"]["spec"]
        mounted = {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
        assert mounted == {"chat-token", f"chat-{role}-tls"}
        assert body["spec"]["template"]["metadata"]["annotations"] == {"phalanx.dev/internal-tls": "true"}


def test_runtime_reads_the_rendered_flags(tmp_path: Any) -> None:
    (container,) = group()["spec"]["template"]["spec"]["containers"]
    token = tmp_path / "token"
    token.write_text("secret")
    words = [str(token) if word.endswith("/token") else word.replace("$(PHALANX_POD_INDEX)", "0") for word in container["args"]]
    settings = read_settings(words, {})
    assert isinstance(settings, ServeSettings)
    assert settings.http.health_port == 8001 and settings.group.tls is not None
    assert [str(path) for path in settings.group.tls.paths] == [
        f"/var/run/secrets/phalanx.dev-internal/{name}" for name in ("tls.crt", "tls.key", "ca.crt")
    ]


def test_former_groups_are_scraped_too() -> None:
    """A port's name selects the pods that serve it."""
    ports = {port["name"]: port["targetPort"] for port in services.groups_service(SERVICE, is_internal=True)["spec"]["ports"]}
    assert ports == {"http": "http", "internal": "internal"}
    containers = [group(service)["spec"]["template"]["spec"]["containers"][0] for service in (SERVICE, PLAIN)]
    assert [container["ports"][0]["name"] for container in containers] == ["internal", "http"]
    endpoints = monitoring.objects(SERVICE)[0]["spec"]["endpoints"]
    assert [endpoint["port"] for endpoint in endpoints] == ["http", "internal"]
    assert endpoints[1]["tlsConfig"]["serverName"] == "group.chat.team.phalanx.internal"


def test_certificates_of_pods_have_alerts() -> None:
    rules = monitoring.objects(SERVICE)[1]["spec"]["groups"][0]["rules"]
    assert {"PhalanxCertificateExpiresSoon", "PhalanxCertificateUnusable"} <= {rule.get("alert") for rule in rules}


@pytest.mark.parametrize("tls", ["Internal", "None"])
def test_shared_pages_exclude_internal_tls(tls: str) -> None:
    found = parse(make_body(security={"tls": tls}, rebalancing={"sharePages": True}))
    assert isinstance(found, list) == (tls == "Internal")
    if isinstance(found, list):
        assert "excludes rebalancing.sharePages" in found[0].message
