"""Licences of all Python packages in the images, as SPDX expressions, and of the Debian packages of the base layer.

    python -m images.licences           prints package, version and licences
    python -m images.licences write     writes requirements/licences.txt from the metadata of the installed packages

`requirements/licences.txt` is committed, so that bills of materials need no installed packages. A test compares both, and fails
for a licence of a Python package that is not in `ALLOWED`. Licences of Debian packages are read from the base layer, which is
built if it is not in the cache, and are listed as `images.copyrights` finds them.
"""

import importlib.metadata
import re
import sys
from collections.abc import Mapping

from images import build
from images.copyrights import debian_licences, licence_lines
from images.layout import PROGRAMS
from images.pins import Pin, debs_of, pins_of
from images.steps import ROOT
from tools import debian
from tools.errors import Failed, Missing

FILE = ROOT / "requirements/licences.txt"
ALLOWED = frozenset(
    {
        *(
            "0BSD",
            "Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
            "BSD-2-Clause",
            "BSD-3-Clause",
            "BSL-1.0",
            "CC0-1.0",
            "CNRI-Python",
        ),
        *("ISC", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib", "LicenseRef-NVIDIA-Proprietary"),
    }
)
"""Licences that an image may contain. NVIDIA's terms allow distribution with an application, and apply to users of the image."""
_SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
    "NVIDIA Proprietary Software": "LicenseRef-NVIDIA-Proprietary",
}
"""SPDX expressions of names that packages use."""
_STATED = {"cuda-toolkit": "LicenseRef-NVIDIA-Proprietary"}
"""Of packages whose metadata have none: this one has no content of its own and only depends on others of NVIDIA."""


def image_pins() -> Mapping[str, Pin]:
    """Returns the packages of all images by name."""
    return {pin.name: pin for program in PROGRAMS.values() for pin in pins_of(ROOT / program.requirements)}


def installed_licence(name: str) -> str:
    """Returns the licence in the metadata of an installed package; empty if it states none. Raises PackageNotFoundError."""
    metadata = importlib.metadata.distribution(name).metadata
    classifiers = [value.rpartition(" :: ")[2] for value in metadata.get_all("Classifier") or [] if value.startswith("License")]
    named = [value for field in ("License-Expression", "License") for value in metadata.get_all(field) or [] if value]
    stated = [*named, *classifiers, ""][0].strip()
    return _STATED.get(name) or _SPDX.get(stated, stated)


def read_licences() -> dict[str, str]:
    """Returns the licence of each package, as committed."""
    return dict(line.split(" ", 1) for line in FILE.read_text().splitlines() if line and not line.startswith("#"))


def refused(expression: str) -> list[str]:
    """Returns the licences of an expression that are not allowed. Of alternatives one is enough."""
    parts = [part.strip("() ") for part in re.split(r" AND ", expression)]
    return [part for part in parts if not any(choice.strip("() ") in ALLOWED for choice in part.split(" OR "))]


def _debian_lines() -> list[str]:
    """Returns a line for each Debian package; on a machine that cannot build the base layer, one that says so."""
    try:
        base, release = build.base(), debian.release().partition("-")[0]
    except (Missing, Failed) as error:
        return [f"Debian packages are not listed: the base layer cannot be built here: {error}"]
    debs = debs_of((base / "packages.txt").read_text().splitlines(), release)
    return licence_lines(debs, debian_licences(base / "root", debs))


def main(words: list[str]) -> int:
    """Returns the exit status: 1 if a licence is not allowed."""
    pins = image_pins()
    if words == ["write"]:
        lines = [f"{name} {installed_licence(name)}" for name in sorted(pins)]
        FILE.write_text("# Written by python -m images.licences write\n" + "\n".join(lines) + "\n")
    licences = read_licences()
    for name, pin in sorted(pins.items()):
        print(f"{name:40} {pin.version:16} {licences.get(name, '')}")
    print("\n".join(_debian_lines()))
    bad = [f"{name}: {', '.join(refused(licences.get(name, '')))}" for name in sorted(pins) if refused(licences.get(name, ""))]
    print("\n".join(f"not allowed: {line}" for line in bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
