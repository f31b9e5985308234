"""Rendered objects. A change of a golden file changes the pods of every service."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx_api.spec.inference_service import MAX_NAME, FieldError, parse
from phalanx_frontend.auth.oidc import OidcSettings, read_oidc
from phalanx_operator.render import monitoring, network, pods, router, services
from phalanx_operator.render import objects as names
from phalanx_operator.render.network import PeerNamespaces
from phalanx_operator.render.objects import merge_overlay
from phalanx_operator.render.pods import GroupBuild
from phalanx_operator.render.revision import revision
from phalanx_router.settings import make_parser as router_parser
from tests.control.builders import make_body, make_service
from tests.control.conftest import Check
from tests.control.render.documents import IMAGES, SPECS, as_yaml, runtime_container


@pytest.mark.parametrize("name", SPECS)
def test_golden_groups(name: str, golden: Check) -> None:
    service = make_service(**SPECS[name])
    golden(
        f"objects/group-{name}.yaml",
        as_yaml(pods.group(service, "chat-g-xxxxx", GroupBuild(revision=revision(service), images=IMAGES))),
    )


def test_example_of_disk_pages_has_folders_per_pod() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "kv-cache.md").read_text()
    spec = yaml.safe_load(guide.split("```yaml\n")[1].split("```")[0])["spec"]
    pod = pods.group(make_service(**spec), "g", GroupBuild(revision="r", images=IMAGES))["spec"]["template"]["spec"]
    (container,) = [each for each in pod["containers"] if each["name"] == "runtime"]
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == spec["engine"]["diskCachePath"]]
    assert mount["subPathExpr"] == "$(PAGES_OF)"
    assert {"name": "PAGES_OF", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}} in container["env"]
    assert {"name": mount["name"], "persistentVolumeClaim": {"claimName": "pages"}} in pod["volumes"]
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_successor_prefers_other_nodes() -> None:
    service = make_service(resources={"accelerator": {"product": "NVIDIA-H200"}})
    build = GroupBuild(revision="r", images=IMAGES, avoid_nodes=("node-1", "node-2"))
    pod = pods.group(service, "g", build)["spec"]["template"]["spec"]
    nodes = pod["affinity"]["nodeAffinity"]
    assert nodes["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"], "required terms are kept"
    preferred = nodes["preferredDuringSchedulingIgnoredDuringExecution"][0]["preference"]
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("node-1", "node-2")]
    assert preferred == {"matchFields": fields}, "by name, one in each: the label of the host may differ"


def test_a_chat_template_is_mounted_from_its_config_map() -> None:
    def pod(key: str) -> dict[str, Any]:
        service = make_service(engine={"chatTemplate": {"configMapKeyRef": {"name": "templates", "key": key}}})
        spec: dict[str, Any] = pods.group(service, "g", GroupBuild(revision="r", images=IMAGES))["spec"]["template"]["spec"]
        return spec

    [volume] = [volume for volume in pod("own.jinja")["volumes"] if volume["name"] == "phalanx-chat-template"]
    assert volume["configMap"] == {"name": "templates", "items": [{"key": "own.jinja", "path": "chat_template.jinja"}]}
    runtime = pod("own.jinja")["containers"][0]
    [mount] = [mount for mount in runtime["volumeMounts"] if mount["name"] == "phalanx-chat-template"]
    args = runtime["args"]
    assert args[args.index("--chat-template") + 1] == f"{mount['mountPath']}/chat_template.jinja"
    plain = pods.group(make_service(), "g", GroupBuild(revision="r", images=IMAGES))["spec"]["template"]["spec"]
    assert "--chat-template" not in plain["containers"][0]["args"]


REQUIRED, PREFERRED = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("specified", "added"),
    [
        ([], ["not-ready", "unreachable"]),
        ([{"key": "nvidia.com/gpu", "operator": "Exists"}], ["not-ready", "unreachable"]),
        ([{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 60}], ["unreachable"]),
        ([{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}], ["not-ready", "unreachable"]),
        ([{"operator": "Exists"}], []),
        ([{"operator": "Exists", "effect": "NoSchedule"}], ["not-ready", "unreachable"]),
    ],
    ids=["default", "other", "one", "other effect", "all", "all of another effect"],
)
@pytest.mark.parametrize("field", ["placement", "podTemplate"])
def test_pods_tolerate_silent_nodes(field: str, specified: list[dict[str, Any]], added: list[str]) -> None:
    spec = {"placement": {"tolerations": specified}, "podTemplate": {"spec": {"tolerations": specified}}}
    service = make_service(**{field: spec[field]})
    rendered = pods.group(service, "chat-a", pods.GroupBuild(revision="r", images=IMAGES))
    tolerations = rendered["spec"]["template"]["spec"]["tolerations"]
    expected = [{"key": f"node.kubernetes.io/{name}", "operator": "Exists", "effect": "NoExecute"} for name in added]
    assert tolerations == specified + expected


def expression(key: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": [*values]}


def test_affinity_is_added_to_other_constraints() -> None:
    zones = [{"matchExpressions": [expression("zone", zone)]} for zone in ("a", "b")]
    database = {"labelSelector": {"matchLabels": {"app": "db"}}, "topologyKey": "kubernetes.io/hostname"}
    anywhere = {"labelSelector": {}, "topologyKey": "zone", "namespaceSelector": {}}
    service = make_service(
        resources={"accelerator": {"product": "NVIDIA-H200"}},
        placement={
            "spreadGroups": "Preferred",
            "topology": {"mode": "Required", "key": "example.com/rack"},
            "affinity": {
                "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": zones}, PREFERRED: [{"weight": 5, "preference": zones[0]}]},
                "podAffinity": {REQUIRED: [anywhere]},
                "podAntiAffinity": {REQUIRED: [database], PREFERRED: [{"weight": 7, "podAffinityTerm": database}]},
            },
        },
    )
    body = pods.group(service, "chat-g-a", GroupBuild(revision="r", images=IMAGES, avoid_nodes=("node-1",)))
    affinity = body["spec"]["template"]["spec"]["affinity"]
    product = expression("nvidia.com/gpu.product", "NVIDIA-H200")
    terms = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert [term["matchExpressions"] for term in terms] == [[product, expression("zone", zone)] for zone in ("a", "b")]
    assert [term["weight"] for term in affinity["nodeAffinity"][PREFERRED]] == [100, 5]
    assert [term["topologyKey"] for term in affinity["podAffinity"][REQUIRED]] == ["example.com/rack", "zone"]
    assert affinity["podAffinity"][REQUIRED][1] == anywhere, "an empty selector is kept"
    assert affinity["podAntiAffinity"][REQUIRED] == [database]
    assert [term["weight"] for term in affinity["podAntiAffinity"][PREFERRED]] == [100, 7]


def test_affinity_alone_is_unchanged() -> None:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}
    service = make_service(placement={"affinity": {"nodeAffinity": {REQUIRED: terms}}})
    body = pods.group(service, "chat-g-a", GroupBuild(revision="r", images=IMAGES))
    assert body["spec"]["template"]["spec"]["affinity"] == {"nodeAffinity": {REQUIRED: terms}}


@pytest.mark.parametrize(
    ("probes", "startup_s", "liveness_s"),
    [({}, 600, 60), ({"startupSeconds": 30}, 30, 60), ({"livenessSeconds": 6}, 600, 6), ({"livenessSeconds": 3600}, 600, 3600)],
)
def test_probe_durations_follow_the_spec(probes: dict[str, int], startup_s: int, liveness_s: int) -> None:
    rendered = runtime_container(engine={"probes": probes})
    times = {
        name: rendered[name]["periodSeconds"] * rendered[name]["failureThreshold"] for name in ("startupProbe", "livenessProbe")
    }
    assert times == {"startupProbe": startup_s, "livenessProbe": liveness_s}


def test_golden_shared_objects(golden: Check) -> None:
    service = make_service(servedNames=["a", "b"], router={"replicas": 2})
    shared = [
        services.token_secret(service, "secret", {}),
        *network.policies(service, PeerNamespaces()),
        services.groups_service(service),
    ]
    golden("objects/shared.yaml", as_yaml(*shared, *router.router_objects(service, IMAGES), *monitoring.objects(service)))


@pytest.mark.parametrize(
    ("uri", "argument"),
    [
        ("file:///opt/model", "/opt/model"),
        ("pvc://models", "/models"),
        ("pvc://models/", "/models"),
        ("pvc://models/a/b", "/models/a/b"),
        ("hf://org/name", "hf://org/name"),
        ("s3://models/tiny", "s3://models/tiny"),
        ("oci://registry.example/tiny:v1", "oci://registry.example/tiny:v1"),
    ],
)
def test_model_argument(uri: str, argument: str) -> None:
    assert runtime_container(model={"uri": uri})["args"][:2] == ["serve", argument]


def test_ranks_that_share_a_pod_share_its_devices() -> None:
    assert runtime_container(parallelism={"tensor": 8, "gpusPerPod": 4})["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert runtime_container(parallelism={"tensor": 8})["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert runtime_container(resources={"accelerator": {"resourceName": ""}})["resources"] == {}


def test_mig_slices_are_counted_under_their_own_name() -> None:
    mig = "nvidia.com/mig-3g.40gb"
    service = make_service(parallelism={"tensor": 2}, resources={"accelerator": {"resourceName": mig}})
    group = pods.group(service, "g", GroupBuild(revision="r", images=IMAGES))
    resources = group["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources == {"requests": {mig: "2"}, "limits": {mig: "2"}}


def test_claims_add_to_the_extended_resource() -> None:
    resources = runtime_container(resources={"claims": [{"name": "network", "resourceClaimName": "rdma"}]})["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "1"} and resources["claims"] == [{"name": "network"}]


def test_unset_fields_add_no_flags() -> None:
    flags = [word for word in runtime_container()["args"] if word.startswith("--")]
    assert "--dtype" in flags and "--page-size" not in flags and "--kv-cache-memory-bytes" not in flags


def all_pods() -> list[dict[str, Any]]:
    service = make_service()
    deployment = router.router_objects(service, IMAGES)[-1]
    return [
        body["spec"]["template"]["spec"]
        for body in (pods.group(service, "g", GroupBuild(revision="r", images=IMAGES)), deployment)
    ]


@pytest.mark.parametrize("pod", all_pods(), ids=["group", "router"])
def test_pods_meet_the_restricted_standard(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert not any("hostPath" in volume for volume in pod["volumes"])


@pytest.mark.parametrize("seconds", [0, 77, 3600])
def test_termination_grace_follows_the_spec(seconds: int) -> None:
    service = make_service(drain={"timeoutSeconds": seconds, "preStopSeconds": 5})
    group = pods.group(service, "g", GroupBuild(revision="r", images=IMAGES))["spec"]["template"]["spec"]
    router_pod = router.router_objects(service, IMAGES)[-1]["spec"]["template"]["spec"]
    for pod, flag in ((group, "--shutdown-timeout"), (router_pod, "--drain-s")):
        arguments = pod["containers"][0]["args"]
        assert arguments[arguments.index(flag) + 1] == str(seconds)
        assert pod["terminationGracePeriodSeconds"] > seconds
    assert group["terminationGracePeriodSeconds"] >= seconds + 5 + 10, "including preStop"


def test_api_keys_are_mounted_into_the_router_only() -> None:
    service = make_service(router={"apiKeys": {"name": "clients", "key": "list"}})
    pod = router.router_objects(service, IMAGES)[-1]["spec"]["template"]["spec"]
    folder = "/var/run/secrets/phalanx.dev-keys"
    assert ["--api-keys-file", f"{folder}/list"] == pod["containers"][0]["args"][-2:]
    assert {"name": "api-keys", "mountPath": folder, "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert {"name": "api-keys", "secret": {"secretName": "clients", "defaultMode": 0o440}} in pod["volumes"]
    assert "clients" not in str(pods.group(service, "g", GroupBuild(revision="r", images=IMAGES)))
    assert revision(service) == revision(make_service())


def test_routers_accept_the_flags_of_an_issuer() -> None:
    claims = {"tenant": "team", "models": "models", "priority": "priority", "required": {"hd": "a.example", "groups": "-b"}}
    oidc = {"issuer": "https://a.example", "audiences": ["-a", "b"], "jwksUri": "https://a.example/keys", "claims": claims}
    service = make_service(router={"oidc": oidc, "console": True})
    args = router.router_objects(service, IMAGES)[-1]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert read_oidc(router_parser().parse_args(args)) == OidcSettings(
        issuer="https://a.example",
        audiences=("-a", "b"),
        jwks_uri="https://a.example/keys",
        tenant_claim="team",
        models_claim="models",
        priority_claim="priority",
        required=(("groups", "-b"), ("hd", "a.example")),
    )
    assert "oidc" not in str(pods.group(service, "g", GroupBuild(revision="r", images=IMAGES)))
    assert revision(service) == revision(make_service())


def test_pods_of_a_group_share_its_random_key() -> None:
    group = pods.group(make_service(), "g", GroupBuild(revision="r", images=IMAGES, key="drawn"))
    assert {"name": "PHALANX_GROUP_KEY", "value": "drawn"} in group["spec"]["template"]["spec"]["containers"][0]["env"]
    assert "PHALANX_GROUP_KEY" not in str(pods.group(make_service(), "g", GroupBuild(revision="r", images=IMAGES)))


def test_only_routers_may_use_the_api_server() -> None:
    group, router_pod = all_pods()
    assert group["automountServiceAccountToken"] is False
    assert router_pod["automountServiceAccountToken"] is True


def test_names_are_valid_in_kubernetes() -> None:
    service = make_service(name="a" * MAX_NAME)
    group = names.group_names(service.name, service.uid, "r", 1)[0]
    assert len(f"{group}-63") <= 52
    assert len(names.groups_service(service.name)) <= 63


def test_group_names_are_distinct_and_stable() -> None:
    first = names.group_names("chat", "uid-1", "r1", 200)
    assert len(set(first)) == 200
    assert first[:3] == names.group_names("chat", "uid-1", "r1", 3)
    assert not set(first) & set(names.group_names("chat", "uid-1", "r2", 200))
    assert not set(first) & set(names.group_names("chat", "uid-2", "r1", 200))


def test_overlay_merges_like_a_strategic_patch() -> None:
    base = {"a": {"x": 1, "y": 2}, "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "args": [1], "keep": 0}
    over = {"a": {"y": 3}, "env": [{"name": "B", "value": "9"}, {"name": "C"}], "args": [2], "new": []}
    assert merge_overlay(base, over) == {
        "a": {"x": 1, "y": 3},
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "9"}, {"name": "C"}],
        "args": [2],
        "keep": 0,
        "new": [],
    }
    assert merge_overlay(base, {}) == base


def test_labels_of_users_do_not_replace_the_operators() -> None:
    """The API server rejects such labels first."""
    body = make_body(podTemplate={"metadata": {"labels": {"phalanx.dev/service": "other"}}})
    service = parse(body)
    assert not isinstance(service, list), [e for e in service if isinstance(e, FieldError)]
    template = pods.group(service, "g", GroupBuild(revision="r", images=IMAGES))["spec"]["template"]
    assert template["metadata"]["labels"]["phalanx.dev/service"] == "chat"
