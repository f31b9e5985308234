"""Bills of materials (CycloneDX 1.6) and provenance (in-toto statement, SLSA v1) of the images.

    python -m images.sbom dockerfiles FOLDER     a bill of materials for each image that the Dockerfiles build
    python -m images.sbom archive FILE           a bill of materials and a provenance for each image in an archive of images.build

Equal input gives equal bytes: nothing depends on time. Both need the base layer, which is built if it is not in the cache.
"""

import hashlib
import json
import sys
import tarfile
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from images import build, steps
from images.copyrights import debian_licences
from images.layout import PROGRAMS, TEST_REQUIREMENTS, Program
from images.licences import read_licences
from images.pins import Deb, Pin, debs_of, pins_of
from tools import debian
from tools.errors import Failed, Missing
from tools.shell import output, say

BUILD_TYPE = "https://phalanx.dev/image-build/v1"
BUILDER = "https://phalanx.dev/images.build"
Document = dict[str, object]


@dataclass(frozen=True, slots=True)
class Contents:
    """What one image contains."""

    program: Program
    requirements: Path
    pins: Sequence[Pin]
    debs: Mapping[Deb, str]
    """With the SHA-256 of each, empty if apt does not know it."""
    version: str
    deb_licences: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of Debian packages by name."""


def bill_of_materials(contents: Contents, licences: Mapping[str, str]) -> Document:
    """Returns the CycloneDX document, with components by package URL."""
    components = [
        *(_own_component(folder, contents.version) for folder in contents.program.packages),
        *(_python_component(pin, licences.get(pin.name, "")) for pin in contents.pins),
        *(_debian_component(deb, sha256, contents.deb_licences.get(deb.name, ())) for deb, sha256 in contents.debs.items()),
    ]
    components.sort(key=lambda component: str(component["bom-ref"]))
    name = f"phalanx-{contents.program.name}"
    image: Document = {"type": "container", "bom-ref": name, "name": name, "version": contents.version}
    document: Document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": image, "lifecycles": [{"phase": "build"}]},
        "components": components,
        "dependencies": [{"ref": name, "dependsOn": [component["bom-ref"] for component in components]}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, encoded(document).decode())
    return {**document, "serialNumber": f"urn:uuid:{serial}"}


def _own_component(folder: str, version: str) -> Document:
    name = Path(folder).name
    hashes = [{"alg": "SHA-256", "content": digest_of_folder(steps.ROOT / folder)}]
    licences = [{"expression": "Apache-2.0"}]
    return {"type": "library", "bom-ref": name, "name": name, "version": version, "hashes": hashes, "licenses": licences}


def _python_component(pin: Pin, licence: str) -> Document:
    files = {"type": "distribution", "url": pin.purl, "hashes": [{"alg": "SHA-256", "content": x} for x in pin.hashes]}
    component: Document = {"type": "library", "bom-ref": pin.purl, "name": pin.name, "version": pin.version, "purl": pin.purl}
    # The index has one file per platform: their hashes are of the distribution, not of the component.
    return component | {"externalReferences": [files]} | ({"licenses": [{"expression": licence}]} if licence else {})


def _debian_component(deb: Deb, sha256: str, licences: Sequence[str]) -> Document:
    component: Document = {"type": "library", "bom-ref": deb.purl, "name": deb.name, "version": deb.version, "purl": deb.purl}
    hashes = {"hashes": [{"alg": "SHA-256", "content": sha256}]} if sha256 else {}
    # Debian's short names are not those of SPDX.
    return component | hashes | ({"licenses": [{"license": {"name": name}} for name in licences]} if licences else {})


def provenance(contents: Contents, image: tuple[str, str], archive: Path, bill: bytes) -> Document:
    """Returns the statement. `image`: name and SHA-256 of its manifest in the archive; `bill`: the bill of materials."""
    name, sha256 = image
    folders = [(folder, digest_of_folder(steps.ROOT / folder)) for folder in ("images", *contents.program.packages)]
    materials = [
        *({"uri": folder, "digest": {"sha256": digest}} for folder, digest in folders),
        {
            "uri": str(contents.requirements.relative_to(steps.ROOT)),
            "digest": {"sha256": _digest(contents.requirements.read_bytes())},
        },
        *({"uri": deb.purl, **({"digest": {"sha256": digest}} if digest else {})} for deb, digest in contents.debs.items()),
    ]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": sha256}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"command": "images.build archive", "program": contents.program.name},
                "internalParameters": {"release": next((deb.release for deb in contents.debs), ""), "version": contents.version},
                "resolvedDependencies": materials,
            },
            "runDetails": {
                "builder": {"id": BUILDER},
                "byproducts": [
                    {"name": archive.name, "digest": {"sha256": _digest_of_file(archive)}},
                    {"name": bill_name(archive, contents.program.name), "digest": {"sha256": _digest(bill)}},
                ],
            },
        },
    }


def bill_name(archive: Path, program: str) -> str:
    """Returns the file name of a bill of materials beside an archive."""
    return f"{archive.name}.{program}.cdx.json"


def images_in(archive: Path) -> dict[str, str]:
    """Returns the images of an OCI archive: the SHA-256 of the manifest by name."""
    with tarfile.open(archive) as tar:
        index = tar.extractfile("index.json")
        assert index is not None
        entries = json.load(index)["manifests"]
    return {entry["annotations"]["io.containerd.image.name"]: entry["digest"].removeprefix("sha256:") for entry in entries}


def write_beside(archive: Path, contents: Mapping[str, Contents]) -> list[Path]:
    """Writes a bill of materials and a provenance beside the archive for each of its images, and returns their paths."""
    written = []
    for name, sha256 in sorted(images_in(archive).items()):
        of_image = contents[name.rpartition("/")[2].partition(":")[0].removeprefix("phalanx-")]
        bill = encoded(bill_of_materials(of_image, read_licences()))
        statement = encoded(provenance(of_image, (name, sha256), archive, bill))
        beside = [bill_name(archive, of_image.program.name), f"{archive.name}.{of_image.program.name}.provenance.json"]
        for file, content in zip(beside, (bill, statement), strict=True):
            archive.with_name(file).write_bytes(content)
            written.append(archive.with_name(file))
    return written


def encoded(document: Document) -> bytes:
    """Returns the JSON text, with sorted keys."""
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def digest_of_folder(folder: Path) -> str:
    """Returns the SHA-256 of names and contents of the files below, without compiled ones."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if "__pycache__" not in path.parts and "built" not in path.parts:
            digest.update(f"{path.relative_to(folder)}\0{_digest(path.read_bytes())}\n".encode())
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_contents(requirements: Mapping[str, str]) -> dict[str, Contents]:
    """Returns what each image contains. `requirements`: file by program."""
    base = build.base()
    debs = _digests(debs_of((base / "packages.txt").read_text().splitlines(), debian.release().partition("-")[0]))
    licences = debian_licences(base / "root", debs)
    version = tomllib.loads((steps.ROOT / "pyproject.toml").read_text())["project"]["version"]
    paths = {name: steps.ROOT / file for name, file in requirements.items()}
    return {
        name: Contents(PROGRAMS[name], path, pins_of(path), debs, version, deb_licences=licences) for name, path in paths.items()
    }


def _digests(debs: Sequence[Deb]) -> dict[Deb, str]:
    """Returns the SHA-256 that apt's lists state for each package; a newer version may have replaced it there."""
    known: dict[tuple[str, str], str] = {}
    for entry in output("apt-cache", "show", *(deb.name for deb in debs)).split("\n\n"):
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line and not line.startswith(" "))
        known[fields.get("Package", ""), fields.get("Version", "")] = fields.get("SHA256", "")
    return {deb: known.get((deb.name, deb.version), "") for deb in debs}


def main(words: list[str]) -> int:
    """Returns the exit status: 0, or 2 for a wrong command line."""
    match words:
        case ["dockerfiles", folder]:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name, contents in read_contents({name: program.requirements for name, program in PROGRAMS.items()}).items():
                path = Path(folder) / f"phalanx-{name}.cdx.json"
                path.write_bytes(encoded(bill_of_materials(contents, read_licences())))
                say(str(path))
        case ["archive", file]:
            for path in write_beside(Path(file), read_contents(TEST_REQUIREMENTS)):
                say(str(path))
        case _:
            say(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (Missing, Failed) as error:
        say(f"failed: {error}")
        sys.exit(1)
