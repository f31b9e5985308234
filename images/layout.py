"""What the images hold: which packages, which paths, which user, what a container runs. Pure data.

The Dockerfiles and the archives of the test cluster are filled by the same steps (`images.steps`) from this; a test compares
every path and user in the Dockerfiles with it.
"""

from dataclasses import dataclass

USER = 65532
"""Nobody's number on a machine; the group has the same."""
DEBIAN_PACKAGES = ("python3", "libstdc++6", "ca-certificates", "tini")
"""What the base layer is made of, besides what these need. There is no shell among them."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
FIRST = ("/usr/bin/tini", "--")
"""What a container begins with. Linux lets the first process of a container hear only signals that it asked for, and Python takes
a moment before it can ask: who is told to end in that moment would stay for all of its grace. This one passes every signal on."""
WRITABLE = ("/tmp", "/var/cache/phalanx")
"""Where a program may write; manifests mount a volume there, for the root file system is read-only."""
ENV = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "SSL_CERT_FILE": CERTIFICATES,
}


@dataclass(frozen=True, slots=True)
class Program:
    """One image: its packages (folder of the checkout and import name), its pinned requirements, its ports.

    native: the folder whose C++ is compiled when the image is built, in a layer of its own.
    """

    name: str
    packages: tuple[str, ...]
    requirements: str
    ports: tuple[int, ...]
    native: str = ""

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
        """What a container runs."""
        return (*FIRST, self.path)

    @property
    def module(self) -> str:
        """The package whose __main__ the console command runs."""
        return f"phalanx_{self.name}"


API = "crds/phalanx_api"
FRONTEND = "runtime/phalanx_frontend"
KERNELS = "runtime/phalanx_runtime/model/native"
PROGRAMS = {
    program.name: program
    for program in (
        Program("operator", (API, "operator/phalanx_operator"), "requirements/operator.txt", (8080,)),
        Program("router", (API, FRONTEND, "runtime/phalanx_router"), "requirements/router.txt", (8000,)),
        Program("runtime", (API, FRONTEND, "runtime/phalanx_runtime"), "requirements/runtime.txt", (8000, 8100), KERNELS),
    )
}
TEST_REQUIREMENTS = {**{name: program.requirements for name, program in PROGRAMS.items()}, "runtime": "requirements/router.txt"}
"""In the test cluster the runtime's image carries no torch: that comes from a read-only volume of the machine's."""


def image_name(prefix: str, program: str) -> str:
    """The full name of a program's image below a registry prefix."""
    return f"{prefix}/phalanx-{program}:dev"
