"""Unpacks Debian packages into a folder without installing them.

apt-get downloads the packages and checks signatures, `dpkg -x` unpacks them; dependencies come from apt's lists.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.errors import Failed, Missing
from tools.shell import output, progress

QUIET = ("--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks", "--no-replaces", "--no-enhances")
# Needed only by installation scripts, which dpkg -x does not run.
INSTALLERS = frozenset({"debconf", "dpkg", "cdebconf", "debianutils", "init-system-helpers", "install-info", "perl-base", "tar"})


def release() -> str:
    """Returns Debian's name of this release and architecture, such as bookworm-amd64. Raises Missing elsewhere."""
    for program in ("apt-get", "apt-cache", "dpkg"):
        if shutil.which(program) is None:
            raise Missing(f"Debian's {program} (packages for the cluster come from Debian)")
    fields = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return f"{fields.get('VERSION_CODENAME', 'debian').strip(chr(34))}-{output('dpkg', '--print-architecture').strip()}"


def first_choices(listing: str) -> set[str]:
    """Returns the packages in the output of `apt-cache depends`: the first of alternatives (a | b), no virtual packages."""
    found = set()
    alternative = False  # the previous line has this one as its alternative
    for line in listing.splitlines():
        relation, colon, name = line.strip().partition(": ")
        if not colon:
            continue
        name = name.strip()
        if not alternative and relation.lstrip("|") in ("Depends", "PreDepends") and not name.startswith("<"):
            found.add(name.partition(":")[0])
        alternative = relation.startswith("|")
    return found


def closure(names: Iterable[str], follow: Callable[[str], bool]) -> list[str]:
    """Returns the packages with their transitive dependencies for which `follow` is true, sorted."""
    known: set[str] = set()
    new = set(names)
    while new:
        known |= new
        listed = output("apt-cache", "depends", *QUIET, *sorted(new))
        new = {name for name in first_choices(listed) if follow(name)} - known
    return sorted(known)


def unpack(names: Iterable[str], into: Path, follow: Callable[[str], bool]) -> list[str]:
    """Downloads the packages with their dependencies, unpacks them into `into`, and returns their file names."""
    debs = into.with_name(into.name + ".debs")
    shutil.rmtree(debs, ignore_errors=True)
    debs.mkdir(parents=True)
    try:
        packages = closure(names, follow)
        fetch(packages, debs)
    except Failed:
        if os.geteuid() != 0:
            raise
        with progress("fetching Debian's package lists (apt-get update)"):
            output("apt-get", "update", "-qq")
        packages = closure(names, follow)
        fetch(packages, debs)
    into.mkdir(parents=True, exist_ok=True)
    files = sorted(debs.glob("*.deb"))
    for deb in files:
        output("dpkg", "-x", deb, into)
    shutil.rmtree(debs)
    return [deb.name for deb in files]


def fetch(packages: list[str], folder: Path) -> None:
    """Downloads the packages into `folder`. Raises Failed."""
    patience = ("-o", "Acquire::Retries=2", "-o", "Acquire::http::Timeout=30", "-o", "Acquire::https::Timeout=30")
    with progress(f"fetching {len(packages)} Debian packages: {', '.join(packages)[:100]}"):
        output("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *patience, *packages, cwd=folder)


def install_commands(commands: dict[str, str]) -> None:
    """Installs missing commands. `commands`: package by command. Raises Missing without root."""
    absent = sorted({package for command, package in commands.items() if shutil.which(command) is None})
    if absent:
        install_packages(*absent)


def install_packages(*packages: str) -> None:
    """Installs Debian packages on the machine. Raises Missing without root or apt-get."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Missing(f"the Debian packages {' '.join(packages)} (apt-get install {' '.join(packages)})")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages)
    with progress(f"installing {' '.join(packages)}"):
        try:
            output(*install, env=quiet)
        except Failed:
            output("apt-get", "update", "-qq")
            output(*install, env=quiet)
