"""Bills of materials, provenance and licences of the images."""

import hashlib
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from images import sbom
from images.archive import Image, read_layer, write_archive, write_layer
from images.layout import PROGRAMS
from images.licences import image_pins, installed_licence, read_licences, refused
from images.pins import debs_of, pins_of
from images.steps import ROOT

DEBS = debs_of(["libc6_2.36-9+deb12u14_amd64.deb", "zlib1g_1%3a1.2.13.dfsg-1_amd64.deb"], "bookworm")
OTHER_PLATFORMS = {"cffi", "colorama", "httpx2-jsfetch", "pycparser"}
CONTENTS = {
    name: sbom.Contents(program, path := ROOT / program.requirements, pins_of(path), dict.fromkeys(DEBS, "ab" * 32), "1.2.3")
    for name, program in PROGRAMS.items()
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bill_lists_each_package_of_the_image_once(name: str) -> None:
    document: Any = sbom.bill_of_materials(CONTENTS[name], read_licences())
    found = {component["bom-ref"]: component for component in document["components"]}
    pinned = re.findall(r"^([a-z0-9._-]+)==", (ROOT / PROGRAMS[name].requirements).read_text(), re.MULTILINE)
    listed = {component["name"] for component in found.values() if "pkg:pypi" in component["bom-ref"]}
    assert len(found) == len(document["components"]) and listed | OTHER_PLATFORMS >= set(pinned) >= listed
    assert found["pkg:deb/debian/zlib1g@1%3A1.2.13.dfsg-1?arch=amd64&distro=bookworm"]["version"] == "1:1.2.13.dfsg-1"
    assert {Path(folder).name for folder in PROGRAMS[name].packages} <= set(found)
    assert all(component["licenses"] for reference, component in found.items() if "pkg:deb" not in reference)
    [fastapi] = [component for component in found.values() if component["name"] in ("fastapi", "kopf")]
    assert len(fastapi["externalReferences"][0]["hashes"][0]["content"]) == 64
    assert document["dependencies"][0]["dependsOn"] == sorted(found)


def test_bill_of_equal_contents_is_equal() -> None:
    bills = [sbom.encoded(sbom.bill_of_materials(CONTENTS["router"], read_licences())) for _ in range(2)]
    assert bills[0] == bills[1]
    assert json.loads(bills[0])["serialNumber"] != sbom.bill_of_materials(CONTENTS["runtime"], read_licences())["serialNumber"]


def test_provenance_names_image_archive_and_materials(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    layer = write_layer(tmp_path / "root", tmp_path / "layer")
    archive = tmp_path / "images.tar"
    write_archive(archive, [Image(f"localhost/phalanx-{name}:dev", (read_layer(layer.path),)) for name in ("operator", "router")])
    written = sbom.write_beside(archive, CONTENTS)
    assert [path.name for path in written] == [
        f"images.tar.{program}.{kind}.json" for program in ("operator", "router") for kind in ("cdx", "provenance")
    ]
    statement = json.loads(written[3].read_bytes())
    build = statement["predicate"]["buildDefinition"]
    assert statement["subject"] == [
        {"name": "localhost/phalanx-router:dev", "digest": {"sha256": sbom.images_in(archive)["localhost/phalanx-router:dev"]}}
    ]
    digests = {entry["name"]: entry["digest"]["sha256"] for entry in statement["predicate"]["runDetails"]["byproducts"]}
    assert digests == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (archive, written[2])}
    materials = {entry["uri"]: entry["digest"]["sha256"] for entry in build["resolvedDependencies"]}
    requirements = ROOT / "requirements/router.txt"
    assert materials["requirements/router.txt"] == hashlib.sha256(requirements.read_bytes()).hexdigest()
    assert {"images", "runtime/phalanx_router", DEBS[0].purl} <= set(materials)


def test_requirement_without_a_hash_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a==1\n")
    with pytest.raises(ValueError, match="1 requirements are not NAME==VERSION with hashes"):
        pins_of(tmp_path / "x.txt")


def test_every_package_has_an_allowed_licence() -> None:
    licences = read_licences()
    assert set(licences) == set(image_pins()), "run python -m images.licences write"
    assert {name: refused(licence) for name, licence in licences.items() if refused(licence)} == {}


def test_committed_licences_are_those_of_the_installed_packages() -> None:
    different = {}
    for name, licence in read_licences().items():
        if importlib.metadata.version(name) == image_pins()[name].version and installed_licence(name) != licence:
            different[name] = installed_licence(name)
    assert different == {}, "run python -m images.licences write, and read the difference"


@pytest.mark.parametrize(
    ("expression", "bad"),
    [
        ("MIT", []),
        ("MIT AND GPL-3.0-only", ["GPL-3.0-only"]),
        ("GPL-3.0-only OR MIT", []),
        ("MPL-2.0 AND (Apache-2.0 OR AGPL-3.0-only)", []),
        ("", [""]),
        ("Proprietary", ["Proprietary"]),
    ],
)
def test_one_licence_of_alternatives_must_be_allowed(expression: str, bad: list[str]) -> None:
    assert refused(expression) == bad
