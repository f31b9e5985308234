"""A cluster as tests and the demo use it: ours of this machine, or that of the current kubeconfig."""

import json
import os
import shutil
import subprocess
import sys
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
    """A cluster that runs. `files` is None for one that is not ours; `site_packages` where images carry torch themselves."""

    kubeconfig: Path | None
    kubectl_program: str
    image_prefix: str
    site_packages: Path | None
    files: ClusterFiles | None

    def environment(self) -> dict[str, str]:
        """The environment of a program that speaks to the cluster."""
        found = dict(os.environ)
        if self.kubeconfig is not None:
            found["KUBECONFIG"] = str(self.kubeconfig)
            found["PATH"] = f"{Path(self.kubectl_program).parent}:{found.get('PATH', '/usr/bin:/bin')}"
        return found

    def command(self, *words: str) -> list[str]:
        """The words of a program that runs where the cluster's addresses are reachable; start it with `environment()`."""
        if self.files is None or namespaces.is_inside(self.files.netns(NODES[0])):
            return list(words)
        return ["nsenter", f"--net={self.files.netns(NODES[0])}", *words]

    def run(self, *words: str, stdin: str | None = None, limit_s: float = KUBECTL_LIMIT_S) -> str:
        """What the program wrote to stdout. Raises Failed with its stderr, or when the limit passes."""
        command = self.command(*words)
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, env=self.environment(), timeout=limit_s, errors="replace"
            )
        except subprocess.TimeoutExpired as late:
            raise Failed(f"{' '.join(words)[:300]}: not within {limit_s:.0f} s") from late
        if done.returncode != 0:
            raise Failed(f"{' '.join(words)[:300]}: exit status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """What kubectl wrote to stdout. Raises Failed with its message."""
        return self.run(self.kubectl_program, *args, stdin=stdin)

    def image(self, program: str) -> str:
        """The full name of one of our images: operator, router or runtime."""
        return f"{self.image_prefix}/phalanx-{program}:dev"

    def load_image(self, archive: Path) -> None:
        """Nothing; the archive's images are in every node. Raises Failed for a cluster that is not ours."""
        lifecycle.load_images(self._ours("load_image"), installed(), [archive])

    def retagged(self, program: str, tag: str) -> str:
        """The full name of one of our images under another tag, by which all nodes have it. Raises Failed like load_image."""
        files, name = self._ours("retagged"), f"{self.image_prefix}/phalanx-{program}:{tag}"
        for one in NODES:
            images.tag_image(files, installed(), one, self.image(program), name)
        return name

    def claim(self, namespace: str, name: str, folder: Path, access: str = "ReadOnlyMany") -> None:
        """Nothing; the namespace has a claim of that name on a folder that every node sees at its path."""
        volume = claims.volume_name(namespace, name)
        found = self.kubectl("get", "persistentvolume", volume, "-o", "jsonpath={.status.phase}", "--ignore-not-found")
        if found in ("Released", "Failed"):  # its claim went with an earlier namespace of this name
            self.kubectl("delete", "persistentvolume", volume)
        objects = {"apiVersion": "v1", "kind": "List", "items": claims.claim_on(namespace, name, folder, access)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(objects))

    def claim_site_packages(self, namespace: str) -> None:
        """Nothing; the namespace has the claim that `with_site_packages` mounts, where it mounts one."""
        if self.site_packages is not None:
            self.claim(namespace, claims.SITE_PACKAGES_CLAIM, self.site_packages)

    def with_site_packages(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """The InferenceService as it runs here: with torch from the claim, unless the images carry it."""
        return manifest if self.site_packages is None else claims.with_site_packages(manifest)

    def cut(self) -> None:
        """Nothing; parts the second node from the rest."""
        network.cut(self._ours("cut"))

    def mend(self) -> None:
        """Nothing; joins the second node again."""
        network.mend(self._ours("mend"))

    def kill_node(self, name: str) -> None:
        """Nothing; the node and all its pods are lost at once. `repair` brings it back."""
        files = self._ours("kill_node")
        pid = node.init_pid(files, node_named(name))
        if pid is None:
            raise Failed(f"{name} is not up")
        namespaces.kill([namespaces.Process(pid, name)])

    def repair(self) -> None:
        """Nothing; everything of the cluster runs again. What is started is no child of this process."""
        self._ours("repair")
        output(sys.executable, "-m", "tests.cluster", "up", cwd=ROOT)

    def _ours(self, what: str) -> ClusterFiles:
        if self.files is None:
            raise Failed(f"{what}: not for the cluster of the current kubeconfig")
        return self.files


def ours() -> Cluster:
    """The cluster of this machine, which is up."""
    files = cluster_files()
    programs = installed()
    return Cluster(files.kubeconfig, str(programs.kubectl), build.PREFIX, build.site_packages(), files)


def current() -> Cluster:
    """The cluster of the current kubeconfig. Raises Missing without kubectl or $IMAGE_PREFIX."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise Missing("kubectl on PATH (CLUSTER=current)")
    prefix = os.environ.get("IMAGE_PREFIX", "")
    if not prefix:
        raise Missing(
            "IMAGE_PREFIX (CLUSTER=current): the registry path that holds phalanx-operator:dev, -router:dev, -runtime:dev"
        )
    # Images of that name were loaded from our archive, and the runtime's carries no torch.
    site_packages = build.site_packages() if prefix == build.PREFIX else None
    return Cluster(None, kubectl, prefix, site_packages, None)
