"""Commands `phalanx-router serve`, the router of one InferenceService, and `phalanx-router purge-cache`."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 after an exception. Raises SystemExit 2 for a bad flag.

    A signal during the import exits with 0.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["purge-cache"]:
        from phalanx_router import purge

        return purge.run(arguments)
    before = signal.signal(signal.SIGTERM, _end_at_once)
    try:
        from phalanx_router.program import run

        return run(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
