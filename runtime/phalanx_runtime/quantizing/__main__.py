"""Reads a QuantizeSpec from stdin, writes the checkpoint, prints its size and perplexity."""

import os
import sys
import time

import msgspec

from phalanx_runtime.commands import QuantizeSpec
from phalanx_runtime.errors import ModelError
from phalanx_runtime.progress import open_line
from phalanx_runtime.rank.process.cgroup import limit_cached_kernels, limit_openmp_spin, rank_threads


def main(line: bytes) -> int:
    """Returns exit code 0, or 1 with the reason on stderr."""
    spec = msgspec.json.decode(line, type=QuantizeSpec)
    limit_openmp_spin(os.environ)
    limit_cached_kernels(os.environ)
    try:
        print(_quantize(spec))
    except ModelError as error:
        print(f"phalanx-runtime quantize: {error}", file=sys.stderr)
        return 1
    return 0


def _quantize(spec: QuantizeSpec) -> str:
    """Quantises and returns a summary. Imports torch after `main` has set its environment."""
    import torch

    from phalanx_runtime.quantizing.quantize import quantize
    from phalanx_runtime.rank.process.cgroup import System, cpu_limit

    torch.set_num_threads(rank_threads(None, cpu_limit(System()), 1))
    progress, start = open_line(sys.stderr), time.monotonic()
    try:
        report = quantize(spec, torch.device("cpu"), (lambda _: None) if progress is None else progress.show_text)
    finally:
        if progress is not None:
            progress.clear()
    sizes = f"{report.bytes_after / 1e6:,.1f} MB of {report.bytes_before / 1e6:,.1f} MB"
    before, after = report.perplexity_before, report.perplexity_after
    text = "text that the model wrote" if spec.calibration is None else spec.calibration
    return (
        f"{spec.out}: {spec.scheme}, {report.num_layers} layers, {sizes}, in {time.monotonic() - start:.0f} s\n"
        f"perplexity of {report.num_held_out:,} held-out tokens of {text}: "
        f"{before:.3f} before, {after:.3f} after ({after / before - 1:+.2%})"
    )


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer.readline()))
