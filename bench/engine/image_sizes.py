"""Measures the vision tower of a model by the size of the image, without the text model.

    python -m bench.engine.image_sizes FOLDER [--megapixels 0.25 1 4] [--rounds 3] [--threads 1] [--random]

FOLDER: a model that reads images; with `--random` its config.json, tokenizer.json and the settings of its processor are enough.
An image of random pixels, four thirds as wide as high, is resized and cut as for a request, then encoded. Prints a table: pixels
of the file and of its tiles, tokens, the median time, the measured peak of memory, the peak that a rank reserves for its largest
image, and the size of the embeddings.
"""

import argparse
import io
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from bench.frame.figures import table
from phalanx_api import wire
from phalanx_frontend.images.decoding import Picture, decode
from phalanx_frontend.images.source import ImageBounds
from phalanx_frontend.images.tiling import num_tokens
from phalanx_runtime.checkpoint.vision import read_vision, text_config
from phalanx_runtime.model.config import read_json
from phalanx_runtime.model.linear.registry import choose_kernels
from phalanx_runtime.model.processor import choose_dtype, read_processor
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.vision.tower import Tower, empty_module, load_tower
from phalanx_runtime.rank.memory.memory_profiler import make_memory_profiler

POSITIONS = 32_768
HEAD = ["megapixels", "of its tiles", "tokens", "seconds", "peak MiB", "reserved MiB", "embeddings MiB"]
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one size."""

    megapixels: float
    tile_megapixels: float
    num_tokens: int
    seconds: float
    peak_bytes: int
    embedding_bytes: int


def picture_of(megapixels: float, taken: wire.ImageInput) -> tuple[Picture, int]:
    """Returns a random image as a request has it, and its tokens. Raises ImageRefused."""
    height = max(1, round(math.sqrt(megapixels * 1e6 * 3 / 4)))
    size = (height, height * 4 // 3 or 1, 3)
    values = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(values.numpy()).save(file, "PNG", compress_level=0)
    picture = decode(file.getvalue(), taken, ImageBounds().max_pixels, "image")
    return picture, num_tokens(taken, picture.cut)


def measure(tower: Tower, taken: wire.ImageInput, megapixels: float, rounds: int) -> Figures:
    """Returns the figures of one size."""
    picture, tokens = picture_of(megapixels, taken)
    image = wire.Image(
        digest=picture.digest,
        num_tiles=picture.cut.num_tiles,
        height=picture.height,
        width=picture.width,
        pixels=picture.pixels,
        spans=[(0, tokens)],
        size=picture.size,
    )
    times, sizes = list[float](), list[int]()

    def encode() -> None:
        started = time.perf_counter()
        encoded = tower.encode(image)
        if tower.device.type == "cuda":
            torch.cuda.synchronize(tower.device)
        times.append(time.perf_counter() - started)
        sizes.append(encoded.nbytes)

    peak = make_memory_profiler(tower.device).peak_bytes(encode)
    for _ in range(rounds - 1):
        encode()
    return Figures(
        megapixels=megapixels,
        tile_megapixels=len(picture.pixels) / 3e6,
        num_tokens=tokens,
        seconds=statistics.median(times),
        peak_bytes=peak,
        embedding_bytes=sizes[0],
    )


def open_tower(folder: Path, is_random: bool) -> tuple[Tower, wire.ImageInput]:
    """Returns the tower and how the model takes images. Raises ModelError, SystemExit for a model that takes none."""
    raw, vision = read_json(folder), read_vision(folder)
    if vision is None or vision.input.obstacle:
        raise SystemExit(f"{folder}: the model takes no images{'' if vision is None else ': ' + vision.input.obstacle}")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    processor, text = read_processor(), text_config(raw)
    dtype = choose_dtype("auto", str(text.get("dtype") or text.get("torch_dtype") or "float32"), device, processor)
    kernels = choose_kernels(dtype, device, processor, spare_bytes=0, num_bytes=0, precision="bf16")
    options = LoadOptions(dtype=dtype, device=device, kernels=kernels, positions=POSITIONS)
    width = int(text["hidden_size"])
    tower = (
        Tower(empty_module(folder, options), vision, width, options) if is_random else load_tower(folder, vision, width, options)
    )
    return tower, vision.input


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.engine.image_sizes", description="Encodes images of several sizes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megapixels", type=float, nargs="+", default=[0.25, 1.0, 4.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--random", action="store_true", help="random weights: time and memory are the same")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    tower, taken = open_tower(arguments.folder, arguments.random)
    reserved = tower.peak_bytes(make_memory_profiler(tower.device).peak_bytes(lambda: tower.encode(tower.blank())))
    rows = list[list[str]]()
    for megapixels in arguments.megapixels:
        one = measure(tower, taken, megapixels, arguments.rounds)
        sizes = [f"{one.megapixels:g}", f"{one.tile_megapixels:.2f}", str(one.num_tokens), f"{one.seconds:.2f}"]
        rows.append([*sizes, *(f"{size / MIB:.0f}" for size in (one.peak_bytes, reserved, one.embedding_bytes))])
    kept = f"kept for one request of {POSITIONS} tokens: {tower.request_bytes / MIB:.0f} MiB"
    print(f"{torch.get_num_threads()} threads, {tower.device.type}; {kept}", flush=True)
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
