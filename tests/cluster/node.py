"""One node: its namespaces, containerd, kubelet and kube-proxy. Killing its PID 1 ends all of it, pods included."""

import os
import shutil
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from tests.cluster import daemons, namespaces, node_files
from tests.cluster.api import Api
from tests.cluster.config import GPU_RESOURCE, GPUS_PER_NODE, ClusterFiles, Node
from tests.cluster.programs import Programs
from tools.errors import Failed
from tools.shell import output

ANSWERS = "Start streaming server"
"""What containerd says last before it answers a kubelet. Its socket is there earlier, and a kubelet that asks then ends."""
DAEMONS = ("containerd", "kubelet", "kube-proxy")
START_LIMIT_S = 30.0
READY_LIMIT_S = 90.0
END_LIMIT_S = 10.0


def init_pid(files: ClusterFiles, node: Node) -> int | None:
    """The pid, on the machine, of the node's PID 1; None when the node is not up."""
    wanted = f"{node.name}-init"
    return next((process.pid for process in namespaces.processes(files.netns(node)) if process.name == wanted), None)


def is_up(files: ClusterFiles, node: Node) -> bool:
    """Whether every daemon of the node runs."""
    return {*DAEMONS, f"{node.name}-init"} <= {process.name for process in _own(files, node)}


def _own(files: ClusterFiles, node: Node) -> list[namespaces.Process]:
    """The node's processes; the first node shares its network with the control plane and with programs that were run there."""
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
    """The words before a command that runs it in the node's namespaces. Raises Failed when the node is not up."""
    init = init_pid(files, node)
    if init is None:
        raise Failed(f"{node.name} is not up")
    return ("nsenter", "-t", str(init), "--mount", "--net", "--pid")


def prepare(files: ClusterFiles, programs: Programs, node: Node) -> None:
    """Nothing; the node's namespaces are there and its containerd answers. Its network exists, nothing of a former life does."""
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

    init = folder / f"{node.name}-init"  # under a name of its own, by which the node's PID 1 is found again
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
    daemons.wait_until(what, lambda: (folder / "mounted").exists() and init_pid(files, node) is not None, START_LIMIT_S, holder)

    command: tuple[str | Path, ...] = (*inside(files, node), programs.bin / "containerd", "-c", toml)
    containerd = daemons.start("containerd", *command, log=files.logs / f"{node.name}-containerd.log", env=programs.environment())
    what = f"containerd of {node.name} (were its store at fault: delete {store})"
    daemons.wait_until(what, lambda: ANSWERS in containerd.log.read_text(), START_LIMIT_S, containerd)


def join(files: ClusterFiles, programs: Programs, node: Node) -> daemons.Daemon:
    """The kubelet, just started, and kube-proxy beside it. Needs a ready API server."""
    folder = files.node(node)
    enter, environment = inside(files, node), programs.environment()
    flags = (f"--hostname-override={node.name}", f"--node-ip={node.ip}", f"--kubeconfig={files.pki}/{node.name}.kubeconfig")
    kept = (f"--config={folder}/kubelet.yaml", f"--root-dir={folder}/kubelet", f"--cert-dir={folder}/kubelet/pki")
    command = (*enter, str(programs.kube("kubelet")), *flags, *kept)
    kubelet = daemons.start("kubelet", *command, log=files.logs / f"{node.name}-kubelet.log", env=environment)
    command = (*enter, str(programs.kube("kube-proxy")), f"--config={folder}/proxy.yaml")
    daemons.start("kube-proxy", *command, log=files.logs / f"{node.name}-kube-proxy.log", env=environment)
    return kubelet


def wait_ready(api: Api, node: Node, kubelet: daemons.Daemon, since: datetime) -> None:
    """Nothing, once the node said after `since` that it is ready, and counts its GPUs. Raises Failed."""
    path = f"/api/v1/nodes/{node.name}"

    def conditions() -> dict[str, dict[str, str]]:
        return {x["type"]: x for x in ((api.find(path) or {}).get("status") or {}).get("conditions", [])}

    def is_ready() -> bool:
        ready = conditions().get("Ready")  # that of a former life stays up for the grace period
        return ready is not None and ready["status"] == "True" and datetime.fromisoformat(ready["lastHeartbeatTime"]) >= since

    daemons.wait_until(f"{node.name} Ready", is_ready, READY_LIMIT_S, kubelet)
    # An extended resource: the scheduler counts it, the kubelet keeps it.
    counts = {GPU_RESOURCE: str(GPUS_PER_NODE)}
    api.patch(f"{path}/status", {"status": {"capacity": counts, "allocatable": counts}}, "application/strategic-merge-patch+json")


def now() -> datetime:
    """The present, in whole seconds as the API server writes it."""
    return datetime.now(UTC).replace(microsecond=0)


def end(files: ClusterFiles, node: Node) -> None:
    """Nothing; ends the node with all its pods and clears what they left. Image store and network namespace stay."""
    namespaces.kill([process for process in namespaces.processes(files.netns(node)) if process.name == f"{node.name}-init"])
    limit = time.monotonic() + END_LIMIT_S
    # unshare waits for the node's PID 1, which the kernel keeps until everything in the namespace has ended
    while any(p.name == "unshare" and _holds(p.pid, node) for p in namespaces.processes(files.netns(node))):
        if time.monotonic() > limit:
            raise Failed(f"{node.name}: its processes did not end within {END_LIMIT_S:.0f} s of being killed")
        time.sleep(0.02)
    _remove_cgroups(files.cgroup(node))
    if namespaces.exists(files.netns(node)):
        with namespaces.inside(files.netns(node)), suppress(Failed):
            output("ip", "link", "delete", "cni0")  # its addresses were those of pods that are gone
    shutil.rmtree(files.node(node), ignore_errors=True)


def _holds(pid: int, node: Node) -> bool:
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
    """The cgroups of a node, deepest first."""
    found: list[Path] = []
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            found.append(Path(folder))
    return found


def _remove_cgroups(name: str) -> None:
    limit = time.monotonic() + END_LIMIT_S
    while found := cgroups_left(name):
        for folder in found:  # busy until the kernel has taken the last process out
            with suppress(OSError):
                folder.rmdir()
        if time.monotonic() > limit:
            raise Failed(f"cgroups stay behind: {', '.join(str(x) for x in found[:3])}")
        time.sleep(0.02)
