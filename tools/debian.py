"""Debian packages unpacked into a folder: nothing is installed, no service starts, no file of the machine changes.

Packages come by apt-get, which checks their signatures, and are unpacked by dpkg -x. What else a package needs is found in
apt's own lists.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.errors import Failed, Missing
from tools.shell import output, say

QUIET = ("--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks", "--no-replaces", "--no-enhances")
# Needed only by the scripts that install a package, which dpkg -x does not run.
INSTALLERS = frozenset({"debconf", "dpkg", "cdebconf", "debianutils", "init-system-helpers", "install-info", "perl-base", "tar"})


def release() -> str:
    """Debian's name for this release and processor, such as bookworm-amd64. Raises Missing elsewhere."""
    for program in ("apt-get", "apt-cache", "dpkg"):
        if shutil.which(program) is None:
            raise Missing(f"Debian's {program} (packages for the cluster come from Debian)")
    fields = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return f"{fields.get('VERSION_CODENAME', 'debian').strip(chr(34))}-{output('dpkg', '--print-architecture').strip()}"


def first_choices(listing: str) -> set[str]:
    """The packages named by `apt-cache depends`: of alternatives (a | b) the first; virtual packages are left out."""
    found = set()
    alternative = False  # the line before offered this one as its alternative
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
    """The packages and, where follow(name) is true, what they depend on, and so on; sorted."""
    known: set[str] = set()
    new = set(names)
    while new:
        known |= new
        listed = output("apt-cache", "depends", *QUIET, *sorted(new))
        new = {name for name in first_choices(listed) if follow(name)} - known
    return sorted(known)


def unpack(names: Iterable[str], into: Path, follow: Callable[[str], bool]) -> list[str]:
    """The files of the packages that were fetched and unpacked into the folder, those that they depend on included."""
    debs = into.with_name(into.name + ".debs")
    shutil.rmtree(debs, ignore_errors=True)
    debs.mkdir(parents=True)
    try:
        packages = closure(names, follow)
        fetch(packages, debs)
    except Failed:
        if os.geteuid() != 0:
            raise
        say("fetching Debian's package lists (apt-get update) ...")
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
    """Nothing; downloads the packages into the folder. Raises Failed."""
    say(f"fetching {len(packages)} Debian packages: {', '.join(packages)[:100]} ...")
    patience = ("-o", "Acquire::Retries=2", "-o", "Acquire::http::Timeout=30", "-o", "Acquire::https::Timeout=30")
    output("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *patience, *packages, cwd=folder)


def install_commands(commands: dict[str, str]) -> None:
    """Nothing; installs the packages of those plain commands that the machine lacks. Raises Missing without root."""
    absent = sorted({package for command, package in commands.items() if shutil.which(command) is None})
    if absent:
        install_packages(*absent)


def install_packages(*packages: str) -> None:
    """Nothing; installs Debian packages on the machine. Raises Missing where that needs somebody else."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Missing(f"the Debian packages {' '.join(packages)} (apt-get install {' '.join(packages)})")
    say(f"installing {' '.join(packages)} ...")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages)
    try:
        output(*install, env=quiet)
    except Failed:
        output("apt-get", "update", "-qq")
        output(*install, env=quiet)
