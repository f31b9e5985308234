"""Up, down and repair. `up` starts what does not run: it may be repeated, also after any process was killed."""

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import control_plane, namespaces, network, node, pki
from tests.cluster.api import Api
from tests.cluster.config import NODES, ClusterFiles, Node
from tests.cluster.daemons import Daemon
from tests.cluster.images import import_images
from tests.cluster.node_files import PRIVATE_FOLDERS
from tests.cluster.programs import Programs
from tools.cache import locked
from tools.errors import Failed
from tools.shell import output, say, ticking

END_LIMIT_S = 10.0


@contextmanager
def _stage(name: str) -> Iterator[None]:
    started_s = time.monotonic()
    with ticking(lambda: name):
        yield
    say(f"  {time.monotonic() - started_s:5.1f} s  {name}")


def is_up(files: ClusterFiles) -> bool:
    """Whether control plane, name server and both nodes run."""
    if not files.kubeconfig.exists() or not namespaces.exists(files.netns(NODES[0])):
        return False
    core = control_plane.is_up(files, Api(files.pki, files.netns(NODES[0])))
    return core and control_plane.dns_is_up(files) and all(node.is_up(files, x) for x in NODES)


def up(files: ClusterFiles, programs: Programs, archives: list[Path]) -> None:
    """Starts the cluster, or its missing parts, and imports the archives into every node. Raises Failed."""
    with locked(files.lock):
        started_s = time.monotonic()
        with _stage("keys"):
            pki.make_pki(files.pki)
        api = Api(files.pki, files.netns(NODES[0]))
        if not (namespaces.exists(files.netns(NODES[0])) and control_plane.is_up(files, api)):
            _down(files)
        files.run.mkdir(parents=True, exist_ok=True)
        missing = [x for x in NODES if not node.is_up(files, x)]
        with _stage("network"):
            for target in missing:
                node.end(files, target)
            network.make(files)
            _make_folders(files)
        with ThreadPoolExecutor(len(NODES) + 1) as pool:
            nodes = [pool.submit(_prepare, files, programs, archives, target) for target in missing]
            manager = pool.submit(_control_plane, files, programs, api)
            started = manager.result()
            for future in nodes:
                future.result()
        _join(files, programs, api, missing)
        if started is not None:
            control_plane.wait_for_accounts(api, started)
        load_images(files, programs, archives)
        say(f"cluster {files.name} is up: {time.monotonic() - started_s:.1f} s")


def load_images(files: ClusterFiles, programs: Programs, archives: list[Path]) -> None:
    """Imports the archives into every running node."""
    with _stage("images of all nodes"), ThreadPoolExecutor(len(NODES)) as pool:
        for future in [pool.submit(import_images, files, programs, target, archives) for target in NODES]:
            future.result()


def _control_plane(files: ClusterFiles, programs: Programs, api: Api) -> Daemon | None:
    manager = None
    if not control_plane.is_up(files, api):
        with _stage("API server ready"):
            control_plane.start_api(files, programs, api)
        manager = control_plane.start_controllers(files, programs)
    if not control_plane.dns_is_up(files):
        with _stage("CoreDNS ready"):
            control_plane.start_dns(files, programs, api)
    return manager


def _prepare(files: ClusterFiles, programs: Programs, archives: list[Path], target: Node) -> None:
    with _stage(f"containerd of {target.name}"):
        node.prepare(files, programs, target)
    with _stage(f"images of {target.name}"):
        import_images(files, programs, target, archives)


def _join(files: ClusterFiles, programs: Programs, api: Api, missing: list[Node]) -> None:
    with _stage("nodes Ready"):
        since = node.now()
        kubelets = [(target, node.join(files, programs, target)) for target in missing]
        for target, kubelet in kubelets:
            node.wait_ready(api, target, kubelet, since)


def _make_folders(files: ClusterFiles) -> None:
    """Creates missing mount points on the machine. They are recorded first, for interrupted runs."""
    with locked(files.made_folders.with_name("made-folders.lock")):
        for folder in map(Path, PRIVATE_FOLDERS):
            absent = [x for x in (folder, *folder.parents) if not x.exists()]
            with files.made_folders.open("a") as record:
                record.writelines(f"{x}\n" for x in absent)
            folder.mkdir(parents=True, exist_ok=True)


def _remove_folders(files: ClusterFiles) -> None:
    """The last cluster removes them: removal would unmount what others have there."""
    with locked(files.made_folders.with_name("made-folders.lock")):
        if mounts_below(files.root.parent) or not files.made_folders.exists():
            return
        for folder in files.made_folders.read_text().splitlines():
            if os.path.isdir(folder) and not os.listdir(folder):
                os.rmdir(folder)
        files.made_folders.unlink()


def down(files: ClusterFiles) -> None:
    """Stops the cluster; keeps keys, logs and image stores. May be repeated."""
    with locked(files.lock):
        started_s = time.monotonic()
        _down(files)
        say(f"cluster {files.name} is down: {time.monotonic() - started_s:.1f} s")


def _down(files: ClusterFiles) -> None:
    for target in reversed(NODES):
        node.end(files, target)
    _end_processes(files)
    for target in reversed(NODES):
        namespaces.remove(files.netns(target))
    _unmount_below(files.root)
    control_plane.forget(files)
    for target in NODES:
        shutil.rmtree(files.node(target), ignore_errors=True)
    _remove_folders(files)


def _end_processes(files: ClusterFiles) -> None:
    limit = time.monotonic() + END_LIMIT_S
    while running := [process for target in NODES for process in namespaces.processes(files.netns(target))]:
        namespaces.kill(running)
        if time.monotonic() > limit:
            raise Failed(f"processes that cannot be killed: {', '.join(f'{x.pid} {x.name}' for x in running)}")
        time.sleep(0.02)


def mounts_below(root: Path) -> list[str]:
    """Returns mount points below a folder, newest first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in reversed(points) if Path(point).is_relative_to(root)]


def _unmount_below(root: Path) -> None:
    for point in mounts_below(root):
        output("umount", "--lazy", point)


def remains(files: ClusterFiles) -> list[str]:
    """Returns what exists of the cluster, apart from kept files: processes, mounts, cgroups, data, folders."""
    found = [f"process {x.pid} {x.name}" for target in NODES for x in namespaces.processes(files.netns(target))]
    found += [f"mount {x}" for x in mounts_below(files.root)]
    found += [f"cgroup {x}" for target in NODES for x in node.cgroups_left(files.cgroup(target))]
    paths = [
        *files.etcd_folders(),
        files.run,
        *(files.node(x) for x in NODES),
        *(files.netns(x) for x in NODES),
    ]
    return found + [f"file {x}" for x in paths if x.exists()]
