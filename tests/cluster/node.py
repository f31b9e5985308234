"""A node: its namespaces, containerd, kubelet and kube-proxy. Its PID 1 ends all of them, and its pods."""

import os
import shutil
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from tests.cluster import daemons, namespaces, node_files
from tests.cluster.api import Api
from tests.cluster.config import GPU_RESOURCE, GPUS_PER_NODE, NODE_GROUP, ClusterFiles, Node
from tests.cluster.programs import Programs
from tools.errors import Failed
from tools.shell import output

READY_LINE = "Start streaming server"
"""The last line of containerd's log before it serves a kubelet. Its socket exists earlier."""
DAEMONS = ("containerd", "kubelet", "kube-proxy")
START_LIMIT_S = 30.0
READY_LIMIT_S = 90.0
END_LIMIT_S = 10.0


def init_pid(files: ClusterFiles, node: Node) -> int | None:
    """Returns the PID, on the machine, of a running node's PID 1."""
    init_name = f"{node.name}-init"
    return next((process.pid for process in namespaces.processes(files.netns(node)) if process.name == init_name), None)


def is_up(files: ClusterFiles, node: Node) -> bool:
    """Whether every daemon of the node runs."""
    return {*DAEMONS, f"{node.name}-init"} <= {process.name for process in _own(files, node)}


def _own(files: ClusterFiles, node: Node) -> list[namespaces.Process]:
    """Returns the node's processes, without others in the first node's network."""
    init = init_pid(files, node)
    if init is None:
        return []
    inner = Path(f"/proc/{init}/ns/pid")
    found = []
    for process in namespaces.processes(files.netns(node)):
        with suppress(OSError):
            if os.path.samestat(inner.stat(), Path(f"/proc/{process.pid}/ns/pid").stat()):
                found.append(process)
    return found


def inside(files: ClusterFiles, node: Node) -> tuple[str, ...]:
    """Returns the prefix of commands that run in the node. Raises Failed if the node does not run."""
    init = init_pid(files, node)
    if init is None:
        raise Failed(f"{node.name} is not up")
    return ("nsenter", "-t", str(init), "--mount", "--net", "--pid")


def prepare(files: ClusterFiles, programs: Programs, node: Node) -> None:
    """Creates the node's namespaces and starts its containerd. Requires its network and no former data."""
    folder, store = files.node(node), files.store(node)
    for name in ("settings", "cni"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    store.mkdir(parents=True, exist_ok=True)
    for number, value in enumerate(node_files.MACHINE_SETTINGS.values()):
        (folder / f"settings/{number}").write_text(value + "\n")
    (folder / "cni/10-pods.conflist").write_text(node_files.cni_config(node, folder))
    (folder / "resolv.conf").write_text("")
    (folder / "kubelet.yaml").write_text(node_files.kubelet_config(node, folder, files.pki, files.cgroup(node)))
    (folder / "proxy.yaml").write_text(node_files.proxy_config(node, files.pki))
    toml = folder / "containerd.toml"
    toml.write_text(node_files.containerd_config(folder, store, programs.cni, programs.bin / "runc"))
    _make_cgroups(files.cgroup(node))

    init = folder / f"{node.name}-init"  # its name identifies the node's PID 1
    shutil.copy(programs.pause, init)
    script = node_files.init_script(folder, store, init)
    unshare = (
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        script,
    )
    with namespaces.inside(files.netns(node)):
        holder = daemons.start("init", *unshare, log=files.logs / f"{node.name}-init.log")
    what = f"namespaces of {node.name}"
    daemons.wait_for_daemon(
        what, lambda: (folder / "mounted").exists() and init_pid(files, node) is not None, START_LIMIT_S, holder
    )

    command: tuple[str | Path, ...] = (*inside(files, node), programs.bin / "containerd", "-c", toml)
    containerd = daemons.start("containerd", *command, log=files.logs / f"{node.name}-containerd.log", env=programs.environment())
    what = f"containerd of {node.name} (if its store is damaged, delete {store})"
    daemons.wait_for_daemon(what, lambda: READY_LINE in containerd.log.read_text(), START_LIMIT_S, containerd)


def join(files: ClusterFiles, programs: Programs, node: Node) -> daemons.Daemon:
    """Starts kube-proxy and the kubelet, and returns the latter. Requires a ready API server."""
    folder = files.node(node)
    enter, environment = inside(files, node), programs.environment()
    flags = (f"--hostname-override={node.name}", f"--node-ip={node.ip}", f"--kubeconfig={files.pki}/{node.name}.kubeconfig")
    folders = (f"--config={folder}/kubelet.yaml", f"--root-dir={folder}/kubelet", f"--cert-dir={folder}/kubelet/pki")
    command = (*enter, str(programs.kube("kubelet")), *flags, *folders)
    log = files.logs / f"{node.name}-kubelet.log"
    kubelet = daemons.start("kubelet", *command, log=log, env=environment, group=NODE_GROUP)
    command = (*enter, str(programs.kube("kube-proxy")), f"--config={folder}/proxy.yaml")
    daemons.start("kube-proxy", *command, log=files.logs / f"{node.name}-kube-proxy.log", env=environment, group=NODE_GROUP)
    return kubelet


def wait_ready(api: Api, node: Node, kubelet: daemons.Daemon, since: datetime) -> None:
    """Waits until the node reports ready after `since`, and sets its GPUs. Raises Failed."""
    path = f"/api/v1/nodes/{node.name}"

    def conditions() -> dict[str, dict[str, str]]:
        return {x["type"]: x for x in ((api.find(path) or {}).get("status") or {}).get("conditions", [])}

    def is_ready() -> bool:
        ready = conditions().get("Ready")  # a former condition stays for the grace period
        return ready is not None and ready["status"] == "True" and datetime.fromisoformat(ready["lastHeartbeatTime"]) >= since

    daemons.wait_for_daemon(f"{node.name} Ready", is_ready, READY_LIMIT_S, kubelet)
    # the scheduler counts extended resources
    counts = {GPU_RESOURCE: str(GPUS_PER_NODE)}
    api.patch(f"{path}/status", {"status": {"capacity": counts, "allocatable": counts}}, "application/strategic-merge-patch+json")


def now() -> datetime:
    """Returns the time in whole seconds, as the API server writes it."""
    return datetime.now(UTC).replace(microsecond=0)


def end(files: ClusterFiles, node: Node) -> None:
    """Ends the node with all its pods and removes their data, but no image store or network namespace."""
    namespaces.kill([process for process in namespaces.processes(files.netns(node)) if process.name == f"{node.name}-init"])
    limit = time.monotonic() + END_LIMIT_S
    # unshare waits for the node's PID 1, which the kernel keeps until everything in the namespace has ended
    while any(p.name == "unshare" and _starts_node(p.pid, node) for p in namespaces.processes(files.netns(node))):
        if time.monotonic() > limit:
            raise Failed(f"{node.name}: its processes did not end within {END_LIMIT_S:.0f} s of being killed")
        time.sleep(0.02)
    _remove_cgroups(files.cgroup(node))
    if namespaces.exists(files.netns(node)):
        with namespaces.inside(files.netns(node)), suppress(Failed):
            output("ip", "link", "delete", "cni0")  # it has the addresses of former pods
    shutil.rmtree(files.node(node), ignore_errors=True)


def _starts_node(pid: int, node: Node) -> bool:
    try:
        return f"/{node.name}-init".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _hierarchies() -> list[Path]:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] in ("cgroup", "cgroup2")]


def _make_cgroups(name: str) -> None:
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)


def cgroups_left(name: str) -> list[Path]:
    """Returns the cgroups of a node, deepest first."""
    found: list[Path] = []
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            found.append(Path(folder))
    return found


def _remove_cgroups(name: str) -> None:
    limit = time.monotonic() + END_LIMIT_S
    while found := cgroups_left(name):
        for folder in found:  # busy until the kernel has removed the last process
            with suppress(OSError):
                folder.rmdir()
        if time.monotonic() > limit:
            raise Failed(f"cgroups stay behind: {', '.join(str(x) for x in found[:3])}")
        time.sleep(0.02)
