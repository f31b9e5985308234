"""Builds images from the checkout: layers for the Dockerfiles, archives for the test cluster.

    python3 -m images.build base FOLDER
    python3 -m images.build requirements PROGRAM BASE FOLDER
    python3 -m images.build kernels PROGRAM BASE FOLDER
    python3 -m images.build packages PROGRAM BASE FOLDER
    python3 -m images.build gpu-kernels PROGRAM BASE REQUIREMENTS FOLDER
    python3 -m images.build archive FILE

The first five fill a folder that a Dockerfile copies to `/`; BASE and REQUIREMENTS are folders that the first two filled. The
last one writes an OCI archive of all three images as the test cluster has them: the runtime image without torch and GPU kernels.
"""

import ast
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from images import steps
from images.archive import Image, Layer, read_layer, write_archive, write_layer
from images.layout import DEBIAN_PACKAGES, ENV, PROGRAMS, TEST_REQUIREMENTS, USER, WRITABLE, Program, image_name
from tools import debian
from tools.cache import cache_root, finished, key_of, key_of_folder
from tools.errors import Failed, Missing
from tools.shell import output, progress, say

PREFIX = "localhost"
KEPT_ARCHIVES = 5
SITE_PACKAGES_IMPORTS = (
    *("torch", "torch.distributed", "torch.nn.functional", "torch.utils.cpp_extension", "safetensors.torch", "numpy", "gguf"),
    *("zmq", "msgspec", "tokenizers", "jinja2", "fastapi", "uvicorn", "uvicorn.protocols.http.httptools_impl", "httpx"),
    *(
        "websockets",
        "uvloop",
        "orjson",
        "prometheus_client",
        "pydantic",
        "transformers",
        "transformers.models.llama.modeling_llama",
    ),
)


def _recipe() -> str:
    """Returns the key of the steps that make images: the code of these modules without formatting, comments and docstrings."""
    here = Path(__file__).parent
    return key_of(*(_code_of((here / name).read_text()) for name in ("steps.py", "layout.py", "archive.py")))


def _code_of(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return ast.dump(tree)


def _is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)


def base() -> Path:
    """Returns the folder of the base layer: `root`, `base.layer` and the list of its Debian packages."""

    def make(folder: Path) -> None:
        with progress("building the base layer of the images (a minute the first time)"):
            packages = steps.fill_base(folder / "root")
            (folder / "packages.txt").write_text("\n".join(packages) + "\n")
            write_layer(folder / "root", folder / "base.layer", USER, {path.lstrip("/") for path in WRITABLE})

    return finished(cache_root() / f"image-base-{debian.release()}-{key_of(_recipe(), *DEBIAN_PACKAGES)}", make)


def _requirements_layer(on: Path, requirements: str) -> Layer:
    def make(folder: Path) -> None:
        steps.fill_requirements(on / "root", requirements, folder / "root")
        write_layer(folder / "root", folder / "requirements.layer")
        shutil.rmtree(folder / "root")

    pins = (steps.ROOT / requirements).read_bytes()
    return read_layer(finished(cache_root() / f"image-requirements-{key_of(on.name, pins)}", make) / "requirements.layer")


def kernels(on: Path, program: Program) -> Path:
    """Returns the folder of a program's compiled kernels: `root` and `kernels.layer`; one per compiler version."""

    def make(folder: Path) -> None:
        (folder / "root").mkdir()
        steps.fill_kernels(on / "root", program, folder / "root")
        write_layer(folder / "root", folder / "kernels.layer")

    compiler = output("g++", "--version") if shutil.which("g++") else "none"
    native = steps.ROOT / program.native
    sources = sorted(path for path in native.iterdir() if path.suffix in (".cpp", ".h") or path.name == "build.py")
    key = key_of(on.name, compiler, _recipe(), *(path.read_bytes() for path in sources))
    return finished(cache_root() / f"image-kernels-{key}", make)


def _packages_layer(on: Path, program: Program, folder: Path) -> Layer:
    root = folder / program.name
    steps.fill_packages(on / "root", program, root)
    layer = write_layer(root, folder / f"{program.name}.layer")
    shutil.rmtree(root)
    return layer


def _image(program: Program, *layers: Layer) -> Image:
    name, user = image_name(PREFIX, program.name), f"{USER}:{USER}"
    return Image(name, layers, entrypoint=program.entrypoint, env=ENV, user=user)


def _stable_layers(on: Path) -> dict[str, tuple[Layer, ...]]:
    """Returns the layers below our packages, by program."""
    first = read_layer(on / "base.layer")
    stable: dict[str, tuple[Layer, ...]] = {
        name: (first, _requirements_layer(on, pins)) for name, pins in TEST_REQUIREMENTS.items()
    }
    for program in PROGRAMS.values():
        if program.native:
            stable[program.name] += (read_layer(kernels(on, program) / "kernels.layer"),)
    return stable


def archives() -> list[Path]:
    """Returns the archives of the test cluster's images, to be loaded in this order: rarely changed layers, then the programs.

    The second archive has only our packages, on layers of the first, so that a changed line reaches the cluster within seconds.
    Folder names are keys of all inputs.
    """
    on = base()
    sources = sorted({steps.ROOT / package for program in PROGRAMS.values() for package in program.packages})
    pins = [(steps.ROOT / name).read_bytes() for name in sorted(set(TEST_REQUIREMENTS.values()))]
    project = (steps.ROOT / "pyproject.toml").read_bytes()
    compiled = [kernels(on, program).name for program in PROGRAMS.values() if program.native]

    def make_stable(folder: Path) -> None:
        stable = _stable_layers(on)
        images = [Image(f"{PREFIX}/phalanx-layers-{name}:dev", layers) for name, layers in stable.items()]
        with progress("writing the archive of the images' lower layers"):
            write_archive(folder / "layers.tar", images)

    def make(folder: Path) -> None:
        stable = _stable_layers(on)
        with progress("building the three images of this checkout"):
            images = [_image(x, *stable[x.name], _packages_layer(on, x, folder)) for x in PROGRAMS.values()]
            write_archive(folder / "phalanx.tar", images, {layer for layers in stable.values() for layer in layers})
        for layer in folder.glob("*.layer"):
            layer.unlink()

    below = finished(cache_root() / f"image-layers-{key_of(on.name, *pins, *compiled)}", make_stable)
    kept = cache_root() / "images"
    found = finished(kept / key_of(below.name, key_of_folder(*sources), project), make)
    _keep_newest(kept, found)
    return [below / "layers.tar", found / "phalanx.tar"]


def _keep_newest(kept: Path, found: Path) -> None:
    folders = sorted((x for x in kept.iterdir() if x.is_dir() and not x.name.startswith(".")), key=lambda x: x.stat().st_mtime)
    for folder in folders[:-KEPT_ARCHIVES]:
        if folder != found:
            shutil.rmtree(folder, ignore_errors=True)


def write_changed_archive(program: str, tag: str, change: Callable[[Path], None], out: Path) -> str:
    """Writes an image with packages modified by `change`, for nodes that have `archives()`; returns its name."""
    on = base()
    stable = _stable_layers(on)[program]
    name = f"{PREFIX}/phalanx-{program}:{tag}"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        steps.fill_packages(on / "root", PROGRAMS[program], root, change)
        layer = write_layer(root, Path(folder) / "changed.layer")
        image = dataclasses.replace(_image(PROGRAMS[program], *stable, layer), name=name)
        write_archive(out, [image], set(stable))
    return name


def write_full_archive(out: Path) -> None:
    """Writes one archive with the complete images of the test cluster, for `kind load image-archive` and similar tools."""
    on = base()
    stable = _stable_layers(on)
    with tempfile.TemporaryDirectory() as folder:
        images = [_image(x, *stable[x.name], _packages_layer(on, x, Path(folder))) for x in PROGRAMS.values()]
        write_archive(out, images)


def site_packages() -> Path:
    """Returns the runtime's pinned requirements, torch included, for the images' Python, as links into uv's cache."""
    on = base()
    requirements = steps.ROOT / PROGRAMS["runtime"].requirements

    def make(folder: Path) -> None:
        target = folder / "site-packages"
        steps.install(on / "root", requirements, target, "hardlink")
        (target / ".lock").unlink(missing_ok=True)
        command, env = steps.python(on / "root")
        imports = "".join(f"import {name}\n" for name in SITE_PACKAGES_IMPORTS)
        with progress("compiling the modules that a rank imports (a minute the first time)"):
            output(*command, "-c", imports, env={**env, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": ""})

    key = key_of(debian.release(), steps.python_version(on / "root"), requirements.read_bytes(), *SITE_PACKAGES_IMPORTS)
    return finished(cache_root() / f"site-packages-{key}", make) / "site-packages"


def main(words: list[str]) -> int:
    """Returns the exit status: 0, or 2 for a wrong command line."""
    match words:
        case ["base", folder]:
            steps.fill_base(Path(folder))
        case ["requirements", name, on, folder] if name in PROGRAMS:
            steps.fill_requirements(Path(on), PROGRAMS[name].requirements, Path(folder))
        case ["kernels", name, on, folder] if name in PROGRAMS and PROGRAMS[name].native:
            steps.fill_kernels(Path(on), PROGRAMS[name], Path(folder))
        case ["packages", name, on, folder] if name in PROGRAMS:
            steps.fill_packages(Path(on), PROGRAMS[name], Path(folder))
        case ["gpu-kernels", name, on, requirements, folder] if name in PROGRAMS and PROGRAMS[name].gpu_kernels:
            steps.fill_gpu_kernels(Path(on), Path(requirements), PROGRAMS[name], Path(folder))
        case ["archive", out]:
            write_full_archive(Path(out))
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
