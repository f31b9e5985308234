"""A cache folder that several pods share (ReadWriteMany): processes that download the same model concurrently."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.runtime.checkpoint.hub import FILES, NAME, WEIGHTS, HubServer, names

SERVED = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
HELD_AFTER = 200_000


class Loader:
    """A `phalanx-runtime fetch` process."""

    def __init__(self, hub: HubServer, cache: Path) -> None:
        command = (sys.executable, "-m", "phalanx_runtime", "fetch", f"hf://{NAME}", "--download-dir", str(cache))
        self.process = subprocess.Popen(
            command, env=os.environ | {"HF_ENDPOINT": hub.endpoint}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def is_at_lock(self) -> bool:
        """Whether it holds the lock or waits for it."""
        return self._has_open(".lock")

    def is_downloading(self) -> bool:
        """Whether it downloads a file."""
        return self._has_open(".incomplete")

    def _has_open(self, suffix: str) -> bool:
        files: list[str] = []
        for file in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since the listing
                files.append(os.readlink(file))
        return any(file.endswith(suffix) for file in files)

    def folder(self) -> Path:
        """Returns the printed folder, once the process ends."""
        output, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        return Path(output.strip())


Start = Callable[[], Loader]


@pytest.fixture
def start(server: HubServer, tmp_path: Path) -> Iterator[Start]:
    """Starts loaders that share a folder and ends them after the test."""
    server.add(NAME, FILES)
    loaders: list[Loader] = []

    def start_loader() -> Loader:
        loaders.append(Loader(server, tmp_path / "claim"))
        return loaders[-1]

    yield start_loader
    for loader in loaders:
        loader.process.kill()
        loader.process.communicate()


@pytest.fixture
def resume(server: HubServer) -> Iterator[threading.Event]:
    """Set it to make the hub send the rest of the weights."""
    gate = threading.Event()
    server.hold_after["model.safetensors"] = (HELD_AFTER, gate)
    yield gate
    gate.set()


def test_concurrent_loaders_fetch_once(server: HubServer, start: Start, resume: threading.Event) -> None:
    loaders = [start() for _ in range(2)]
    wait_until(lambda: all(loader.is_at_lock() for loader in loaders))
    resume.set()
    folders = {loader.folder() for loader in loaders}
    (folder,) = folders
    assert names(folder) == SERVED and (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(request.path.rpartition("/")[2] for request in server.requests if "/resolve/" in request.path) == sorted(SERVED)
    assert sum(request.sent_bytes for request in server.requests_for("model.safetensors")) == len(WEIGHTS)
    assert sorted(path.suffix for path in folder.parent.iterdir() if path.is_file()) == [".lock"], "and no half folder"


def test_another_loader_resumes_a_killed_download(
    server: HubServer, start: Start, resume: threading.Event, tmp_path: Path
) -> None:
    loaders = [start() for _ in range(2)]
    wait_until(lambda: all(loader.is_at_lock() for loader in loaders))
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.rglob("model.safetensors.incomplete")))
    first, second = sorted(loaders, key=Loader.is_downloading, reverse=True)
    assert first.is_downloading() and not second.is_downloading()
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(60)
    resume.set()
    folder = second.folder()
    assert names(folder) == SERVED and (folder / "model.safetensors").read_bytes() == WEIGHTS
    interrupted, resumed = server.requests_for("model.safetensors")
    assert interrupted.range is None and resumed.range is not None and resumed.sent_bytes < len(WEIGHTS)
