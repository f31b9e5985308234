"""Compiles kernels into the folder of an image, without a device: `python -m phalanx_runtime.rank.kernels.ahead FOLDER INCLUDE`.

INCLUDE has Python.h. Needs gcc or the program in CC. The layout of the folder is in `model.kernels.folder`.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.nvidia import driver as nvidia

from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.kernels.cache import compile_module, module_path
from phalanx_runtime.model.kernels.folder import write_toolchain
from phalanx_runtime.model.kernels.target import TARGETS, compiling_for
from phalanx_runtime.model.kernels.variant import KernelVariant
from phalanx_runtime.rank.kernels.account import NO_WARMUP, WarmupAccount
from phalanx_runtime.rank.kernels.shapes import SHAPES, CommonShape
from phalanx_runtime.rank.kernels.variants import KernelOptions, model_variants, step_variants, sum_variants
from phalanx_runtime.rank.kernels.warmup import CompileWatch, warm_up

PAGE_SIZES = (16,)
PAGE_FORMATS = ((torch.bfloat16, (None, *FORMATS.values())), (torch.float16, (None,)))
"""Formats of pages by dtype. Others are compiled at start."""
MAX_PAGES = (64, 128, 256, 512)
"""Pages of the longest request, by size class of page tables: with pages of 16 up to 1,024 tokens, ..., and above 4,096."""
DRIVER_MODULE = "cuda_utils"
"""Triton's access to the driver."""


def target_variants(name: str, shapes: Iterable[CommonShape] = SHAPES.values()) -> list[KernelVariant]:
    """Returns the variants of the shapes for one of `TARGETS`, each once."""
    with compiling_for(TARGETS[name]):  # which decides whether kernels start early
        return _variants(TARGETS[name].arch // 10, shapes)


def _variants(capability: int, shapes: Iterable[CommonShape]) -> list[KernelVariant]:
    """Returns the variants for Triton's current target. `capability`: its major compute capability."""
    found: dict[KernelVariant, None] = {}
    for shape in shapes:
        config = shape.config()
        for dtype, formats in PAGE_FORMATS:
            for (world_size, shard), page_size, format in product(shape.shards(), PAGE_SIZES, formats):
                options = KernelOptions(
                    dtype=dtype, page_size=page_size, capability=capability, world_size=world_size, format=format
                )
                found |= dict.fromkeys([*model_variants(config, shard, options), *sum_variants(config, options)])
            for max_pages in MAX_PAGES:
                windows = {"has_window": set(config.windows) != {None}, "has_parts": len({w is None for w in config.windows}) > 1}
                found |= dict.fromkeys(step_variants(config.num_kv_heads, config.vocab_size, dtype, max_pages, **windows))
    return list(found)


def compile_into(folder: Path, variants: Mapping[str, Sequence[KernelVariant]]) -> WarmupAccount:
    """Compiles the variants of each of `TARGETS` into the folder. Raises the error of a variant that does not compile."""
    triton.knobs.cache.dir = str(folder / "triton")
    triton.knobs.compilation.store_binary_only = True
    watch, account = CompileWatch(), NO_WARMUP
    watch.install()
    for name, listed in variants.items():
        with compiling_for(TARGETS[name]):
            account += warm_up(listed, watch, has_device=False)
    for entry in (folder / "triton").iterdir():
        _keep_code(entry)
    return account


def _keep_code(entry: Path) -> None:
    """Deletes all but metadata and machine code, and makes the group independent of the folder's place."""
    for path in entry.iterdir():
        if path.name.startswith("__grp__"):
            names = [name for name in json.loads(path.read_text())["child_paths"] if name.endswith((".json", ".cubin"))]
            path.write_text(json.dumps({"child_paths": {name: name for name in names}}))
        elif path.suffix not in (".json", ".cubin"):
            path.unlink()


def build_driver_module(folder: Path, include: Path) -> None:
    """Compiles Triton's access to the driver. A machine without the driver can compile it, and not import it.

    Raises RuntimeError if this Triton (before 3.7) also compiles a launcher for each kernel.
    """
    if hasattr(nvidia, "make_launcher"):
        raise RuntimeError(f"Triton {triton.__version__} compiles a module for each kernel with gcc when it is launched")
    source = Path(nvidia.__file__).parent / "driver.c"
    target = module_path(folder, DRIVER_MODULE, source.read_bytes())
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        library, nothing = Path(scratch) / "libcuda.so.1", Path(scratch) / "empty.c"
        nothing.touch()
        # The driver's library, as far as the linker needs it: its name.
        compile_module(nothing, library, [], ["-Wl,-soname,libcuda.so.1"])
        flags = ["-Wl,--no-as-needed", f"-L{scratch}", "-l:libcuda.so.1"]
        compile_module(source, target, [source.parent / "include", include], flags)


def main(words: Sequence[str]) -> None:
    """Fills the folder and prints what it has."""
    folder, include = map(Path, words)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build_driver_module(folder, include)
    account = compile_into(folder, {name: target_variants(name) for name in TARGETS})
    write_toolchain(folder)
    print(f"{account.num_compiled} kernels for {', '.join(TARGETS)} in {account.seconds:.0f} s")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"gcc failed: {error}")
