"""Contents of the images as data: packages, paths, user, command.

`images.steps` builds the Dockerfiles' layers and the archives of the test cluster from it; a test compares every path and user in
the Dockerfiles with it.
"""

from dataclasses import dataclass

USER = 65532
"""User and group id; unused on hosts."""
DEBIAN_PACKAGES = ("python3", "libstdc++6", "ca-certificates", "tini")
"""Packages of the base layer, without their dependencies. No shell."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
FIRST = ("/usr/bin/tini", "--")
"""First process of a container; it forwards signals. Linux drops signals to the first process without a handler, and Python
installs its handlers late: a SIGTERM before that would be lost, and the pod would run for its whole grace period."""
WRITABLE = ("/tmp", "/var/cache/phalanx")
"""Writable folders: manifests mount volumes there, the root file system is read-only."""
ENV = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "SSL_CERT_FILE": CERTIFICATES,
}


@dataclass(frozen=True, slots=True)
class Program:
    """One image."""

    name: str
    packages: tuple[str, ...]
    """Folders of the checkout, each the package of its last name."""
    requirements: str
    """File with its pinned requirements."""
    ports: tuple[int, ...]
    native: str = ""
    """Folder with C++ that an image build compiles into its own layer."""
    gpu_kernels: str = ""
    """Package whose folder `built` has the compiled Triton kernels, in a layer of their own."""

    @property
    def command(self) -> str:
        """The console command."""
        return f"phalanx-{self.name}"

    @property
    def path(self) -> str:
        """The path of the console command in the image."""
        return f"/usr/local/bin/{self.command}"

    @property
    def entrypoint(self) -> tuple[str, ...]:
        """The command of a container."""
        return (*FIRST, self.path)

    @property
    def module(self) -> str:
        """The package with the `__main__` of the console command."""
        return f"phalanx_{self.name}"


API = "crds/phalanx_api"
FRONTEND = "runtime/phalanx_frontend"
KERNELS = "runtime/phalanx_runtime/model/native"
GPU_KERNELS = "runtime/phalanx_runtime/model/kernels"
PROGRAMS = {
    program.name: program
    for program in (
        Program("operator", (API, "operator/phalanx_operator"), "requirements/operator.txt", (8080,)),
        Program("router", (API, FRONTEND, "runtime/phalanx_router"), "requirements/router.txt", (8000,)),
        Program(
            "runtime", (API, FRONTEND, "runtime/phalanx_runtime"), "requirements/runtime.txt", (8000, 8100), KERNELS, GPU_KERNELS
        ),
    )
}
TEST_REQUIREMENTS = {**{name: program.requirements for name, program in PROGRAMS.items()}, "runtime": "requirements/router.txt"}
"""In the test cluster the runtime image has no torch: a read-only volume of the host provides it."""


def image_name(prefix: str, program: str) -> str:
    """Returns the full name of a program's image below a registry prefix."""
    return f"{prefix}/phalanx-{program}:dev"
