"""The command line: `python3 -m tests.cluster COMMAND`, at the root of the checkout."""

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

  tools            builds or fetches every program, once
  helm             builds helm, once, and prints its path
  crds             fetches the CRDs of other projects, once, and prints their folder
  up [--images]    starts the cluster, or what is missing of it; with the images of this checkout, built where they changed
  images           builds the images of this checkout and loads them into the running cluster
  down             ends it; nothing is left but keys, logs and image stores
  status           what runs
  kubectl ARGS..   kubectl as the administrator
  run CMD..        a program in the cluster's network, KUBECONFIG set; brings the cluster up for it when it is down
  cut, mend        part the second node from the rest, and join it again
  nodekill NODE    the loss of a node; `up` brings it back

The state lies in ${PHALANX_CACHE:-~/.cache/phalanx}/clusters/$PHALANX_CLUSTER (default phalanx).
"""
OTHERWISE = "Without it: CLUSTER=current uses the cluster of your kubeconfig, CLUSTER=none runs all that needs no cluster."
EXIT_MISSING = 3


def _up(files: ClusterFiles, words: list[str]) -> Programs:
    if words not in ([], ["--images"]):
        raise Failed(f"up: unknown argument {' '.join(words)}: expected --images or nothing")
    machine.check()
    programs = installed()
    ours = _built() if words else []
    lifecycle.up(files, programs, [programs.images, *ours])
    return programs


def _built() -> list[Path]:
    """The archives of our images; torch for them lies ready too, for nothing can be fetched in the cluster's network."""
    build.site_packages()
    return build.archives()


def _images(files: ClusterFiles) -> int:
    lifecycle.load_images(files, installed(), _built())
    return 0


def environment(files: ClusterFiles, programs: Programs) -> dict[str, str]:
    """The environment of a program that is run in the cluster."""
    path = f"{programs.kubernetes}:{os.environ.get('PATH', '/usr/bin:/bin')}"
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
    for one in NODES:
        for process in sorted(namespaces.processes(files.netns(one)), key=lambda x: x.pid):
            if process.name not in ("nsenter", "unshare"):
                print(f"{one.name:6} {process.name:24} pid {process.pid}")
    is_up = lifecycle.is_up(files)
    print(f"cluster {files.name}: {'up' if is_up else 'not up'}, files in {files.root}")
    return 0 if is_up else 1


def _nodekill(files: ClusterFiles, words: list[str]) -> int:
    one = node_named(words[0] if words else "")
    pid = node.init_pid(files, one)
    if pid is None:
        raise Failed(f"{one.name} is not up")
    namespaces.kill([namespaces.Process(pid, one.name)])
    return 0


def _quietly(act: Callable[[], object]) -> int:
    act()
    return 0


def main(words: list[str]) -> int:
    """The exit status: 0, 1 for a failure that was told, 2 for a wrong command line, 3 for a machine that lacks something."""
    files = cluster_files()
    namespaces.leave(files.netns(NODES[0]))
    command, rest = (words[0], words[1:]) if words else ("", [])
    commands: dict[str, Callable[[], int]] = {
        "tools": lambda: _quietly(installed),
        "crds": lambda: _quietly(lambda: print(crds())),
        "helm": lambda: _quietly(lambda: print(helm())),
        "up": lambda: _quietly(lambda: _up(files, rest)),
        "images": lambda: _images(files),
        "down": lambda: _quietly(lambda: lifecycle.down(files)),
        "status": lambda: _status(files),
        "kubectl": lambda: _kubectl(files, rest),
        "run": lambda: _run(files, rest),
        "cut": lambda: _quietly(lambda: network.cut(files)),
        "mend": lambda: _quietly(lambda: network.mend(files)),
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
        print(f"missing: {missing}. {OTHERWISE}", file=sys.stderr)
        sys.exit(EXIT_MISSING)
    except Failed as failed:
        print(f"failed: {failed}", file=sys.stderr)
        sys.exit(1)
