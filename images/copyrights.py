"""Licences of the Debian packages in the images, by the copyright files that the base layer keeps.

A file in the machine-readable format names its licences (https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/);
other ones are texts for people.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from images.pins import Deb
from images.steps import DOCUMENTATION

_FORMAT = re.compile(r"Format(-Specification)?:\s*\S*(copyright-format|dep5)", re.IGNORECASE)
_FIELD = re.compile(r"(?P<name>[A-Za-z][A-Za-z-]*):[ \t]*(?P<value>.*)")


def debian_licences(root: Path, debs: Iterable[Deb]) -> dict[str, list[str]]:
    """Returns the licences of each package by its name; of a text for people, where it is."""
    return {deb.name: _licences_of(root, f"{DOCUMENTATION}/{deb.name}/copyright") for deb in debs}


def _licences_of(root: Path, path: str) -> list[str]:
    file = _inside(root, path)
    if file is None:
        return [f"no copyright file: /{path} is missing"]
    return named_licences(file.read_text(errors="replace")) or [f"see copyright file /{path}"]


def _inside(root: Path, path: str) -> Path | None:
    """Returns the file at a path of an image, none if it is missing there. Links of packages are relative."""
    file = (root / path).resolve()
    return file if file.is_relative_to(root.resolve()) and file.is_file() else None


def named_licences(text: str) -> list[str]:
    """Returns the short names of licences in a machine-readable file, sorted; of another text none."""
    if not any(_FORMAT.match(line) for line in text.lstrip("\ufeff \n").split("\n\n", 1)[0].splitlines()):
        return []
    found = set()
    for line in text.splitlines():
        field = _FIELD.match(line)  # the text of a licence is indented
        if field is not None and field["name"].lower() == "license" and field["value"].strip():
            found.add(" ".join(field["value"].split()))
    return sorted(found)


def licence_lines(debs: Iterable[Deb], licences: Mapping[str, list[str]]) -> list[str]:
    """Returns a line for each package: name, version and licences."""
    return [f"{deb.name:40} {deb.version:24} {'; '.join(licences[deb.name])}" for deb in debs]
