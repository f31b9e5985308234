"""Network policies admit every connection between the programs. No test network enforces them."""

import pathlib
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService
from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.kube.client import NETWORK_POLICIES
from phalanx_operator.render import network, pods, router
from phalanx_operator.render.network import PeerNamespaces
from phalanx_operator.render.objects import Images
from phalanx_operator.render.pods import GroupBuild
from phalanx_router.links.endpoints import Metadata, Pod, PodStatus, leaders_of
from phalanx_router.settings import make_parser as router_parser
from phalanx_runtime.server.launch import make_rank_specs
from phalanx_runtime.server.supervision.pod import Launch
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.control.builders import make_service
from tests.control.sockets import ROOT, ZMQ, calls, programs, schemes
from tests.control.worlds import World

IMAGES = Images("runtime:1", "router:1")
SERVICE = make_service(parallelism={"tensor": 4, "gpusPerPod": 2})
ANY_PROMETHEUS = PeerNamespaces()
FREE = None
"""A port that the system chooses: only a rule for all ports admits it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Labels and namespace of a pod."""

    labels: dict[str, str]
    namespace: str = "team"


def of_group(group: str, name: str = "chat") -> Peer:
    template = pods.group(make_service(name=name), group, GroupBuild(revision="r", images=IMAGES))["spec"]["template"]
    return Peer(template["metadata"]["labels"])


def of_router(name: str = "chat") -> Peer:
    return Peer(router.router_objects(make_service(name=name), IMAGES)[-1]["spec"]["template"]["metadata"]["labels"])


def of_operator() -> Peer:
    """Returns the installed operator."""
    deployment = yaml.safe_load((ROOT / "manifests" / "base" / "operator.yaml").read_text())
    return Peer(deployment["spec"]["template"]["metadata"]["labels"], deployment["metadata"]["namespace"])


PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, "monitoring")
STRANGER = Peer({"app": "other"})


def selects(selector: dict[str, Any], pod_labels: dict[str, str]) -> bool:
    required: dict[str, str] = selector.get("matchLabels", {})
    return required.items() <= pod_labels.items()


def matches(peer: dict[str, Any], source: Peer) -> bool:
    if "namespaceSelector" in peer:
        is_in_namespace = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace})
    else:
        is_in_namespace = source.namespace == SERVICE.namespace
    return is_in_namespace and selects(peer["podSelector"], source.labels)


def admits(
    source: Peer,
    target: Peer,
    port: int | None,
    service: InferenceService = SERVICE,
    peers: PeerNamespaces = ANY_PROMETHEUS,
) -> bool:
    """Whether the policies of the service admit a connection, by the rules of the API."""
    policies = [p["spec"] for p in network.policies(service, peers) if selects(p["spec"]["podSelector"], target.labels)]
    assert policies, "no policy selects the pod"
    return any(
        ("ports" not in rule or port in [allowed["port"] for allowed in rule["ports"]])
        and ("from" not in rule or any(matches(peer, source) for peer in rule["from"]))
        for policy in policies
        for rule in policy["ingress"]
    )


def settings_of(pod: int, folder: pathlib.Path) -> ServeSettings:
    """Returns the runtime's settings from the rendered command line."""
    (folder / "token").write_text("0" * 64)
    body = pods.group(SERVICE, "chat-g-aaaaa", GroupBuild(revision="r", images=IMAGES))
    container = body["spec"]["template"]["spec"]["containers"][0]
    values = {f"$({labels.ENV_POD_INDEX})": str(pod), labels.TOKEN_FILE: str(folder / "token")}
    settings = read_settings([values.get(word, word) for word in container["args"]], {})
    assert isinstance(settings, ServeSettings)
    return settings


def router_port() -> int:
    deployment = router.router_objects(SERVICE, IMAGES)[-1]
    return int(router_parser().parse_args(deployment["spec"]["template"]["spec"]["containers"][0]["args"]).port)


Flow = tuple[Peer, Peer, int | None]


def flows(folder: pathlib.Path) -> dict[str, list[Flow]]:
    """Returns all connections between pods as source, target and port, by name."""
    settings = [settings_of(pod, folder) for pod in range(SERVICE.shape.pods)]
    launch = Launch(incarnation=1, hosts=("a", "b"), key="00" * 32)
    specs = [spec for serve in settings for spec in make_rank_specs(serve, launch, folder)]
    ranks = [spec.base_port + 1 + spec.rank for spec in specs]  # `rank_place`, tested with the runtime: it imports torch
    first, second, a_router = of_group("chat-g-aaaaa"), of_group("chat-g-bbbbb"), of_router()
    return {
        "pod HTTP": [(a_router, first, serve.http.port) for serve in settings],
        "router HTTP": [(peer, a_router, router_port()) for peer in (STRANGER, a_router, of_operator(), PROMETHEUS)],
        "router for the service": [(peer, a_router, labels.INTERNAL_PORT) for peer in (a_router, of_operator())],
        "rendezvous": [(first, first, serve.group.master_port) for serve in settings],
        "ranks": [(first, first, port) for port in ranks],
        "ranks, free ports": [(first, first, FREE)],
        "KV transfer": [(first, second, FREE), (second, first, FREE), (first, first, FREE)],
    }


OPENED = {
    ("phalanx_runtime.server.pod_server", "uvicorn.Config"): "pod HTTP",
    ("phalanx_router.program", "uvicorn.Config"): "router HTTP",
    ("phalanx_frontend.auth.peers", "asyncio.get_running_loop().create_server"): "router for the service",
    ("phalanx_runtime.server.supervision.rendezvous", "asyncio.start_server"): "rendezvous",
    ("phalanx_runtime.collective.connect", "listen"): "ranks",
    ("phalanx_runtime.collective.connect", "socket.create_server"): "ranks",
    ("phalanx_runtime.collective.library", "TCPStore"): "ranks, free ports",
    ("phalanx_runtime.collective.library", "ProcessGroupGloo"): "ranks, free ports",
    ("phalanx_runtime.collective.library", "ProcessGroupNCCL"): "ranks, free ports",
    ("phalanx_runtime.rank.transfer.server", "listen"): "KV transfer",
}
DIALLED = {
    ("phalanx_runtime.server.supervision.rendezvous", "asyncio.open_connection"): "rendezvous",
    ("phalanx_runtime.collective.connect", "socket.create_connection"): "ranks",
    ("phalanx_runtime.collective.registry", "connect"): "ranks",
    ("phalanx_runtime.rank.transfer.server", "socket.create_connection"): "KV transfer",
    ("phalanx_runtime.rank.transfer.sender", "socket.create_connection"): "KV transfer",
    ("phalanx_router.links.connection", "connect"): "pod HTTP",
    ("phalanx_router.links.connection", "open_websocket"): "pod HTTP",
    ("phalanx_router.resume.peers", "open_websocket"): "router HTTP",
    ("phalanx_router.responses.embedder", "aiohttp.ClientSession"): "router HTTP",
    ("phalanx_operator.routers", "aiohttp.ClientSession"): "router HTTP",
}
SOURCES = "phalanx_runtime.checkpoint"
EGRESS = {
    (SOURCES, "httpx.Client"),
    (SOURCES, "httpx.get"),
    ("phalanx_frontend.auth.tokens", "httpx.AsyncClient"),
    ("phalanx_frontend.images.fetching", "httpx.AsyncClient"),
    ("phalanx_runtime.terminal.load", "httpx.AsyncClient"),
    ("phalanx_runtime.terminal.remote", "httpx.Client"),
    ("phalanx_router.links.leader_watch", "client.ApiClient"),
    ("phalanx_operator.kube.http", "ApiClient"),
    ("phalanx_operator.app", "connect"),
    ("phalanx_operator.app", "kopf.operator"),
}
"""Connections to model sources, hosts of images, issuers of tokens and the API server, and of people at a terminal. No policy
restricts egress."""
LOCAL = {
    ("phalanx_runtime.engine.client", "self._socket.bind"),
    ("phalanx_runtime.server.supervision.supervisor", "self._client.bind"),
    ("phalanx_runtime.engine.channel", "context.socket"),
    ("phalanx_runtime.engine.channel", "socket.bind"),
    ("phalanx_runtime.engine.channel", "self._socket.connect"),
    ("phalanx_router.__main__", "connect"),
    ("phalanx_router.__main__", "http.client.HTTPConnection"),
    ("phalanx_router.__main__", "http.client.HTTPSConnection"),
}
"""Between the processes of a pod: zmq over Unix sockets, and HTTP over loopback."""
UNRESTRICTED = {("phalanx_operator.metrics", "web.TCPSite")}
"""The operator's endpoint: policies select only pods of services."""
ADDRESSES = {
    ("phalanx_router.links.connection", "ws"): "pod HTTP",
    ("phalanx_router.links.connection", "wss"): "pod HTTP",
    ("phalanx_router.responses.embedder", "http"): "router HTTP",
    ("phalanx_operator.routers", "http"): "router HTTP",
    ("phalanx_operator.routers", "https"): "router HTTP",
}
"""Modules and schemes of the addresses that they dial, except model sources."""
NOT_DIALLED = {
    ("phalanx_runtime.server.supervision.supervisor", "ipc"),
    ("phalanx_runtime.flag_checks", "file"),
    ("phalanx_runtime.settings", "http"),
    ("phalanx_runtime.settings", "https"),
    ("phalanx_frontend.auth.origins", "http"),
    ("phalanx_frontend.auth.origins", "https"),
    ("phalanx_router.links.endpoints", "https"),
    ("phalanx_router.links.endpoints", "internal"),
    ("phalanx_api.spec.adapters", "pvc"),
    ("phalanx_operator.decide.state.policy", "file"),
    ("phalanx_operator.decide.conditions.status", "http"),
    ("phalanx_operator.decide.conditions.status", "https"),
}
"""Addresses of files and claims, origins of web pages, a flag, and a URL in the status."""


def test_every_socket_is_listed() -> None:
    """A new port may need a rule in the policies."""
    sockets = {(SOURCES if module.startswith(SOURCES) else module, name) for module, text in programs() for name in calls(text)}
    assert sockets == OPENED.keys() | DIALLED.keys() | EGRESS | LOCAL | UNRESTRICTED


def test_every_address_is_listed_and_zmq_uses_files() -> None:
    addresses = {(module, scheme) for module, text in programs() if not module.startswith(SOURCES) for scheme in schemes(text)}
    assert addresses == ADDRESSES.keys() | NOT_DIALLED
    assert {scheme for _, scheme in addresses if scheme in ZMQ} == {"ipc"}


@pytest.mark.parametrize(
    "text",
    [
        "self._context.socket(zmq.PAIR)",
        "zmq.Context().socket(zmq.REP).bind(where)",
        "self._socket.connect(where)",
        "loop.create_server(make, port=1)",
        "asyncio.get_running_loop().create_connection(make)",
        "self._loop.open_connection()",
        "torch.distributed.init_process_group('nccl')",
        "c10d.TCPStore('host', 1)",
        "urllib.request.urlopen(url)",
        "httpx.post(url)",
        "socket()",
    ],
)
def test_socket_calls_are_found(text: str) -> None:
    assert list(calls(text))


def test_computed_addresses_are_found() -> None:
    assert [*schemes("f'tcp://{host}:1'"), *schemes("'ipc://x'"), *schemes("'at tcp://x'")] == ["tcp", "ipc"]


def test_no_policy_selects_the_operator() -> None:
    policies = network.policies(SERVICE, ANY_PROMETHEUS)
    assert policies and not any(selects(policy["spec"]["podSelector"], of_operator().labels) for policy in policies)


def test_policies_admit_every_connection_of_the_programs(tmp_path: pathlib.Path) -> None:
    connections = flows(tmp_path)
    assert set(OPENED.values()) == set(connections) >= {*DIALLED.values(), *ADDRESSES.values()}
    assert {port for _, _, port in connections["ranks"]} == {8101, 8102, 8103, 8104}
    for name, of_name in connections.items():
        for source, target, port in of_name:
            assert admits(source, target, port), (name, source, port)


def test_routers_dial_the_open_port() -> None:
    listed = leaders_of([Pod(Metadata(name=ip, uid=ip), PodStatus("Running", ip)) for ip in ("10.0.0.1", "fd00::1")])
    assert {address.address.rpartition(":")[2] for address in listed.values()} == {str(labels.HTTP_PORT)}


@pytest.mark.parametrize(
    ("source", "port", "is_admitted"),
    [
        (of_operator(), labels.HTTP_PORT, True),
        (PROMETHEUS, labels.HTTP_PORT, True),
        (STRANGER, labels.HTTP_PORT, False),
        (of_group("other-g-aaaaa", "other"), labels.HTTP_PORT, False),
        (of_group("other-g-aaaaa", "other"), FREE, False),
        (of_router("other"), labels.HTTP_PORT, False),
        (of_router(), labels.RENDEZVOUS_PORT, False),
        (of_operator(), FREE, False),
        (Peer(of_router().labels, "elsewhere"), labels.HTTP_PORT, False),
        (Peer(of_operator().labels, "elsewhere"), labels.HTTP_PORT, False),
    ],
)
def test_group_ingress_table(source: Peer, port: int | None, is_admitted: bool) -> None:
    assert admits(source, of_group("chat-g-aaaaa"), port) is is_admitted


@pytest.mark.parametrize(
    ("source", "port", "is_admitted"),
    [
        (of_group("other-g-aaaaa", "other"), FREE, True),
        (of_router("other"), labels.HTTP_PORT, True),
        (of_router("other"), FREE, False),
        (STRANGER, labels.HTTP_PORT, False),
        (Peer(of_router().labels, "elsewhere"), labels.HTTP_PORT, False),
    ],
)
def test_sharing_groups_admit_other_services(source: Peer, port: int | None, is_admitted: bool) -> None:
    service = make_service(parallelism={"tensor": 4, "gpusPerPod": 2}, rebalancing={"sharePages": True})
    assert admits(source, of_group("chat-g-aaaaa"), port, service) is is_admitted


def test_routers_admit_only_their_http_port() -> None:
    assert not admits(of_router(), of_router(), FREE) and not admits(STRANGER, of_router(), labels.RENDEZVOUS_PORT)


def test_prometheus_may_be_restricted_to_a_namespace() -> None:
    peers = PeerNamespaces(prometheus="monitoring")
    assert admits(PROMETHEUS, of_group("g"), labels.HTTP_PORT, peers=peers)
    assert not admits(Peer(PROMETHEUS.labels, "elsewhere"), of_group("g"), labels.HTTP_PORT, peers=peers)


async def test_network_policy_follows_its_switch() -> None:
    world = World()
    await world.settle()
    assert set(world.kube.of_kind(NETWORK_POLICIES)) == {"chat-groups", "chat-router"}
    await world.change(networkPolicy={"enabled": False})
    await world.settle()
    assert world.kube.of_kind(NETWORK_POLICIES) == {}
    world.clock += REAPPLY_S + 1
    await world.settle()  # checks again that they do not exist
    await world.change(networkPolicy={"enabled": True})
    await world.settle()
    assert set(world.kube.of_kind(NETWORK_POLICIES)) == {"chat-groups", "chat-router"}


async def test_foreign_network_policy_is_kept() -> None:
    world = World(networkPolicy={"enabled": False})
    world.kube.put(NETWORK_POLICIES, {"metadata": {"name": "chat-groups", "namespace": "team"}})
    await world.settle()
    assert set(world.kube.of_kind(NETWORK_POLICIES)) == {"chat-groups"}
