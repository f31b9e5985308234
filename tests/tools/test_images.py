"""The Dockerfiles say what the layout says, and archives are whole, small and always the same."""

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from images import archive, build, layout, steps

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [pytest.param(program, id=program.name) for program in layout.PROGRAMS.values()]


def stages(program: layout.Program) -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage of a program's Dockerfile; the last stage is called final, what precedes all "arguments"."""
    text = (ROOT / f"images/{program.name}.Dockerfile").read_text()
    current: list[tuple[str, str]] = []
    found = {"arguments": current}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            current = found.setdefault(rest.partition(" AS ")[2] or "final", [])
        current.append((word, rest))
    return found


def values(instructions: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for found, rest in instructions if found == word]


@pytest.mark.parametrize("program", PROGRAMS)
def test_container_runs_its_program_without_shell_or_root(program: layout.Program) -> None:
    final = stages(program)["final"]
    assert values(final, "FROM") == ["scratch"]
    assert json.loads(values(final, "ENTRYPOINT")[0]) == list(program.entrypoint)
    assert values(final, "USER") == [f"{layout.USER}:{layout.USER}"]
    assert dict(pair.split("=", 1) for pair in values(final, "ENV")[0].split()) == layout.ENV
    assert values(final, "EXPOSE")[0].split() == [str(port) for port in program.ports]
    assert values(final, "RUN") == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_base_of_the_build_is_an_argument(program: layout.Program) -> None:
    """So that a user may pin it by digest."""
    found = stages(program)
    assert found["arguments"] == [("ARG", "BASE=debian:12-slim")]
    assert values(found["build"], "FROM") == ["${BASE} AS build"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_layers_and_archives_use_the_same_steps(program: layout.Program) -> None:
    build, final = stages(program)["build"], stages(program)["final"]
    made = [
        "base",
        f"requirements {program.name}",
        *([f"kernels {program.name}"] if program.native else []),
        f"packages {program.name}",
        *([f"gpu-kernels {program.name}"] if program.gpu_kernels else []),
    ]
    layers = [f"/layers/{step.split()[0]}" for step in made]
    on = [layers[0] + " " if at else "" for at in range(len(made))]
    if program.gpu_kernels:
        on[-1] += layers[1] + " "
    assert [line for line in values(build, "RUN") if "images.build" in line] == [
        f"python3 -m images.build {step} {below}{layer}" for step, below, layer in zip(made, on, layers, strict=True)
    ]
    assert values(final, "COPY") == [f"--from=build {layer} /" for layer in layers]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_copied_file_exists_in_the_build(program: layout.Program) -> None:
    copied = [line.split()[0] for line in values(stages(program)["build"], "COPY")]
    native = [program.native] if program.native else []
    assert copied == ["tools", "images", "pyproject.toml", program.requirements, *native, *program.packages]
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_kernel_build_image_has_a_compiler() -> None:
    for program in layout.PROGRAMS.values():
        installed = values(stages(program)["build"], "RUN")[0].split()
        assert ("g++" in installed) == bool(program.native)
        assert ("python3-dev" in installed) == bool(program.gpu_kernels)


def test_image_without_compiler_reports_missing_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base/usr/bin").mkdir(parents=True)
    (tmp_path / "base/usr/bin/python3").symlink_to("python3.11")
    monkeypatch.setenv("PATH", str(tmp_path))
    steps.fill_kernels(tmp_path / "base", layout.PROGRAMS["runtime"], tmp_path / "root")
    assert "no g++: the image of the runtime has no compiled kernels" in capsys.readouterr().err
    assert [path for path in (tmp_path / "root").rglob("*") if path.is_file()] == []


def test_image_without_headers_reports_missing_gpu_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base/usr/bin").mkdir(parents=True)
    (tmp_path / "base/usr/bin/python3").symlink_to("python3.11")
    monkeypatch.setenv("PATH", str(tmp_path))
    words = [str(tmp_path / name) for name in ("base", "requirements", "root")]
    assert build.main(["gpu-kernels", "runtime", *words]) == 0
    assert "on GPUs compute with torch only" in capsys.readouterr().err
    assert [path for path in (tmp_path / "root").rglob("*") if path.is_file()] == []
    assert build.main(["gpu-kernels", "router", *words]) == 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_console_command_is_that_of_the_distribution(program: layout.Program) -> None:
    scripts = (ROOT / "pyproject.toml").read_text()
    assert f'{program.command} = "{program.module}.__main__:main"' in scripts
    assert any(package.endswith(f"/{program.module}") for package in program.packages)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_imports_only_packages_that_its_image_holds(program: layout.Program) -> None:
    held = {Path(package).name for package in program.packages}
    imported = set()
    for package in program.packages:
        for path in (ROOT / package).rglob("*.py"):
            imported |= set(re.findall(r"^\s*(?:from|import) (phalanx_\w+)", path.read_text(), re.MULTILINE))
    assert imported <= held


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with a file, a program, a link and a folder of somebody's."""
    root = tmp_path / "root"
    (root / "var/cache").mkdir(parents=True)
    (root / "hello").write_text("hello")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("hello")
    return root


def members(path: Path) -> Iterator[tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        yield from tar


def test_layer_keeps_modes_links_and_owner_without_times(tree: Path, tmp_path: Path) -> None:
    layer = archive.write_layer(tree, tmp_path / "layer", owner=7, owned={"var/cache"})
    found = {x.name: x for x in members(layer.path)}
    assert list(found) == sorted(found)
    assert (found["run.sh"].mode & 0o777, found["link"].linkname) == (0o755, "hello")
    assert {name: x.uid for name, x in found.items() if x.uid} == {"var/cache": 7}
    assert {x.mtime for x in found.values()} == {0}
    assert layer.sha256 == hashlib.sha256(layer.path.read_bytes()).hexdigest()


def test_the_same_tree_gives_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    def write(name: str) -> bytes:
        layer = archive.write_layer(tree, tmp_path / f"{name}.layer")
        out = tmp_path / name
        archive.write_archive(
            out, [archive.Image("localhost/a:1", (layer,), entrypoint=("/run.sh",), env={"A": "b"}, user="1:1")]
        )
        return out.read_bytes()

    first = write("first")
    (tree / "hello").touch()
    assert write("second") == first


def blobs(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        found = {x.name: tar.extractfile(x) for x in tar if x.isfile()}
        return {name: content.read() for name, content in found.items() if content is not None}


def test_archive_contains_each_blob_once_by_digest(tree: Path, tmp_path: Path) -> None:
    layer = archive.write_layer(tree, tmp_path / "layer")
    images = [archive.Image(f"localhost/{name}:1", (layer,), command=(name,), user="65532:65532") for name in "ab"]
    archive.write_archive(tmp_path / "out.tar", images)
    found = blobs(tmp_path / "out.tar")
    for name, content in found.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    index = json.loads(found["index.json"])
    assert [x["annotations"]["io.containerd.image.name"] for x in index["manifests"]] == ["localhost/a:1", "localhost/b:1"]
    for entry in index["manifests"]:
        manifest = json.loads(found["blobs/" + entry["digest"].replace(":", "/")])
        config = json.loads(found["blobs/" + manifest["config"]["digest"].replace(":", "/")])
        assert config["rootfs"]["diff_ids"] == [x["digest"] for x in manifest["layers"]]
        assert config["config"]["User"] == "65532:65532"
    assert len(found) == 2 + 2 * 2 + 1


def test_layers_that_the_reader_has_are_left_out(tree: Path, tmp_path: Path) -> None:
    layer = archive.write_layer(tree, tmp_path / "layer")
    archive.write_archive(tmp_path / "out.tar", [archive.Image("localhost/a:1", (layer,))], known=[layer])
    assert f"blobs/sha256/{layer.sha256}" not in blobs(tmp_path / "out.tar")


@pytest.mark.parametrize("name", ["web:1", "library/web:1", "localhost/web"])
def test_public_or_untagged_image_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected HOST/NAME:TAG"):
        archive.write_archive(tmp_path / "out.tar", [archive.Image(name, ())])


def test_an_interrupted_archive_leaves_no_file_of_its_name(tmp_path: Path) -> None:
    gone = archive.Layer(tmp_path / "gone", "0" * 64, 1)
    with pytest.raises(FileNotFoundError):
        archive.write_archive(tmp_path / "out.tar", [archive.Image("localhost/a:1", (gone,))])
    assert not (tmp_path / "out.tar").exists()


def test_image_names_follow_the_prefix() -> None:
    assert layout.image_name("registry.example/team", "router") == "registry.example/team/phalanx-router:dev"
