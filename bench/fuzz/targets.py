"""What the fuzzer attacks: one target per kind of case."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

Outcome = Literal["accepted", "refused"]


class Defect(Exception):
    """A case is answered in a way that the product's documents exclude."""


class Target(ABC):
    """One loader or server."""

    @abstractmethod
    def run(self, draw: Random) -> Outcome:
        """Makes one case and returns how it is answered. Raises Defect, or what the product raises wrongly."""

    def close(self) -> None:  # noqa: B027 -- most targets hold nothing open
        """Ends what the target started."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of case."""

    name: str
    open: Callable[[Path], Target]
    """Opens the target with an empty folder for its files."""
    group: Literal["requests", "sockets", "files"]


def kinds() -> Mapping[str, Kind]:
    """Returns all kinds by name. Their modules are loaded when a target is opened."""

    def requests(folder: Path) -> Target:
        from bench.fuzz.requests import Requests

        return Requests(folder)

    def sockets(folder: Path) -> Target:
        from bench.fuzz.sockets import Sockets

        return Sockets(folder)

    def checkpoint(name: str) -> Callable[[Path], Target]:
        def open_target(folder: Path) -> Target:
            from bench.fuzz import checkpoints

            return checkpoints.LOADERS[name](folder)

        return open_target

    def integers(folder: Path) -> Target:
        from bench.fuzz.integers import Integers

        return Integers(folder)

    def adapters(folder: Path) -> Target:
        from bench.fuzz.adapters import Adapters

        return Adapters(folder)

    def processors(folder: Path) -> Target:
        from bench.fuzz.processors import Processors

        return Processors(folder)

    def towers(folder: Path) -> Target:
        from bench.fuzz.towers import Towers

        return Towers(folder)

    def text(name: str) -> Callable[[Path], Target]:
        def open_target(folder: Path) -> Target:
            from bench.fuzz import texts

            return texts.LOADERS[name](folder)

        return open_target

    def upload(name: str) -> Callable[[Path], Target]:
        def open_target(folder: Path) -> Target:
            from bench.fuzz import uploads

            return uploads.LOADERS[name](folder)

        return open_target

    found = [Kind("requests", requests, "requests"), Kind("sockets", sockets, "sockets")]
    found += [Kind(name, checkpoint(name), "files") for name in ("gguf", "safetensors", "config", "archive")]
    found += [Kind("integers", integers, "files"), Kind("adapter", adapters, "files"), Kind("processor", processors, "files")]
    found.append(Kind("tower", towers, "files"))
    found += [Kind(name, text(name), "files") for name in ("tokenizer", "template", "grammar", "keys")]
    found += [Kind(name, upload(name), "files") for name in ("image", "batch")]
    return {kind.name: kind for kind in found}


def case_random(kind: str, seed: int, index: int) -> Random:
    """Returns the source of all choices of a case."""
    return Random(f"{kind}:{seed}:{index}")
