"""Reads what the images contain: the pinned requirements, and the Debian packages of the base layer."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from packaging.markers import Marker

PLATFORM = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11", "python_full_version": "3.11.2"}
"""Of the images; requirements of other platforms are not installed."""
_PIN = re.compile(
    r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>[^\s;\\]+)(?: ; (?P<marker>[^\\\n]+?))?"
    r"(?P<hashes>(?: \\\n +--hash=sha256:[0-9a-f]{64})+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Pin:
    """A Python package, with the SHA-256 of each file that an index may have for this version."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def purl(self) -> str:
        """The package URL."""
        return f"pkg:pypi/{self.name}@{quote(self.version, safe='')}"


@dataclass(frozen=True, slots=True)
class Deb:
    """A Debian package."""

    name: str
    version: str
    architecture: str
    release: str

    @property
    def purl(self) -> str:
        """The package URL."""
        return f"pkg:deb/debian/{quote(self.name)}@{quote(self.version)}?arch={self.architecture}&distro={self.release}"


def pins_of(requirements: Path) -> list[Pin]:
    """Returns the packages that an image installs from a requirements file. Raises ValueError for one without a hash."""
    text = requirements.read_text()
    found = [*_PIN.finditer(text)]
    lines = [line for line in text.splitlines() if line[:1].isalnum()]
    if len(found) < len(lines):
        raise ValueError(f"{requirements}: {len(lines) - len(found)} requirements are not NAME==VERSION with hashes")
    return [
        Pin(match["name"], match["version"], tuple(re.findall(r"sha256:([0-9a-f]+)", match["hashes"])))
        for match in found
        if match["marker"] is None or Marker(match["marker"]).evaluate(PLATFORM)
    ]


def debs_of(files: Iterable[str], release: str) -> list[Deb]:
    """Returns the packages with these file names, as apt writes them: NAME_VERSION_ARCHITECTURE.deb. `release`: Debian's name."""
    parts = [unquote(file.strip().removesuffix(".deb")).split("_") for file in files if file.strip()]
    return [Deb(name, version, architecture, release) for name, version, architecture in parts]
