"""One folder that several pods may write to, as a claim with ReadWriteMany is: real processes fetch the same model at once."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runtime.checkpoint.hub import FILES, NAME, WEIGHTS, HubServer, names, server

__all__ = ["server"]
SERVED = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
HELD_AFTER = 200_000


class Loader:
    """`phalanx-runtime fetch` in a process of its own: what a pod that starts does before anything else."""

    def __init__(self, hub: HubServer, cache: Path) -> None:
        command = (sys.executable, "-m", "phalanx_runtime", "fetch", f"hf://{NAME}", "--download-dir", str(cache))
        self.process = subprocess.Popen(
            command, env=os.environ | {"HF_ENDPOINT": hub.endpoint}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def is_at_lock(self) -> bool:
        """Whether it has found that the model is not there, and holds the lock or waits for it."""
        return self._has_open(".lock")

    def fetches(self) -> bool:
        """Whether it is the one that holds the lock, and has begun with a file."""
        return self._has_open(".incomplete")

    def _has_open(self, suffix: str) -> bool:
        files: list[str] = []
        for file in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it closed this one meanwhile
                files.append(os.readlink(file))
        return any(file.endswith(suffix) for file in files)

    def folder(self) -> Path:
        """Where it says that the model lies."""
        said, trouble = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, trouble
        return Path(said.strip())


Start = Callable[[], Loader]


@pytest.fixture
def start(server: HubServer, tmp_path: Path) -> Iterator[Start]:
    """Starts loaders that share a folder; none outlives the test."""
    server.add(NAME, FILES)
    made: list[Loader] = []

    def begin() -> Loader:
        made.append(Loader(server, tmp_path / "claim"))
        return made[-1]

    yield begin
    for loader in made:
        loader.process.kill()
        loader.process.communicate()


@pytest.fixture
def go_on(server: HubServer) -> Iterator[threading.Event]:
    """The hub sends the first part of the weights, and the rest when this is set."""
    gate = threading.Event()
    server.hold_after["model.safetensors"] = (HELD_AFTER, gate)
    yield gate
    gate.set()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_concurrent_loaders_fetch_once(server: HubServer, start: Start, go_on: threading.Event) -> None:
    loaders = [start() for _ in range(2)]
    until(lambda: all(loader.is_at_lock() for loader in loaders))
    go_on.set()
    folders = {loader.folder() for loader in loaders}
    (folder,) = folders
    assert names(folder) == SERVED and (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(seen.path.rpartition("/")[2] for seen in server.seen if "/resolve/" in seen.path) == sorted(SERVED)
    assert sum(seen.sent for seen in server.asked_for("model.safetensors")) == len(WEIGHTS)
    assert sorted(path.suffix for path in folder.parent.iterdir() if path.is_file()) == [".lock"], "and no half folder"


def test_another_loader_resumes_a_killed_download(
    server: HubServer, start: Start, go_on: threading.Event, tmp_path: Path
) -> None:
    loaders = [start() for _ in range(2)]
    until(lambda: all(loader.is_at_lock() for loader in loaders))
    until(lambda: any(path.stat().st_size for path in tmp_path.rglob("model.safetensors.incomplete")))
    first, second = sorted(loaders, key=Loader.fetches, reverse=True)
    assert first.fetches() and not second.fetches()
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(60)
    go_on.set()
    folder = second.folder()
    assert names(folder) == SERVED and (folder / "model.safetensors").read_bytes() == WEIGHTS
    begun, continued = server.asked_for("model.safetensors")
    assert begun.range is None and continued.range is not None and continued.sent < len(WEIGHTS)
