"""Targets of the fuzzer that fail in each way, as a child of its runner."""

import ctypes
import sys
from random import Random

from bench.fuzz.child import main
from bench.fuzz.targets import Defect, Kind, Outcome, Target


class Victim(Target):
    """Accepts even choices, refuses odd ones, and fails in its way at the fourth case."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._cases = -3  # those that warm up

    def run(self, draw: Random) -> Outcome:
        """Runs one case."""
        self._cases += 1
        if self._cases == 4:
            self._fail()
        return "accepted" if self._cases % 2 else "refused"

    def _fail(self) -> None:
        match self._way:
            case "wrong":
                raise Defect("wrong answer")
            case "crash":
                ctypes.string_at(0)
            case "memory":
                bytearray(8 << 30)
            case "exit":
                sys.exit(3)


if __name__ == "__main__":
    ways = ("wrong", "crash", "memory", "exit")

    def opening(way: str) -> Kind:
        """Returns the kind that fails in this way."""
        return Kind(way, lambda folder: Victim(way), "files")

    main(sys.argv[1:], {way: opening(way) for way in ways})
