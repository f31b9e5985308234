"""Programs of the cluster, cached: Kubernetes and CoreDNS from the Go module proxy, others from unpacked Debian packages."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from images.archive import Image, write_archive, write_layer
from tests.cluster.config import BUSYBOX_IMAGE, PAUSE_IMAGE
from tools import debian
from tools.cache import cache_root, finished, key_of, key_of_folder
from tools.errors import Missing
from tools.shell import logged, output

MODULES = Path(__file__).parent / "tools"
KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
PACKAGES = ("etcd-server", "containerd", "runc", "containernetworking-plugins", "iptables", "busybox-static")
GO_VERSION = (1, 21)  # the first that downloads the toolchain of a go.mod
# independent of the user's settings
GO_ENV = {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"}
RECIPE = "1"  # part of the cache keys: increment when a step below changes


@dataclass(frozen=True, slots=True)
class Programs:
    """Paths of the programs."""

    kubernetes: Path
    coredns: Path
    pause: Path
    debian: Path
    images: Path
    """Archive of the pause and busybox images."""

    def kube(self, name: str) -> Path:
        """Returns a Kubernetes program."""
        return self.kubernetes / name

    @property
    def kubectl(self) -> Path:
        """The client of the same build."""
        return self.kubernetes / "kubectl"

    @property
    def bin(self) -> Path:
        """Programs of Debian packages, with iptables under its plain name."""
        return self.debian / "bin"

    @property
    def cni(self) -> Path:
        """The CNI plugins."""
        return self.debian / "root/usr/lib/cni"

    def environment(self) -> dict[str, str]:
        """Returns the search paths of programs from Debian packages."""
        (libraries,) = (self.debian / "root/usr/lib").glob("*-linux-gnu")
        return {
            "PATH": f"{self.bin}:{os.environ.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}",
            "LD_LIBRARY_PATH": str(libraries),
            "XTABLES_LIBDIR": str(libraries / "xtables"),
        }


def installed() -> Programs:
    """Returns all programs. The first build takes ten minutes on two cores."""
    kubernetes = _kubernetes()
    coredns = _go_program("coredns", "CoreDNS")
    pause = _go_program("pause", "pause")
    unpacked = finished(cache_root() / f"debian-{debian.release()}-{key_of(RECIPE, *PACKAGES)}", _debian)
    archive = finished(
        cache_root() / f"base-images-{key_of(RECIPE, pause.parent.name, unpacked.name)}",
        lambda folder: _images(folder, pause, unpacked),
    )
    return Programs(kubernetes, coredns, pause, unpacked, archive / "base.tar")


def helm() -> Path:
    """Returns Helm, built once."""
    return _go_program("helm", "Helm (minutes the first time)", "helm.sh/helm/v4/cmd/helm")


def go() -> str:
    """Returns Go. Raises Missing without Go of a supported version."""
    program = shutil.which("go")
    version = re.search(r"go(\d+)\.(\d+)", output(program, "version")) if program else None
    if program is None or version is None or (int(version[1]), int(version[2])) < GO_VERSION:
        raise Missing("Go 1.21 or newer on PATH (Kubernetes is built from source)")
    return program


def _build(module: str, title: str, folder: Path, flags: list[str], target: str) -> None:
    command = [
        go(),
        "build",
        "-v",
        "-mod=readonly",
        "-trimpath",
        "-ldflags",
        " ".join(["-s", "-w", *flags]),
        "-o",
        f"{folder}/",
        target,
    ]
    log = cache_root() / "logs" / f"build-{module}.log"
    logged(f"building {title}", *command, log=log, cwd=MODULES / module, env=GO_ENV)


def _kubernetes() -> Path:
    module = MODULES / "kubernetes"
    pinned = re.search(r"k8s\.io/kubernetes v([\d.]+)", (module / "go.mod").read_text())
    assert pinned is not None
    version = pinned[1]
    major, minor, _ = version.split(".")
    about = "k8s.io/component-base/version"  # otherwise servers report v0.0.0-master, which breaks version checks
    flags = [f"-X {about}.gitVersion=v{version}", f"-X {about}.gitMajor={major}", f"-X {about}.gitMinor={minor}"]
    flags.append(f"-X {about}.gitTreeState=clean")
    folder = (
        cache_root()
        / f"kubernetes-{version}-{key_of(RECIPE, (module / 'go.mod').read_bytes(), (module / 'go.sum').read_bytes())}"
    )
    title = f"Kubernetes {version} (ten minutes and 5 GB the first time)"
    return finished(folder, lambda part: _build("kubernetes", title, part, flags, "tool"))


def _go_program(module: str, title: str, target: str = ".") -> Path:
    folder = cache_root() / f"{module}-{key_of(RECIPE, key_of_folder(MODULES / module))}"
    return finished(folder, lambda part: _build(module, title, part, [], target)) / module


def _debian(folder: Path) -> None:
    root = folder / "root"
    # libraries except the C library, without package managers
    names = debian.unpack(PACKAGES, root, lambda name: name.startswith("lib") and name not in ("libc6", "libpam0g"))
    (folder / "packages.txt").write_text("\n".join(names) + "\n")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("containerd", "containerd-shim-runc-v2", "ctr", "etcd"):
        (programs / name).symlink_to(f"../root/usr/bin/{name}")
    (runc,) = [path for path in (root / "usr/bin/runc", root / "usr/sbin/runc") if path.is_file() and not path.is_symlink()]
    (programs / "runc").symlink_to(os.path.relpath(runc, programs))
    for family in ("iptables", "ip6tables"):
        for tool in ("", "-save", "-restore"):
            (programs / f"{family}{tool}").symlink_to("../root/usr/sbin/xtables-nft-multi")


def _images(folder: Path, pause: Path, unpacked: Path) -> None:
    root = folder / "pause"
    root.mkdir()
    shutil.copy(pause, root / "pause")
    pause_layer = write_layer(root, folder / "pause.layer")
    root = folder / "busybox"
    for name in ("bin", "etc", "proc", "sys", "dev", "run", "srv", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    busybox = root / "bin/busybox"
    (source,) = [path for path in (unpacked / "root/bin/busybox", unpacked / "root/usr/bin/busybox") if path.is_file()]
    shutil.copy(source, busybox)
    for name in output(busybox, "--list").split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnonroot:x:65532:65532:nonroot:/tmp:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nnonroot:x:65532:\n")
    busybox_layer = write_layer(root, folder / "busybox.layer")
    images = [
        Image(PAUSE_IMAGE, (pause_layer,), entrypoint=("/pause",)),
        Image(BUSYBOX_IMAGE, (busybox_layer,), command=("sh",)),
    ]
    write_archive(folder / "base.tar", images)
