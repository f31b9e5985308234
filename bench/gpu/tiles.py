"""Times the tiles of linears of a single row, for the shapes of the benchmark's models, beside torch's linears.

    python -m bench.gpu.tiles

Prints for each size the fastest tiles, and the one that the product uses. Weights alternate, so that no cache has them.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from bench.gpu.clock import Clock, open_clock
from bench.gpu.sizes import CACHE_BYTES, Sizes
from phalanx_api.roofline import ModelShape, shape_of
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated
from phalanx_runtime.model.linear.single_row import RowTile, TritonRowLinears, row_tile

EPS = 1e-5
TILES = tuple(RowTile(*tile) for tile in product((1, 2, 4, 8, 16), (512, 1024, 2048), (4, 8)))
MIN_WEIGHTS, MAX_WEIGHTS = 2048, 8192
"""Of a tile."""
FASTEST = 4


@dataclass(frozen=True, slots=True)
class RowCase:
    """A linear of a single row in a model."""

    name: str
    outputs: int
    inputs: int
    form: str
    """As in `row_tile`."""


def row_cases(model: str, shape: ModelShape) -> Iterator[RowCase]:
    """Yields the linears of a layer, and the head."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield RowCase(f"{model} qkv", q + 2 * kv, shape.hidden, "")
    yield RowCase(f"{model} o", shape.hidden, q, "add")
    yield RowCase(f"{model} gate-up", shape.intermediate, shape.hidden, "silu")
    yield RowCase(f"{model} down", shape.hidden, shape.intermediate, "add")
    yield RowCase(f"{model} head", shape.vocab, shape.hidden, "")


def tiles_for(case: RowCase) -> list[RowTile]:
    """Returns the tiles that fit the case, the product's among them."""
    halves = 2 if case.form == "silu" else 1
    fitting = [
        tile
        for tile in TILES
        if MIN_WEIGHTS <= halves * tile.block_outputs * tile.block_inputs <= MAX_WEIGHTS and tile.block_inputs < 2 * case.inputs
    ]
    return list(dict.fromkeys([row_tile(case.inputs, case.form), *fitting]))


def time_rows(case: RowCase, clock: Clock, device: torch.device, dtype: torch.dtype) -> Mapping[RowTile | None, float]:
    """Returns the seconds of one linear by tile; under `None` those of torch's linear alone."""
    weight_rows = case.outputs * (2 if case.form == "silu" else 1)
    copies = max(1, min(24, CACHE_BYTES // (weight_rows * case.inputs * dtype.itemsize)))
    make = partial(torch.randn, dtype=dtype, device=device)
    linears = [DenseLinear(make(weight_rows, case.inputs), None) for _ in range(copies)]
    x, norm, residual = make(1, case.inputs), make(case.inputs), make(1, case.outputs)

    def run(tile: RowTile) -> None:
        rows = TritonRowLinears(lambda inputs, form: tile)
        for linear in linears:
            if case.form == "add":
                rows.add(linear, x, residual)
            elif case.form:
                rows.gate(x, norm, PlainGated(linear, "silu"), EPS)
            else:
                rows.project(x, norm, linear, EPS)

    found: dict[RowTile | None, float] = {tile: clock.captured_s(partial(run, tile)) / copies for tile in tiles_for(case)}
    return {None: clock.captured_s(lambda: [F.linear(x, linear.weight) for linear in linears]) / copies, **found}


def line(case: RowCase, seconds: Mapping[RowTile | None, float]) -> str:
    """Returns one line of the table."""
    times = {tile: s for tile, s in seconds.items() if tile is not None}
    best = sorted(times, key=lambda tile: times[tile])[:FASTEST]
    used = row_tile(case.inputs, case.form)
    shown = ", ".join(f"{tile.block_outputs}x{tile.block_inputs}/{tile.num_warps} {1e6 * times[tile]:.2f}" for tile in best)
    return f"{case.name:16} torch {1e6 * seconds[None]:8.2f} us  used {1e6 * times[used]:8.2f} us  fastest {shown}"


def main() -> int:
    """Prints the table."""
    if not torch.cuda.is_available():
        print("bench.gpu.tiles: no CUDA device", file=sys.stderr)
        return 2
    device, sizes = torch.device("cuda", torch.cuda.current_device()), Sizes()
    clock = open_clock(device)
    with torch.inference_mode():
        for model, config in (("large", sizes.large), ("small", sizes.small)):
            for case in row_cases(model, shape_of(config)):
                print(line(case, time_rows(case, clock, device, sizes.dtype)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
