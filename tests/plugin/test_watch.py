"""The live view in 80 columns: its cells, its keys, and what they call."""

import json
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from phalanx_kubectl.__main__ import main
from phalanx_kubectl.commands import Commands
from phalanx_kubectl.transport import KubectlFailed
from phalanx_kubectl.watch import Question, WatchApp
from tests.plugin.fake_kubectl import FakeKubectl
from tests.plugin.services import METRICS, make_body
from tests.polling import until

SET = {"metadata": {"uid": "uid-1", "labels": {"phalanx.dev/service": "chat"}}}
READY = {"conditions": [{"type": "Ready", "status": "True"}]}


class ScriptedKubectl:
    """`Kubectl` over objects in memory."""

    def __init__(self) -> None:
        self.body = make_body()
        self.body["metadata"]["uid"] = "uid-1"
        self.metrics = METRICS.replace("g-a", "chat-g-a")
        self.error = ""
        self.patches: list[list[str]] = []

    def read(self, *words: str) -> str:
        if self.error:
            raise KubectlFailed(self.error)
        match words[:2]:
            case ("get", "pods"):
                return json.dumps({"items": [{"metadata": {"name": "r-a"}, "status": READY | {"phase": "Running"}}]})
            case ("exec", _):
                return '{"targets": {}, "obstacles": []}'
            case ("get", "--raw"):
                return self.metrics
            case ("get", "statefulset"):
                return json.dumps(SET)
            case ("patch", _):
                self.patches.append([*words[1:3], words[-1]])
                return ""
            case _:
                return json.dumps(self.body)

    def run_attached(self, *words: str) -> int:
        raise NotImplementedError


class ObservedApp(WatchApp):
    """Records what it notifies of."""

    def __init__(self, kubectl: ScriptedKubectl) -> None:
        super().__init__(Commands(kubectl, print), "chat", interval_s=0.05)
        self.notices: list[str] = []

    def notify(self, message: str, **options: Any) -> None:
        self.notices.append(message)
        super().notify(message, **options)


def rows(app: WatchApp) -> dict[str, list[str]]:
    table: DataTable[str] = app.query_one(DataTable)
    return {str(key.value): [str(cell) for cell in table.get_row(key)] for key in table.rows}


def line(app: WatchApp, id: str) -> str:
    return str(app.query_one(f"#{id}", Static).content)


async def ready(app: WatchApp, pilot: Pilot[None]) -> None:
    await until(lambda: len(rows(app)) == 2)
    await pilot.pause()


async def test_view_follows_groups() -> None:
    kubectl = ScriptedKubectl()
    app = ObservedApp(kubectl)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        assert rows(app)["chat-g-a"][:7] == ["chat-g-a", "Ready", "5", "8", "0", "25%", "41%"]
        assert "team/chat RollingOut: 1 of 2 groups ready" in line(app, "head")
        kubectl.metrics = kubectl.metrics.replace('streams{group="chat-g-a"} 5.0', 'streams{group="chat-g-a"} 9.0')
        await until(lambda: rows(app)["chat-g-a"][2] == "9")
        kubectl.body["status"]["groups"] = [{"name": "chat-g-c", "phase": "Starting"}]
        await until(lambda: set(rows(app)) == {"chat-g-a", "chat-g-c"})
        table: DataTable[str] = app.query_one(DataTable)
        assert table.virtual_size.width <= 80


async def test_view_lives_through_errors_of_kubectl() -> None:
    kubectl = ScriptedKubectl()
    app = ObservedApp(kubectl)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        kubectl.error = "Unable to connect to the server"
        await until(lambda: "not up to date: Unable to connect" in line(app, "foot"))
        assert len(rows(app)) == 2, "the last reading stays"
        kubectl.error = ""
        await until(lambda: "not up to date" not in line(app, "foot"))


async def test_keys_drain_and_pause_after_a_question() -> None:
    kubectl = ScriptedKubectl()
    app = ObservedApp(kubectl)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await pilot.press("d")
        await until(lambda: isinstance(app.screen, Question))
        await pilot.press("n")
        await until(lambda: not isinstance(app.screen, Question))
        assert kubectl.patches == [], "no"
        await pilot.press("down", "d")
        await until(lambda: isinstance(app.screen, Question))
        await pilot.press("y")
        await until(lambda: len(kubectl.patches) == 1)
        assert kubectl.patches[0][:2] == ["statefulset", "chat-g-b"] and "asked" in kubectl.patches[0][2]
        await until(lambda: not isinstance(app.screen, Question))
        await pilot.press("m")
        await until(lambda: isinstance(app.screen, Question))
        await pilot.press("y")
        await until(lambda: any("chat-g-b has no stream" in notice for notice in app.notices))
        await pilot.press("p", "y")
        await until(lambda: len(kubectl.patches) == 2)
        assert json.loads(kubectl.patches[1][2]) == {"spec": {"rollout": {"paused": True}}}
        kubectl.body["spec"]["rollout"] = {"paused": True}
        await until(lambda: "rollout paused" in line(app, "head"))
        await pilot.press("p", "y")
        await until(lambda: len(kubectl.patches) == 3)
        assert json.loads(kubectl.patches[2][2]) == {"spec": {"rollout": {"paused": False}}}


async def test_failed_commands_are_shown() -> None:
    kubectl = ScriptedKubectl()
    app = ObservedApp(kubectl)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await ready(app, pilot)
        await pilot.press("e")
        await until(lambda: "no router of chat answers" in app.notices)
        await pilot.press("l")
        await until(lambda: "this terminal cannot show logs" in app.notices)


def test_once_prints_a_frame(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    answers(FakeKubectl(tmp_path))
    with pytest.raises(SystemExit) as exited:
        main(["watch", "chat", "--once"])
    assert exited.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("team/chat RollingOut") and "\nchat-g-a" in printed
    assert max(map(len, printed.splitlines())) <= 80


def answers(fake: FakeKubectl) -> None:
    pods = "get pods -l phalanx.dev/service=chat,phalanx.dev/component="
    fake.answer("get inferenceservices.phalanx.dev chat", make_body())
    fake.answer(
        pods + "router",
        {"items": [{"metadata": {"name": "r-a"}, "status": READY | {"phase": "Running"}}]},
    )
    fake.answer("get --raw", METRICS.replace("g-a", "chat-g-a"))
    fake.answer(pods + "group", {"items": [{"metadata": {"name": "chat-g-a-0"}}]})
    fake.answer("logs -l", "a line of the leader\n")


class Terminal:
    """The program on a terminal of 80 columns."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.shown = ""
        self._process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
        os.close(slave)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, condition: Callable[[str], bool], limit_s: float = 60.0) -> None:
        end = time.monotonic() + limit_s
        while not condition(self.shown):
            assert time.monotonic() < end, self.shown[-2000:]
            if select.select([self._master], [], [], 0.2)[0]:
                self.shown += os.read(self._master, 65536).decode(errors="replace")

    def end(self) -> int:
        """Reads the rest, and returns the exit status."""
        end = time.monotonic() + 30
        try:
            while self._process.poll() is None and time.monotonic() < end:
                if select.select([self._master], [], [], 0.2)[0]:
                    self.shown += os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the terminal has closed
            pass
        finally:
            if self._process.poll() is None and time.monotonic() >= end:
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self._master)
        return self._process.wait(30)


def test_program_follows_logs_on_a_terminal_and_comes_back(tmp_path: pathlib.Path) -> None:
    answers(FakeKubectl(tmp_path))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env: dict[str, Any] = {**os.environ, "PATH": path, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    terminal = Terminal([sys.executable, "-m", "phalanx_kubectl", "watch", "chat", "--interval", "0.2"], env)
    try:
        terminal.until(lambda shown: "chat-g-a" in shown and "41%" in shown)
        terminal.press("l")
        terminal.until(lambda shown: "a line of the leader" in shown and "press Enter" in shown)
        before = len(terminal.shown)
        terminal.press("\n")
        terminal.until(lambda shown: "chat-g-a" in shown[before:])
        terminal.press("q")
    finally:
        status = terminal.end()
    assert status == 0, terminal.shown[-2000:]
