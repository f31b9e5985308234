"""Compiles a small folder, or uses one, and prints JSON: `python -m tests.runtime.rank.kernels.built make|use FOLDER`.

A process of its own, because kernels of a process are either interpreted or compiled.
"""

import json
import sys
import sysconfig
from pathlib import Path

import torch
from triton.backends.nvidia import driver as nvidia

from phalanx_runtime.model.decoder.gpu import gate_variant
from phalanx_runtime.model.kernels.cache import open_folder
from phalanx_runtime.model.kernels.folder import usable_folder, write_toolchain
from phalanx_runtime.model.kernels.target import TARGETS, compiling_for
from phalanx_runtime.rank.device.device_rows import row_variants
from phalanx_runtime.rank.kernels.ahead import build_driver_module, compile_into
from phalanx_runtime.rank.kernels.warmup import CompileWatch

GATE = gate_variant(4096, torch.bfloat16, "silu")


def make(folder: Path) -> dict[str, object]:
    build_driver_module(folder, Path(sysconfig.get_paths()["include"]))
    account = compile_into(folder, {name: [GATE] for name in TARGETS})
    write_toolchain(folder)
    return {"compiled": account.num_compiled, "files": sorted(path.name for path in folder.rglob("*.*") if path.is_file())}


def use(folder: Path) -> dict[str, object]:
    found = usable_folder(folder)
    assert found is not None
    open_folder(found)
    watch = CompileWatch()
    watch.install()
    sizes = []
    for target in TARGETS.values():
        with compiling_for(target):
            sizes.append(len(GATE.compile().asm["cubin"]) > 0)
    read = watch.num_compiled
    with compiling_for(TARGETS["sm_90"]):
        row_variants(1)[1].compile()
    utils = nvidia.CudaUtils()
    return {"read": read, "sizes": sizes, "compiled": watch.num_compiled, "driver": hasattr(utils, "load_binary")}


if __name__ == "__main__":
    print(json.dumps({"make": make, "use": use}[sys.argv[1]](Path(sys.argv[2]))))
