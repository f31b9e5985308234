"""Up, down and repair. `up` looks at what runs and starts what is missing: it may be run twice, or after anything was killed."""

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
from tools.shell import output, say

END_LIMIT_S = 10.0


@contextmanager
def _stage(name: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    say(f"  {time.monotonic() - begin:5.1f} s  {name}")


def is_up(files: ClusterFiles) -> bool:
    """Whether control plane, name server and both nodes run."""
    if not files.kubeconfig.exists() or not namespaces.exists(files.netns(NODES[0])):
        return False
    core = control_plane.is_up(files, Api(files.pki, files.netns(NODES[0])))
    return core and control_plane.dns_is_up(files) and all(node.is_up(files, x) for x in NODES)


def up(files: ClusterFiles, programs: Programs, archives: list[Path]) -> None:
    """Nothing; the cluster runs, with the archives' images in every node. Starts only what is missing. Raises Failed."""
    with locked(files.lock):
        begin = time.monotonic()
        with _stage("keys"):
            pki.make_pki(files.pki)
        api = Api(files.pki, files.netns(NODES[0]))
        if not (namespaces.exists(files.netns(NODES[0])) and control_plane.is_up(files, api)):
            _down(files)
        files.run.mkdir(parents=True, exist_ok=True)
        missing = [x for x in NODES if not node.is_up(files, x)]
        with _stage("network"):
            for one in missing:
                node.end(files, one)
            network.make(files)
            _make_folders(files)
        with ThreadPoolExecutor(len(NODES) + 1) as pool:
            nodes = [pool.submit(_prepare, files, programs, archives, one) for one in missing]
            manager = pool.submit(_control_plane, files, programs, api)
            started = manager.result()
            for future in nodes:
                future.result()
        _join(files, programs, api, missing)
        if started is not None:
            control_plane.wait_for_accounts(api, started)
        load_images(files, programs, archives)
        say(f"cluster {files.name} is up: {time.monotonic() - begin:.1f} s")


def load_images(files: ClusterFiles, programs: Programs, archives: list[Path]) -> None:
    """Nothing; the archives' images are in every node, which is up."""
    with _stage("images of all nodes"), ThreadPoolExecutor(len(NODES)) as pool:
        for future in [pool.submit(import_images, files, programs, one, archives) for one in NODES]:
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


def _prepare(files: ClusterFiles, programs: Programs, archives: list[Path], one: Node) -> None:
    with _stage(f"containerd of {one.name}"):
        node.prepare(files, programs, one)
    with _stage(f"images of {one.name}"):
        import_images(files, programs, one, archives)


def _join(files: ClusterFiles, programs: Programs, api: Api, missing: list[Node]) -> None:
    with _stage("nodes Ready"):
        since = node.now()
        kubelets = [(one, node.join(files, programs, one)) for one in missing]
        for one, kubelet in kubelets:
            node.wait_ready(api, one, kubelet, since)


def _make_folders(files: ClusterFiles) -> None:
    """Mount points that the nodes need and the machine lacks. Noted before they are made: an interrupted run leaves none."""
    with locked(files.made_folders.with_name("made-folders.lock")):
        for folder in map(Path, PRIVATE_FOLDERS):
            absent = [x for x in (folder, *folder.parents) if not x.exists()]
            with files.made_folders.open("a") as notes:
                notes.writelines(f"{x}\n" for x in absent)
            folder.mkdir(parents=True, exist_ok=True)


def _remove_folders(files: ClusterFiles) -> None:
    """Removing a folder would unmount what another cluster has there, in its own namespaces, so the last one down does it."""
    with locked(files.made_folders.with_name("made-folders.lock")):
        if mounts_below(files.root.parent) or not files.made_folders.exists():
            return
        for made in files.made_folders.read_text().splitlines():
            if os.path.isdir(made) and not os.listdir(made):
                os.rmdir(made)
        files.made_folders.unlink()


def down(files: ClusterFiles) -> None:
    """Nothing; nothing of the cluster is left but keys, logs and image stores. Safe after anything."""
    with locked(files.lock):
        begin = time.monotonic()
        _down(files)
        say(f"cluster {files.name} is down: {time.monotonic() - begin:.1f} s")


def _down(files: ClusterFiles) -> None:
    for one in reversed(NODES):
        node.end(files, one)
    _end_processes(files)
    for one in reversed(NODES):
        namespaces.remove(files.netns(one))
    _unmount_below(files.root)
    control_plane.forget(files)
    for one in NODES:
        shutil.rmtree(files.node(one), ignore_errors=True)
    _remove_folders(files)


def _end_processes(files: ClusterFiles) -> None:
    limit = time.monotonic() + END_LIMIT_S
    while found := [process for one in NODES for process in namespaces.processes(files.netns(one))]:
        namespaces.kill(found)
        if time.monotonic() > limit:
            raise Failed(f"processes that cannot be killed: {', '.join(f'{x.pid} {x.name}' for x in found)}")
        time.sleep(0.02)


def mounts_below(root: Path) -> list[str]:
    """The mount points below a folder, last mounted first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in reversed(points) if Path(point).is_relative_to(root)]


def _unmount_below(root: Path) -> None:
    for point in mounts_below(root):
        output("umount", "--lazy", point)


def left(files: ClusterFiles) -> list[str]:
    """What of the cluster exists on the machine besides its kept files: processes, mounts, cgroups, data, folders."""
    found = [f"process {x.pid} {x.name}" for one in NODES for x in namespaces.processes(files.netns(one))]
    found += [f"mount {x}" for x in mounts_below(files.root)]
    found += [f"cgroup {x}" for one in NODES for x in node.cgroups_left(files.cgroup(one))]
    paths = [
        *files.etcd_folders(),
        files.run,
        *(files.node(x) for x in NODES),
        *(files.netns(x) for x in NODES),
    ]
    return found + [f"file {x}" for x in paths if x.exists()]
