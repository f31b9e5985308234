"""The network between the nodes: a bridge in the first one's namespace, a cable to the second one, a route each way."""

from pathlib import Path

from tests.cluster import namespaces
from tests.cluster.config import API_IP, NETWORK_BITS, NODES, ClusterFiles
from tools.errors import Failed, Missing
from tools.shell import output

CABLE = "to-node2"  # the first node's end; down, it is a partition
SETTINGS = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")  # the second: Services for pods of one bridge


def make(files: ClusterFiles) -> None:
    """Nothing; both namespaces exist, joined. Does nothing where they do. Raises Missing for a kernel without them."""
    first, second = NODES
    home, away = files.netns(first), files.netns(second)
    if not namespaces.exists(home):
        namespaces.make(home)
        # The address lies on a bridge, which works in kernels without dummy links too.
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


def cut(files: ClusterFiles) -> None:
    """Nothing; parts the second node from the rest, as a broken cable does."""
    _ip(files.netns(NODES[0]), [f"link set {CABLE} down"], "links")


def mend(files: ClusterFiles) -> None:
    """Nothing; joins the second node again."""
    _ip(files.netns(NODES[0]), [f"link set {CABLE} up"], "links")
