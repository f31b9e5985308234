"""The live view in 80 columns: its cells, its keys, and what they call."""

import json
import os
import pathlib
import pty
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from phalanx_api.summary import OpenStream, StreamList
from phalanx_kubectl.__main__ import main
from phalanx_kubectl.commands import Commands
from phalanx_kubectl.frame import stream_frame
from phalanx_kubectl.transport import KubectlFailed, KubectlProgram
from phalanx_kubectl.watch import Line, Question, RowTable, WatchApp
from tests.plugin.fake_kubectl import FakeKubectl
from tests.plugin.services import METRICS, make_body
from tests.polling import until

SET = {"metadata": {"uid": "uid-1", "labels": {"phalanx.dev/service": "chat"}}}
SHOWN = Region(0, 0, 80, 3)
READY = {"conditions": [{"type": "Ready", "status": "True"}]}


class ScriptedLines:
    """`Lines` that a test writes."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._lines: queue.Queue[str | KubectlFailed | None] = queue.Queue()

    def write(self, at_s: float, *streams: OpenStream, total: int = 0) -> None:
        found = StreamList(at_s=at_s, total=total or len(streams), streams=list(streams))
        self._lines.put(msgspec.json.encode(found).decode() + "\n")

    def end(self, error: KubectlFailed | None = None) -> None:
        self._lines.put(error)

    def __iter__(self) -> Iterator[str]:
        while isinstance(line := self._lines.get(), str):
            yield line
        if line is not None:
            raise line

    def stop(self) -> None:
        self.is_stopped = True
        self.end()


class ScriptedKubectl:
    """`Kubectl` over objects in memory."""

    def __init__(self) -> None:
        self.body = make_body()
        self.body["metadata"]["uid"] = "uid-1"
        self.metrics = METRICS.replace("g-a", "chat-g-a")
        self.error = ""
        self.patches: list[list[str]] = []
        self.followed: list[ScriptedLines] = []

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

    def follow(self, *words: str) -> ScriptedLines:
        assert words[:3] == ("exec", "-i", "r-a") and words[5:8] == ("--", "phalanx-router", "streams")
        self.followed.append(ScriptedLines())
        return self.followed[-1]


class ObservedApp(WatchApp):
    """Records what it notifies of."""

    def __init__(self, kubectl: ScriptedKubectl) -> None:
        super().__init__(Commands(kubectl, print), "chat", interval_s=0.05)
        self.notices: list[str] = []

    def notify(self, message: str, **options: Any) -> None:
        self.notices.append(message)
        super().notify(message, **options)


def rows(app: WatchApp, id: str = "groups") -> dict[str, list[str]]:
    table: DataTable[str] = app.query_one(f"#{id}", DataTable)
    return {str(key.value): [str(cell) for cell in table.get_row(key)] for key in table.rows}


def line(app: WatchApp, id: str) -> str:
    return str(app.query_one(f"#{id}", Static).content)


async def ready(app: WatchApp, pilot: Pilot[None]) -> None:
    await until(lambda: len(rows(app)) == 2)
    await pilot.pause()


class LineApp(App[None]):
    def compose(self) -> ComposeResult:
        yield Line("", id="line")


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
        assert app.query_one("#groups", DataTable).virtual_size.width <= 80


async def test_wide_characters_of_a_line_are_wrapped() -> None:
    async with LineApp().run_test(size=(12, 4)) as pilot:
        shown = pilot.app.query_one(Line)
        for text, height in (("nine_long", 1), ("\u6f22" * 9, 2), ("short", 1)):
            shown.show([text])
            await pilot.pause()
            assert shown.size.height == height


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


def stream(number: int, **fields: Any) -> OpenStream:
    made = OpenStream(
        number=number, tenant="team", group="chat-g-a", prompt_tokens=900, tokens=10, age_s=5.0, moves=0, moving_to="", left=""
    )
    return msgspec.structs.replace(made, **fields)


async def test_streams_are_shown_as_they_run_and_move() -> None:
    kubectl = ScriptedKubectl()
    app = ObservedApp(kubectl)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        assert not app.query_one("#streams").display and kubectl.followed == [], "only on demand: it needs more rights"
        await pilot.press("s")
        await until(lambda: len(kubectl.followed) == 1)
        (lines,) = kubectl.followed
        lines.write(100.0, stream(1), stream(2, moving_to="chat-g-b"), total=70)
        await until(lambda: list(rows(app, "streams")) == ["r-a/2", "r-a/1"])
        assert rows(app, "streams")["r-a/2"] == ["2", "team", "chat-g-a", "5s", "900", "10", "-", "to chat-g-b"]
        assert line(app, "streams-head") == "2 of 70 streams, moving ones first, then the oldest"
        lines.write(102.0, stream(1, tokens=50), stream(2, tokens=15, group="chat-g-b", moves=1, left="chat-g-a"))
        await until(lambda: rows(app, "streams")["r-a/2"][5] == "15")
        assert [row[6:] for row in rows(app, "streams").values()] == [["2.5/s", "1 from …at-g-a"], ["20/s", "-"]]
        assert app.query_one("#streams", DataTable).virtual_size.width <= 80
        await pilot.press("s")
        assert lines.is_stopped and not app.query_one("#streams").display


@pytest.mark.parametrize("name", ["[/x]", "[red]a", ":bug:", "a\\"])
async def test_names_of_tenants_are_no_markup(name: str) -> None:
    app = ObservedApp(ScriptedKubectl())
    async with app.run_test(size=(80, 24)) as pilot:
        app.query_one("#view").add_class("with-streams")
        app.show_streams(stream_frame({"r-a": (StreamList(at_s=1.0, total=1, streams=[stream(7, tenant=name)]), None)}))
        await until(lambda: list(rows(app, "streams")) == ["r-a/7"])
        await pilot.pause()
        drawn = "\n".join("".join(segment.text for segment in strip) for strip in app.query_one("#streams").render_lines(SHOWN))
        assert f" {name} " in drawn


async def test_streams_are_followed_again_after_an_end() -> None:
    kubectl = ScriptedKubectl()
    app = ObservedApp(kubectl)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await pilot.press("s")
        await until(lambda: len(kubectl.followed) == 1)
        kubectl.followed[0].end()
        await until(lambda: len(kubectl.followed) == 2)
        kubectl.followed[1].end(KubectlFailed("usage: ...\npods is forbidden"))
        await until(lambda: line(app, "foot").endswith("streams of router r-a: pods is forbidden"))
        await until(lambda: len(kubectl.followed) == 3)
        kubectl.followed[2].write(1.0, stream(7))
        await until(lambda: list(rows(app, "streams")) == ["r-a/7"])
    await until(lambda: kubectl.followed[2].is_stopped)


async def test_cursor_stays_at_its_stream() -> None:
    app = ObservedApp(ScriptedKubectl())
    async with app.run_test(size=(80, 24)):
        table = app.query_one("#streams", RowTable)
        table.show_rows({name: [name] * 8 for name in "abc"})
        table.move_cursor(row=1)
        table.show_rows({name: [name] * 8 for name in "cbd"})
        assert ([str(key.value) for key in table.rows], table.chosen) == (list("cbd"), "b")


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
    listed = StreamList(at_s=1.0, total=1, streams=[stream(7)])
    fake.answer("phalanx-router streams", msgspec.json.encode(listed).decode() + "\n")


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


def test_followed_program_ends_when_it_is_stopped(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho $1\nexec sleep 600\n")
    program.chmod(0o755)
    lines = KubectlProgram(str(program), ["--flag"]).follow("exec")
    found = iter(lines)
    assert next(found) == "--flag\n"
    lines.stop()
    assert list(found) == []


def test_followed_program_that_fails_says_why(tmp_path: pathlib.Path) -> None:
    FakeKubectl(tmp_path).answer("nothing", "")
    with pytest.raises(KubectlFailed, match="NotFound"):
        list(KubectlProgram(str(tmp_path / "kubectl")).follow("exec"))
    with pytest.raises(KubectlFailed, match="cannot be run"):
        KubectlProgram(str(tmp_path / "missing")).follow("exec")


def test_view_ends_while_kubectl_hangs(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    program.chmod(0o755)
    env: dict[str, Any] = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "TERM": "xterm"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    terminal = Terminal([sys.executable, "-m", "phalanx_kubectl", "watch", "chat"], env)
    try:
        terminal.until(lambda shown: "reading ..." in shown and (tmp_path / "pid").exists())
        terminal.press("q")
    finally:
        status = terminal.end()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it still runs
    assert status == 0 and "Traceback" not in terminal.shown, terminal.shown[-2000:]


def test_program_on_a_terminal_writes_changes_and_follows_logs(tmp_path: pathlib.Path) -> None:
    fake = FakeKubectl(tmp_path)
    answers(fake)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env: dict[str, Any] = {**os.environ, "PATH": path, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    terminal = Terminal([sys.executable, "-m", "phalanx_kubectl", "watch", "chat", "--interval", "0.2"], env)
    try:
        terminal.until(lambda shown: "chat-g-a" in shown and "41%" in shown)
        whole, written = len(terminal.shown), list[int]()
        for share in range(46, 51):  # of a change may also be drawn what the frame before left
            before = len(terminal.shown)
            fake.change("get --raw", METRICS.replace("g-a", "chat-g-a").replace("} 0.41", f"}} 0.{share}"))
            terminal.until(lambda shown, share=share: f"{share}%" in shown)  # type: ignore[misc]
            written.append(len(terminal.shown) - before)
        assert min(written) < 200 < whole, "a slow line carries only what changed"
        terminal.press("s")
        terminal.until(lambda shown: "1 stream" in shown and "900" in shown)
        terminal.press("l")
        terminal.until(lambda shown: "a line of the leader" in shown and "press Enter" in shown)
        before = len(terminal.shown)
        terminal.press("\n")
        terminal.until(lambda shown: "chat-g-a" in shown[before:])
        terminal.press("q")
    finally:
        status = terminal.end()
    assert status == 0, terminal.shown[-2000:]
