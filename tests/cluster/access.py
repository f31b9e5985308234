"""The cluster of this machine or of the current kubeconfig."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from images import build
from images.steps import ROOT
from tests.cluster import claims, images, lifecycle, namespaces, network, node
from tests.cluster.config import NODES, ClusterFiles, cluster_files, node_named
from tests.cluster.programs import installed
from tools.errors import Failed, Missing
from tools.shell import output

KUBECTL_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    kubeconfig: Path | None
    kubectl_program: str
    image_prefix: str
    site_packages: Path | None
    """Mounted with torch; absent if the images contain it."""
    files: ClusterFiles | None
    """Absent for the cluster of the kubeconfig."""

    def environment(self) -> dict[str, str]:
        """Returns the environment of a client program."""
        environment = dict(os.environ)
        if self.kubeconfig is not None:
            environment["KUBECONFIG"] = str(self.kubeconfig)
            environment["PATH"] = f"{Path(self.kubectl_program).parent}:{environment.get('PATH', '/usr/bin:/bin')}"
        return environment

    def command(self, *words: str) -> list[str]:
        """Returns the command that runs a program in the cluster's network, with `environment()`."""
        if self.files is None or namespaces.is_inside(self.files.netns(NODES[0])):
            return list(words)
        return ["nsenter", f"--net={self.files.netns(NODES[0])}", *words]

    def run(self, *words: str, stdin: str | None = None, limit_s: float = KUBECTL_LIMIT_S) -> str:
        """Returns the standard output. Raises Failed, also after `limit_s`."""
        command = self.command(*words)
        try:
            completed = subprocess.run(
                command, input=stdin, capture_output=True, text=True, env=self.environment(), timeout=limit_s, errors="replace"
            )
        except subprocess.TimeoutExpired as late:
            raise Failed(f"{' '.join(words)[:300]}: not within {limit_s:.0f} s") from late
        if completed.returncode != 0:
            message = completed.stderr.strip() or completed.stdout.strip()
            raise Failed(f"{' '.join(words)[:300]}: exit status {completed.returncode}: {message}")
        return completed.stdout

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """Returns the standard output of kubectl. Raises Failed."""
        return self.run(self.kubectl_program, *args, stdin=stdin)

    def image(self, program: str) -> str:
        """Returns the image name of the operator, router or runtime."""
        return f"{self.image_prefix}/phalanx-{program}:dev"

    def load_image(self, archive: Path) -> None:
        """Loads an archive into every node. Raises Failed for the cluster of the kubeconfig."""
        lifecycle.load_images(self._local_files("load_image"), installed(), [archive])

    def retagged(self, program: str, tag: str) -> str:
        """Tags an image on every node and returns its name. Raises Failed for the cluster of the kubeconfig."""
        files, name = self._local_files("retagged"), f"{self.image_prefix}/phalanx-{program}:{tag}"
        for target in NODES:
            images.tag_image(files, installed(), target, self.image(program), name)
        return name

    def claim(self, namespace: str, name: str, folder: Path, access: str = "ReadOnlyMany") -> None:
        """Creates a claim on a folder that exists on every node."""
        volume = claims.volume_name(namespace, name)
        phase = self.kubectl("get", "persistentvolume", volume, "-o", "jsonpath={.status.phase}", "--ignore-not-found")
        if phase in ("Released", "Failed"):  # of an earlier namespace
            self.kubectl("delete", "persistentvolume", volume)
        objects = {"apiVersion": "v1", "kind": "List", "items": claims.claim_on(namespace, name, folder, access)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(objects))

    def claim_site_packages(self, namespace: str) -> None:
        """Creates the claim that `with_site_packages` mounts."""
        if self.site_packages is not None:
            self.claim(namespace, claims.SITE_PACKAGES_CLAIM, self.site_packages)

    def with_site_packages(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Mounts torch into an InferenceService, unless the images contain it."""
        return manifest if self.site_packages is None else claims.with_site_packages(manifest)

    def cut(self) -> None:
        """Disconnects the second node."""
        network.cut(self._local_files("cut"))

    def rejoin(self) -> None:
        """Reconnects the second node."""
        network.rejoin(self._local_files("rejoin"))

    @contextmanager
    def separated(self, *names: str) -> Iterator[None]:
        """Separates nodes, without their pods, from the API server until the block ends."""
        files, programs = self._local_files("separated"), installed()
        nodes = [node_named(name) for name in names]
        for target in nodes:
            network.separate(files, programs, target)
        try:
            yield
        finally:
            for target in nodes:
                network.unite(files, programs, target)

    def kill_node(self, name: str) -> None:
        """Kills a node with all its pods. `repair` starts it again."""
        files = self._local_files("kill_node")
        pid = node.init_pid(files, node_named(name))
        if pid is None:
            raise Failed(f"{name} is not up")
        namespaces.kill([namespaces.Process(pid, name)])

    def repair(self) -> None:
        """Starts everything that does not run, in another session."""
        self._local_files("repair")
        output(sys.executable, "-m", "tests.cluster", "up", cwd=ROOT)

    def _local_files(self, method: str) -> ClusterFiles:
        if self.files is None:
            raise Failed(f"{method}: not for the cluster of the current kubeconfig")
        return self.files


def local_cluster() -> Cluster:
    """Returns the running cluster of this machine."""
    files = cluster_files()
    programs = installed()
    return Cluster(files.kubeconfig, str(programs.kubectl), build.PREFIX, build.site_packages(), files)


def current_cluster() -> Cluster:
    """Returns the cluster of the current kubeconfig. Raises Missing without kubectl or $IMAGE_PREFIX."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise Missing("kubectl on PATH (CLUSTER=current)")
    prefix = os.environ.get("IMAGE_PREFIX", "")
    if not prefix:
        raise Missing(
            "IMAGE_PREFIX (CLUSTER=current): the registry path that holds phalanx-operator:dev, -router:dev, -runtime:dev"
        )
    # images of that prefix were loaded from our archives, without torch
    site_packages = build.site_packages() if prefix == build.PREFIX else None
    return Cluster(None, kubectl, prefix, site_packages, None)
