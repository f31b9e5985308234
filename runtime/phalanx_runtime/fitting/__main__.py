"""Reads a FitSpec or CalibrationSpec from stdin, writes the exit or the calibration, prints a summary."""

import os
import sys
import time
from pathlib import Path

import msgspec

from phalanx_runtime.commands import CalibrationSpec, FitSpec
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank.process.cgroup import limit_cached_kernels, limit_openmp_spin, rank_threads


def main(line: bytes) -> int:
    """Returns exit code 0, or 1 with the reason on stderr."""
    spec: FitSpec | CalibrationSpec = msgspec.json.decode(line, type=FitSpec | CalibrationSpec)
    command = "fit-exit" if isinstance(spec, FitSpec) else "calibrate-kv"
    limit_openmp_spin(os.environ)
    limit_cached_kernels(os.environ)
    start = time.monotonic()
    try:
        summary = _fit(spec) if isinstance(spec, FitSpec) else _calibrate(spec)
        print(f"{spec.out}: {summary} in {time.monotonic() - start:.0f} s")
    except ModelError as error:
        print(f"phalanx-runtime {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _fit(spec: FitSpec) -> str:
    """Fits and returns a summary. Imports torch after `main` has set its environment."""
    import torch

    from phalanx_runtime.fitting.fit import fit
    from phalanx_runtime.model.decoder.exit import write_exit
    from phalanx_runtime.rank.process.cgroup import System, cpu_limit

    torch.set_num_threads(rank_threads(None, cpu_limit(System()), 1))
    fitted_exit = fit(spec, torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic)
    write_exit(Path(spec.out), fitted_exit)
    card = fitted_exit.card
    agreement = f"{card.agreement_raw:.1%} raw, {card.agreement_fitted:.1%} fitted"
    return f"{card.num_layers} layers agree with the model on held-out text: {agreement}; fitted on {card.num_tokens} tokens"


def _calibrate(spec: CalibrationSpec) -> str:
    """Calibrates and returns a summary. Imports torch as `_fit` does."""
    import torch

    from phalanx_runtime.fitting.calibrate import calibrate
    from phalanx_runtime.model.attention.calibration import write_calibration
    from phalanx_runtime.rank.process.cgroup import System, cpu_limit

    torch.set_num_threads(rank_threads(None, cpu_limit(System()), 1))
    card, layers = calibrate(spec, torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic)
    write_calibration(Path(spec.out), card, layers)
    return f"{len(layers)} layers calibrated on {card.num_tokens} tokens"


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer.readline()))
