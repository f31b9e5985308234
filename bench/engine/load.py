"""Rate of loading a model against the disk's: `python -m bench.engine.load FOLDER [--quantization int4]`.

Files are dropped from the page cache before each reading, as far as the kernel permits it without privileges.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from phalanx_api.engine_config import Quantization
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.model.copies import GPU_READERS
from phalanx_runtime.model.linear.registry import choose_kernels
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model

PIECE_BYTES = 16 << 20


def drop_cached(paths: Sequence[Path]) -> None:
    """Drops clean pages of the files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_sequentially(paths: Sequence[Path]) -> float:
    """Returns the seconds of reading all files in order."""
    piece = memoryview(bytearray(PIECE_BYTES))
    start = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return time.perf_counter() - start


def load(folder: Path, device: torch.device, quantization: Quantization | None, num_readers: int) -> float:
    """Returns the seconds until the weights are on the device."""
    source, processor = open_model(folder), read_processor()
    dtype = choose_dtype("auto", source.dtype, device, processor)
    kernels = choose_kernels(dtype, device, processor, spare_bytes=0, num_bytes=0, precision=quantization or "bf16")
    options = LoadOptions(dtype=dtype, device=device, kernels=kernels, positions=1, num_readers=num_readers)
    start = time.perf_counter()
    source.load(SoloCollective(), options)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.engine.load", description="Loads a model and reads its files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantization", choices=get_args(Quantization))
    parser.add_argument("--readers", type=int, help="files read at once; default: as a rank")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    readers = arguments.readers or (GPU_READERS if device.type == "cuda" else 1)
    paths = sorted(arguments.folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in paths)
    drop_cached(paths)
    disk = num_bytes / read_sequentially(paths)
    drop_cached(paths)
    loading = num_bytes / load(arguments.folder, device, arguments.quantization, readers)
    print(
        f"{num_bytes / 1e9:.2f} GB in {len(paths)} files to {device.type} with {readers} readers: "
        f"{loading / 1e9:.2f} GB/s, disk {disk / 1e9:.2f} GB/s, share {loading / disk:.0%}"
    )


if __name__ == "__main__":
    main()
