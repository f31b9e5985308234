"""`phalanx-router serve`: the front door of one InferenceService."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 after SIGTERM or SIGINT, 1 after a bug. Raises SystemExit 2 for a bad flag.

    Importing the program takes a second: who is told to end meanwhile ends with status 0.
    """
    before = signal.signal(signal.SIGTERM, _end_at_once)
    try:
        from phalanx_router.program import run

        return run(sys.argv[1:] if arguments is None else arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing serves yet, so there is nothing to end."""
    sys.exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
