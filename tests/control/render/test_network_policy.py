"""The network policies against every port that runtime, router and operator open or dial: no test network enforces them."""

import pathlib
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from phalanx_api import labels
from phalanx_operator.apply.owned import APPLY_AGAIN_S
from phalanx_operator.kube.client import NETWORK_POLICIES
from phalanx_operator.render import network, pods, router
from phalanx_operator.render.network import Neighbours
from phalanx_operator.render.objects import Images
from phalanx_operator.render.pods import GroupBuild
from phalanx_router.links.endpoints import Metadata, Pod, PodStatus, leaders_of
from phalanx_router.settings import make_parser as router_parser
from phalanx_runtime.rank.process.group import place_of
from phalanx_runtime.server.serve import make_rank_specs
from phalanx_runtime.server.supervision.pod import Launch
from phalanx_runtime.settings import ServeSettings, read_settings
from tests.control.builders import make_service
from tests.control.sockets import ROOT, ZMQ, calls, programs, schemes
from tests.control.worlds import World

IMAGES = Images("runtime:1", "router:1")
SERVICE = make_service(parallelism={"tensor": 4, "gpusPerPod": 2})
ANY_PROMETHEUS = Neighbours()
FREE = None
"""A port that the system chooses, so that only a rule for all ports covers it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connects, or to whom: labels and namespace of a pod."""

    labels: dict[str, str]
    namespace: str = "team"


def of_group(group: str, name: str = "chat") -> Peer:
    template = pods.group(make_service(name=name), group, GroupBuild(revision="r", images=IMAGES))["spec"]["template"]
    return Peer(template["metadata"]["labels"])


def of_router(name: str = "chat") -> Peer:
    return Peer(router.router_objects(make_service(name=name), IMAGES)[-1]["spec"]["template"]["metadata"]["labels"])


def of_operator() -> Peer:
    """The operator as the manifests install it."""
    deployment = yaml.safe_load((ROOT / "manifests" / "base" / "operator.yaml").read_text())
    return Peer(deployment["spec"]["template"]["metadata"]["labels"], deployment["metadata"]["namespace"])


PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, "monitoring")
STRANGER = Peer({"app": "other"})


def is_selected(selector: dict[str, Any], found: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= found.items()


def is_named(peer: dict[str, Any], source: Peer) -> bool:
    if "namespaceSelector" in peer:
        is_there = is_selected(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace})
    else:
        is_there = source.namespace == SERVICE.namespace
    return is_there and is_selected(peer["podSelector"], source.labels)


def admits(source: Peer, target: Peer, port: int | None, neighbours: Neighbours = ANY_PROMETHEUS) -> bool:
    """Whether the policies let this connection in, by the rules of the API."""
    held = [p["spec"] for p in network.policies(SERVICE, neighbours) if is_selected(p["spec"]["podSelector"], target.labels)]
    assert held, "no policy selects the pod"
    return any(
        ("ports" not in rule or port in [one["port"] for one in rule["ports"]])
        and ("from" not in rule or any(is_named(peer, source) for peer in rule["from"]))
        for policy in held
        for rule in policy["ingress"]
    )


def settings_of(pod: int, folder: pathlib.Path) -> ServeSettings:
    """What the runtime reads of the rendered command line."""
    (folder / "token").write_text("0" * 64)
    container = pods.group(SERVICE, "chat-g-aaaaa", GroupBuild(revision="r", images=IMAGES))["spec"]["template"]["spec"][
        "containers"
    ][0]
    known = {f"$({labels.ENV_POD_INDEX})": str(pod), labels.TOKEN_FILE: str(folder / "token")}
    read = read_settings([known.get(word, word) for word in container["args"]], {})
    assert isinstance(read, ServeSettings)
    return read


def router_port() -> int:
    deployment = router.router_objects(SERVICE, IMAGES)[-1]
    return int(router_parser().parse_args(deployment["spec"]["template"]["spec"]["containers"][0]["args"]).port)


Flow = tuple[Peer, Peer, int | None]


def flows(folder: pathlib.Path) -> dict[str, list[Flow]]:
    """Every connection between pods of a service, by what opens it: who dials whom, at which port."""
    settings = [settings_of(pod, folder) for pod in range(SERVICE.shape.pods)]
    launch = Launch(incarnation=1, hosts=("a", "b"), key="00" * 32)
    specs = [spec for one in settings for spec in make_rank_specs(one, launch, folder)]
    ranks = [place_of(spec, 1).addresses[spec.rank][1] for spec in specs]
    first, second, door = of_group("chat-g-aaaaa"), of_group("chat-g-bbbbb"), of_router()
    return {
        "http of a pod": [(door, first, one.http.port) for one in settings],
        "http of a router": [(peer, door, router_port()) for peer in (STRANGER, door, of_operator(), PROMETHEUS)],
        "rendezvous": [(first, first, one.group.master_port) for one in settings],
        "ranks": [(first, first, port) for port in ranks],
        "free ports of ranks": [(first, first, FREE)],
        "pages of moves": [(first, second, FREE), (second, first, FREE), (first, first, FREE)],
    }


OPENED = {
    ("phalanx_runtime.server.serve", "uvicorn.Config"): "http of a pod",
    ("phalanx_router.program", "uvicorn.Config"): "http of a router",
    ("phalanx_runtime.server.supervision.rendezvous", "asyncio.start_server"): "rendezvous",
    ("phalanx_runtime.collective.connect", "listen"): "ranks",
    ("phalanx_runtime.collective.connect", "socket.create_server"): "ranks",
    ("phalanx_runtime.collective.library", "TCPStore"): "free ports of ranks",
    ("phalanx_runtime.collective.library", "ProcessGroupGloo"): "free ports of ranks",
    ("phalanx_runtime.collective.library", "ProcessGroupNCCL"): "free ports of ranks",
    ("phalanx_runtime.rank.transfer.server", "listen"): "pages of moves",
}
DIALLED = {
    ("phalanx_runtime.server.supervision.rendezvous", "asyncio.open_connection"): "rendezvous",
    ("phalanx_runtime.collective.connect", "socket.create_connection"): "ranks",
    ("phalanx_runtime.rank.process.group", "connect"): "ranks",
    ("phalanx_runtime.rank.transfer.server", "socket.create_connection"): "pages of moves",
    ("phalanx_runtime.rank.transfer.sender", "socket.create_connection"): "pages of moves",
    ("phalanx_router.links.connection", "connect"): "http of a pod",
    ("phalanx_router.resume.peers", "connect"): "http of a router",
    ("phalanx_operator.app", "aiohttp.ClientSession"): "http of a router",
}
SOURCES = "phalanx_runtime.checkpoint"
OUTWARD = {
    (SOURCES, "httpx.Client"),
    (SOURCES, "httpx.get"),
    ("phalanx_router.links.leader_watch", "client.ApiClient"),
    ("phalanx_operator.kube.http", "ApiClient"),
    ("phalanx_operator.app", "connect"),
    ("phalanx_operator.app", "kopf.operator"),
}
"""What leaves the service: to sources of models, each a module of that package, and to the API server. Policies let it out."""
WITHIN = {
    ("phalanx_runtime.engine.client", "self._context.socket"),
    ("phalanx_runtime.engine.client", "socket.bind"),
    ("phalanx_runtime.server.supervision.supervisor", "self._client.bind"),
    ("phalanx_runtime.engine.channel", "self._context.socket"),
    ("phalanx_runtime.engine.channel", "self._socket.connect"),
}
"""Between the processes of one pod: zmq over a file, by the address that the supervisor makes."""
UNHELD = {("phalanx_operator.metrics", "web.TCPSite")}
"""The operator's own door, for the kubelet and Prometheus: the policies are of services, so they hold no pod of it."""
ADDRESSES = {
    ("phalanx_router.links.connection", "ws"): "http of a pod",
    ("phalanx_router.resume.peers", "ws"): "http of a router",
    ("phalanx_operator.routers", "http"): "http of a router",
}
"""Addresses that are dialled, by their schemes. Those of sources of models lead outward, each module of that package."""
NOT_DIALLED = {
    ("phalanx_runtime.server.supervision.supervisor", "ipc"),
    ("phalanx_runtime.settings", "file"),
    ("phalanx_operator.decide.conditions.status", "http"),
}
"""Addresses of files, and what the status tells users."""


def test_every_socket_of_the_programs_is_one_of_these() -> None:
    """Who opens or dials another port meets this test, and then the policies."""
    found = {(SOURCES if module.startswith(SOURCES) else module, name) for module, text in programs() for name in calls(text)}
    assert found == OPENED.keys() | DIALLED.keys() | OUTWARD | WITHIN | UNHELD


def test_every_address_is_listed_and_zmq_uses_files() -> None:
    found = {(module, scheme) for module, text in programs() if not module.startswith(SOURCES) for scheme in schemes(text)}
    assert found == ADDRESSES.keys() | NOT_DIALLED
    assert {scheme for _, scheme in found if scheme in ZMQ} == {"ipc"}


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
def test_a_socket_is_found_whatever_it_is_opened_by(text: str) -> None:
    assert list(calls(text))


def test_computed_addresses_are_found() -> None:
    assert [*schemes("f'tcp://{host}:1'"), *schemes("'ipc://x'"), *schemes("'at tcp://x'")] == ["tcp", "ipc"]


def test_no_policy_holds_the_operator() -> None:
    made = network.policies(SERVICE, ANY_PROMETHEUS)
    assert made and not any(is_selected(one["spec"]["podSelector"], of_operator().labels) for one in made)


def test_the_policies_admit_every_connection_of_the_programs(tmp_path: pathlib.Path) -> None:
    known = flows(tmp_path)
    assert set(OPENED.values()) == set(known) >= {*DIALLED.values(), *ADDRESSES.values()}
    assert {port for _, _, port in known["ranks"]} == {8101, 8102, 8103, 8104}
    for what, connections in known.items():
        for source, target, port in connections:
            assert admits(source, target, port), (what, source, port)


def test_routers_dial_the_port_that_is_open() -> None:
    listed = leaders_of([Pod(Metadata(name=ip, uid=ip), PodStatus("Running", ip)) for ip in ("10.0.0.1", "fd00::1")])
    assert {address.address.rpartition(":")[2] for address in listed.values()} == {str(labels.HTTP_PORT)}


@pytest.mark.parametrize(
    ("source", "port", "is_let_in"),
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
def test_group_ingress_table(source: Peer, port: int | None, is_let_in: bool) -> None:
    assert admits(source, of_group("chat-g-aaaaa"), port) is is_let_in


def test_a_router_is_reached_at_its_http_port_only() -> None:
    assert not admits(of_router(), of_router(), FREE) and not admits(STRANGER, of_router(), labels.RENDEZVOUS_PORT)


def test_prometheus_may_be_that_of_one_namespace() -> None:
    ours = Neighbours(prometheus="monitoring")
    assert admits(PROMETHEUS, of_group("g"), labels.HTTP_PORT, ours)
    assert not admits(Peer(PROMETHEUS.labels, "elsewhere"), of_group("g"), labels.HTTP_PORT, ours)


async def test_network_policy_follows_its_switch() -> None:
    world = World()
    await world.settle()
    assert set(world.kube.of(NETWORK_POLICIES)) == {"chat-groups", "chat-router"}
    await world.change(networkPolicy={"enabled": False})
    await world.settle()
    assert world.kube.of(NETWORK_POLICIES) == {}
    world.clock += APPLY_AGAIN_S + 1
    await world.settle()  # looks again whether they are there, which they are not
    await world.change(networkPolicy={"enabled": True})
    await world.settle()
    assert set(world.kube.of(NETWORK_POLICIES)) == {"chat-groups", "chat-router"}


async def test_foreign_network_policy_is_kept() -> None:
    world = World(networkPolicy={"enabled": False})
    world.kube.put(NETWORK_POLICIES, {"metadata": {"name": "chat-groups", "namespace": "team"}})
    await world.settle()
    assert set(world.kube.of(NETWORK_POLICIES)) == {"chat-groups"}
