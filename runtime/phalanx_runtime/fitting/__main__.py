"""`python -m phalanx_runtime.fitting`: reads a FitSpec from stdin, writes the exit file, prints the agreement."""

import os
import sys
import time
from pathlib import Path

import msgspec

from phalanx_runtime.commands import FitSpec
from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank.process.cgroup import rank_threads, wait_briefly


def main(line: bytes) -> int:
    """Exit code: 0 on success, 1 on failure, with the reason on stderr."""
    spec = msgspec.json.decode(line, type=FitSpec)
    wait_briefly(os.environ)
    began = time.monotonic()
    try:
        print(f"{spec.out}: {_made(spec)} in {time.monotonic() - began:.0f} s")
    except ModelError as error:
        print(f"phalanx-runtime fit-exit: {error}", file=sys.stderr)
        return 1
    return 0


def _made(spec: FitSpec) -> str:
    """Fits and returns a summary. Imports torch here, after its thread settings are in the environment."""
    import torch

    from phalanx_runtime.fitting.fit import fit
    from phalanx_runtime.model.decoder.exit import write_exit
    from phalanx_runtime.rank.process.cgroup import System, cpu_limit

    torch.set_num_threads(rank_threads(None, cpu_limit(System()), 1))
    made = fit(spec, torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic)
    write_exit(Path(spec.out), made)
    card = made.card
    agreement = f"{card.agreement_raw:.1%} raw, {card.agreement_fitted:.1%} fitted"
    return f"{card.num_layers} layers agree with the model on held-out text: {agreement}; fitted on {card.num_tokens} tokens"


if __name__ == "__main__":
    sys.exit(main(sys.stdin.buffer.readline()))
