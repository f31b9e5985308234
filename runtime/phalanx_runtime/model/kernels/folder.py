"""The folder of compiled kernels in an image, and whether this Triton can use it. Imports no Triton.

triton/<key>/        metadata and machine code of one variant, in the layout of Triton's cache
modules/<digest>/    a C module that Triton would compile with gcc, by the SHA-256 of its source
made_for.json        `Toolchain` of the build
"""

import json
import sysconfig
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(__file__).parent / "built"
"""Present in images, which `images.build gpu-kernels` makes; absent elsewhere."""
TOOLCHAIN = "made_for.json"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What compiled kernels depend on, beside their source."""

    triton: str
    module_suffix: str
    """Of C modules: Python's version and the processor's architecture."""


def this_toolchain() -> Toolchain | None:
    """Returns that of this process, if Triton is installed."""
    try:
        return Toolchain(version("triton"), str(sysconfig.get_config_var("EXT_SUFFIX")))
    except PackageNotFoundError:
        return None


def write_toolchain(folder: Path) -> None:
    """Completes a folder: without the file it is not used."""
    toolchain = this_toolchain()
    assert toolchain is not None, "kernels are compiled by Triton"
    (folder / TOOLCHAIN).write_text(json.dumps(asdict(toolchain)))


@cache
def usable_folder(folder: Path = FOLDER) -> Path | None:
    """Returns the folder, if it was made for this Triton and this Python."""
    try:
        made_for = Toolchain(**json.loads((folder / TOOLCHAIN).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return folder if made_for == this_toolchain() else None
