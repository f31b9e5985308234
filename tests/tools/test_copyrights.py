"""Licences of the images' Debian packages, by small copyright files."""

from pathlib import Path
from typing import Any

import pytest

from images import licences, sbom
from images.copyrights import debian_licences, licence_lines, named_licences
from images.layout import PROGRAMS
from images.pins import Deb
from images.steps import DOCUMENTATION, ROOT, keep_copyrights

MACHINE_READABLE = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: one
License: MIT

Files: *
Copyright: 2020 A. Person
License: GPL-2+ with
 OpenSSL exception
 This text names no field:
 License: none

Files: debian/*
license:  MIT
License:
 text without a name

License: MIT
 Permission is hereby granted
"""
TEXT = "This package was debianized by A. Person.\n\nLicense: see the files\n"


def package(root: Path, name: str, text: str | None) -> Path:
    folder = root / DOCUMENTATION / name
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "copyright").write_text(text)
    return folder


def test_licences_are_those_of_machine_readable_files(tmp_path: Path) -> None:
    package(tmp_path, "one", MACHINE_READABLE)
    package(tmp_path, "text", TEXT)
    package(tmp_path, "none", None)
    (tmp_path / DOCUMENTATION / "linked").symlink_to("one")
    (package(tmp_path, "outside", None) / "copyright").symlink_to("/etc/passwd")
    debs = [Deb(name, "1-2", "amd64", "bookworm") for name in ("one", "text", "none", "linked", "outside")]
    found = debian_licences(tmp_path, debs)
    assert found == {
        "one": ["GPL-2+ with", "MIT"],
        "text": ["see copyright file /usr/share/doc/text/copyright"],
        "none": ["no copyright file: /usr/share/doc/none/copyright is missing"],
        "linked": ["GPL-2+ with", "MIT"],
        "outside": ["no copyright file: /usr/share/doc/outside/copyright is missing"],
    }
    assert [line.split(maxsplit=2) for line in licence_lines(debs[:1], found)] == [["one", "1-2", "GPL-2+ with; MIT"]]
    contents = sbom.Contents(PROGRAMS["router"], ROOT / "x", [], dict.fromkeys(debs, ""), "1", deb_licences=found)
    document: Any = sbom.bill_of_materials(contents, {})
    [one] = [component for component in document["components"] if component["name"] == "one"]
    assert one["licenses"] == [{"license": {"name": "GPL-2+ with"}}, {"license": {"name": "MIT"}}]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("Format: http://www.debian.org/doc/packaging-manuals/copyright-format/1.0/", ["Zlib"]),
        ("Upstream-Name: x\nFormat-Specification: http://dep.debian.net/deps/dep5", ["Zlib"]),
        ("Format: of its own", []),
        ("Upstream-Name: x\n\nFormat: http://www.debian.org/doc/packaging-manuals/copyright-format/1.0/", []),
        ("", []),
    ],
    ids=["1.0", "draft", "other", "not at the start", "none"],
)
def test_the_first_paragraph_names_the_format(start: str, expected: list[str]) -> None:
    assert named_licences(f"{start}\n\nFiles: *\nLicense: Zlib\n") == expected


def test_images_keep_copyright_files_alone(tmp_path: Path) -> None:
    folder = package(tmp_path, "one", MACHINE_READABLE)
    (folder / "changelog.gz").write_bytes(b"")
    (folder / "examples").mkdir()
    (folder / "examples" / "copyright").write_text("of an example")
    (folder / "manual").symlink_to("examples")
    (tmp_path / DOCUMENTATION / "linked").symlink_to("one")
    keep_copyrights(tmp_path)
    kept = {str(path.relative_to(tmp_path / DOCUMENTATION)) for path in (tmp_path / DOCUMENTATION).rglob("*")}
    assert kept == {"one", "one/copyright", "linked"}


def test_without_apt_python_packages_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert licences.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("kopf ") for line in lines)
    assert any("Debian packages are not listed: the base layer cannot be built here" in line for line in lines)
