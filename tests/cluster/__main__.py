"""`python3 -m tests.cluster COMMAND`, in the root of the checkout."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from images import build
from tests.cluster import lifecycle, machine, namespaces, network, node
from tests.cluster.config import NODES, ClusterFiles, cluster_files, node_named
from tests.cluster.foreign import crds
from tests.cluster.programs import Programs, helm, installed
from tools.errors import Failed, Missing

USAGE = """usage: python3 -m tests.cluster COMMAND

  tools            builds or downloads every program, once
  helm             builds helm, once, and prints its path
  crds             downloads the CRDs of other projects, once, and prints their folder
  up [--images]    starts the cluster or its missing parts; with the images of this checkout
  images           builds the images of this checkout and loads them into the running cluster
  down             stops the cluster; keeps keys, logs and image stores
  status           lists the running processes
  kubectl ARGS..   runs kubectl as the administrator
  run CMD..        runs a program in the cluster's network with KUBECONFIG; starts the cluster if it is down
  cut, rejoin      disconnects the second node, and connects it again
  nodekill NODE    kills a node; `up` starts it again

State: ${PHALANX_CACHE:-~/.cache/phalanx}/clusters/$PHALANX_CLUSTER (default phalanx).
"""
ALTERNATIVES = "CLUSTER=current uses the cluster of your kubeconfig, CLUSTER=none skips tests that need one."
EXIT_MISSING = 3


def _up(files: ClusterFiles, words: list[str]) -> Programs:
    if words not in ([], ["--images"]):
        raise Failed(f"up: unknown argument {' '.join(words)}: expected --images or nothing")
    machine.check()
    programs = installed()
    archives = _built() if words else []
    lifecycle.up(files, programs, [programs.images, *archives])
    return programs


def _built() -> list[Path]:
    """Builds the images of this checkout, and site-packages: the cluster's network has no downloads."""
    build.site_packages()
    return build.archives()


def _images(files: ClusterFiles) -> int:
    lifecycle.load_images(files, installed(), _built())
    return 0


def environment(files: ClusterFiles, programs: Programs) -> dict[str, str]:
    """Returns the environment of a program in the cluster, with `kubectl` and our plugin on its PATH."""
    path = f"{programs.kubernetes}:{Path(__file__).parent / 'bin'}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    return {**os.environ, "KUBECONFIG": str(files.kubeconfig), "PATH": path}


def _enter(files: ClusterFiles) -> list[str]:
    netns = files.netns(NODES[0])
    if not namespaces.exists(netns):
        raise Failed("the cluster is down: python3 -m tests.cluster up")
    return [] if namespaces.is_inside(netns) else ["nsenter", f"--net={netns}"]


def _run(files: ClusterFiles, words: list[str]) -> int:
    if not words:
        raise Failed("run: which program?")
    was_up = lifecycle.is_up(files)
    programs = installed() if was_up else _up(files, ["--images"])
    command, env = [*_enter(files), *words], environment(files, programs)
    if was_up:
        os.execvpe(command[0], command, env)
    try:
        return subprocess.run(command, env=env).returncode
    finally:
        lifecycle.down(files)


def _kubectl(files: ClusterFiles, words: list[str]) -> int:
    programs = installed()
    command = [*_enter(files), str(programs.kubectl), *words]
    os.execvpe(command[0], command, environment(files, programs))


def _status(files: ClusterFiles) -> int:
    for target in NODES:
        for process in sorted(namespaces.processes(files.netns(target)), key=lambda x: x.pid):
            if process.name not in ("nsenter", "unshare"):
                print(f"{target.name:6} {process.name:24} pid {process.pid}")
    is_up = lifecycle.is_up(files)
    print(f"cluster {files.name}: {'up' if is_up else 'not up'}, files in {files.root}")
    return 0 if is_up else 1


def _nodekill(files: ClusterFiles, words: list[str]) -> int:
    target = node_named(words[0] if words else "")
    pid = node.init_pid(files, target)
    if pid is None:
        raise Failed(f"{target.name} is not up")
    namespaces.kill([namespaces.Process(pid, target.name)])
    return 0


def _succeed(action: Callable[[], object]) -> int:
    action()
    return 0


def main(words: list[str]) -> int:
    """Returns the exit status: 0, 1 after a failure, 2 for a usage error, 3 if the machine lacks something."""
    files = cluster_files()
    namespaces.leave(files.netns(NODES[0]))
    command, rest = (words[0], words[1:]) if words else ("", [])
    commands: dict[str, Callable[[], int]] = {
        "tools": lambda: _succeed(installed),
        "crds": lambda: _succeed(lambda: print(crds())),
        "helm": lambda: _succeed(lambda: print(helm())),
        "up": lambda: _succeed(lambda: _up(files, rest)),
        "images": lambda: _images(files),
        "down": lambda: _succeed(lambda: lifecycle.down(files)),
        "status": lambda: _status(files),
        "kubectl": lambda: _kubectl(files, rest),
        "run": lambda: _run(files, rest),
        "cut": lambda: _succeed(lambda: network.cut(files)),
        "rejoin": lambda: _succeed(lambda: network.rejoin(files)),
        "nodekill": lambda: _nodekill(files, rest),
    }
    if command not in commands:
        print(USAGE, file=sys.stderr)
        return 2
    return commands[command]()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Missing as missing:
        print(f"missing: {missing}. {ALTERNATIVES}", file=sys.stderr)
        sys.exit(EXIT_MISSING)
    except Failed as failed:
        print(f"failed: {failed}", file=sys.stderr)
        sys.exit(1)
