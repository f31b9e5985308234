"""The network of the nodes: a bridge in the first node, a cable to the second, and a route in each direction."""

from pathlib import Path

from tests.cluster import namespaces
from tests.cluster.config import API_IP, API_PORT, NETWORK_BITS, NODE_GROUP, NODES, ClusterFiles, Node
from tests.cluster.programs import Programs
from tools.errors import Failed, Missing
from tools.shell import output

CABLE = "to-node2"  # the first node's end
SETTINGS = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")  # the second: Services for pods of one bridge


def make(files: ClusterFiles) -> None:
    """Creates and joins both namespaces, if missing. Raises Missing if the kernel lacks a feature."""
    first, second = NODES
    home, away = files.netns(first), files.netns(second)
    if not namespaces.exists(home):
        namespaces.make(home)
        # a bridge: some kernels have no dummy links
        lines = ["link add node0 type bridge", f"addr add {first.ip}/{NETWORK_BITS} dev node0", "link set node0 up"]
        _ip(
            home, [*lines, "route add default dev node0"], "network bridges (CONFIG_BRIDGE)"
        )  # the API server looks for a default route
        _switch_on(home)
    if not namespaces.exists(away):
        namespaces.make(away)
        _ip(home, [f"link add {CABLE} type veth peer name eth0 netns {away}"], "virtual cables (CONFIG_VETH)")
        _ip(home, [f"link set {CABLE} master node0 up", f"route replace {second.pod_cidr} via {second.ip}"], "routes")
        lines = [f"addr add {second.ip}/{NETWORK_BITS} dev eth0", "link set eth0 up", f"route add default via {API_IP}"]
        _ip(away, [*lines, f"route add {first.pod_cidr} via {first.ip}"], "routes")
        _switch_on(away)


def _ip(netns: Path, lines: list[str], feature: str) -> None:
    with namespaces.inside(netns):
        try:
            output("ip", "-batch", "-", stdin="\n".join(lines) + "\n")
        except Failed as error:
            raise Missing(f"a kernel with {feature} ({error})") from error


def _switch_on(netns: Path) -> None:
    with namespaces.inside(netns):
        for setting in SETTINGS:
            path = Path("/proc/sys", setting)
            if not path.exists():
                raise Missing(f"a kernel with {setting} (modprobe br_netfilter)")
            path.write_text("1\n")


def separate(files: ClusterFiles, programs: Programs, node: Node) -> None:
    """Rejects packets of the node's kubelet and kube-proxy to the API server. Pods reach it, and one another."""
    _filter(files, programs, node, "--insert")


def unite(files: ClusterFiles, programs: Programs, node: Node) -> None:
    """Accepts them again."""
    _filter(files, programs, node, "--delete")


def _filter(files: ClusterFiles, programs: Programs, node: Node, verb: str) -> None:
    of_node = ("--match", "owner", "--gid-owner", str(NODE_GROUP))
    rule = ("--protocol", "tcp", "--dport", str(API_PORT), *of_node, "--jump", "REJECT", "--reject-with", "tcp-reset")
    with namespaces.inside(files.netns(node)):
        output(programs.bin / "iptables", "--wait", verb, "OUTPUT", *rule, env=programs.environment())


def cut(files: ClusterFiles) -> None:
    """Disconnects the second node."""
    _ip(files.netns(NODES[0]), [f"link set {CABLE} down"], "links")


def rejoin(files: ClusterFiles) -> None:
    """Reconnects the second node."""
    _ip(files.netns(NODES[0]), [f"link set {CABLE} up"], "links")
