"""The live view of `kubectl phalanx watch`. Only changed cells are sent to the terminal, so a slow ssh line suffices."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import ClassVar, Self, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Region
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from phalanx_kubectl.commands import Commands
from phalanx_kubectl.following import StreamFollower
from phalanx_kubectl.frame import (
    COLUMNS,
    STREAM_COLUMNS,
    STREAM_WIDTHS,
    WIDTHS,
    Frame,
    Reading,
    StreamFrame,
    frame,
    is_paused,
    stream_frame,
)
from phalanx_kubectl.transport import KubectlFailed

T = TypeVar("T")
INTERVAL_S = 3.0
"""Between readings: each costs a router 10 to 20 ms for 64 groups."""
LOG_LINES = 100


async def in_background(call: Callable[[], T]) -> T:
    """Returns the result of a call that only reads, or raises its error. The program does not wait for it at its end."""
    done = Future[T]()
    done.set_running_or_notify_cancel()  # a cancelled future would refuse its result

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


class Question(ModalScreen[bool]):
    """Asks whether to do something; `y` does it."""

    CSS = "Question { align: center middle; } Question Static { width: 60; padding: 1 2; border: round $warning; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "answer(True)", "yes"), Binding("n,escape,q", "answer(False)", "no")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Yields the text."""
        yield Static(f"{self._question}\n\ny: yes   n: no", markup=False)

    def action_answer(self, is_yes: bool) -> None:
        """Closes the question."""
        self.dismiss(is_yes)


class RowTable(DataTable[Text]):
    """A table that changes only the cells that differ. Its cells are literal: a tenant's name may look like markup."""

    _draws_cells = False

    def __init__(self, columns: Sequence[str], widths: Sequence[int], id: str) -> None:
        super().__init__(cursor_type="row", id=id)
        self._widths = dict(zip(columns, widths, strict=True))

    def on_mount(self) -> None:
        """Adds the columns."""
        for column, width in self._widths.items():
            self.add_column(column, width=width, key=column)

    @property
    def chosen(self) -> str | None:
        """Key of the row under the cursor."""
        return None if not self.row_count else self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        """Draws again: all but while single cells change, which `DataTable` answers by drawing all."""
        if self._draws_cells and not regions:
            return self
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def _change(self, name: str, column: str, cell: str) -> None:
        """Changes a cell, and draws no other one."""
        self._draws_cells = True
        self.update_cell(name, column, Text(cell))
        self.refresh_coordinate(self.get_cell_coordinate(name, column))
        self._draws_cells = False

    def show_rows(self, new: Mapping[str, Sequence[str]]) -> None:
        """Shows these rows in their order; the cursor stays at its row."""
        old, chosen = [str(key.value) for key in self.rows], self.chosen
        kept = [name for name in old if name in new]
        if kept != list(new)[: len(kept)]:
            self.clear()
            old = kept = []
        for name in set(old) - set(kept):
            self.remove_row(name)
        for name, row in new.items():
            if name not in self.rows:
                self.add_row(*map(Text, row), key=name)
                continue
            for column, cell, former in zip(self._widths, row, self.get_row(name), strict=True):
                if cell != former.plain:
                    self._change(name, column, cell)
        if not kept and chosen is not None and chosen in new:
            self.move_cursor(row=self.get_row_index(chosen))


class Line(Static):
    """Lines of text that are drawn only if they change."""

    def __init__(self, text: str, id: str) -> None:
        super().__init__(text, id=id, markup=False)

    def show(self, lines: Sequence[str]) -> None:
        """Shows these lines."""
        text, former = "\n".join(lines), str(self.content)
        if text != former:
            height = self._height(text)
            is_same = height is not None and height == self._height(former)
            self.update(text, layout=not is_same)  # a layout draws the whole screen

    def _height(self, text: str) -> int | None:
        """Rows of the screen; unknown if a line is wrapped, or before the first layout."""
        lines = text.split("\n")
        return len(lines) if all(Content(line).cell_length <= self.content_size.width for line in lines) else None


class WatchApp(App[None]):
    """Groups of one service, and its streams on demand, refreshed every `interval_s` seconds."""

    CSS = """
    Static { padding: 0 1; }
    #foot { color: $warning; max-height: 8; }
    DataTable { height: 1fr; }
    #streams-head, #streams { display: none; }
    .with-streams #streams-head, .with-streams #streams { display: block; }
    .with-streams #groups { height: auto; max-height: 40%; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "drain", "drain"),
        Binding("m", "move", "move a stream"),
        Binding("s", "streams", "streams"),
        Binding("p", "pause", "pause rollout"),
        Binding("l", "logs", "logs"),
        Binding("e", "explain", "explain"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, commands: Commands, name: str, interval_s: float = INTERVAL_S) -> None:
        super().__init__()
        self.animation_level = "none"
        self._commands = commands
        self._service_name = name
        self._interval_s = interval_s
        self._last_reading: Reading | None = None
        self._follower: StreamFollower | None = None
        self._head = Line("reading ...", id="head")
        self._table = RowTable(COLUMNS, WIDTHS, id="groups")
        self._streams_head = Line("", id="streams-head")
        self._streams = RowTable(STREAM_COLUMNS, STREAM_WIDTHS, id="streams")
        self._foot = Line("", id="foot")

    def compose(self) -> ComposeResult:
        """Yields the parts of the screen, from top to bottom."""
        with Vertical(id="view"):
            yield from (self._head, self._table, self._streams_head, self._streams, self._foot)
            yield Footer()

    def on_mount(self) -> None:
        """Starts to read."""
        self.run_worker(self._follow(), exclusive=True)

    def on_unmount(self) -> None:
        """Ends the commands that follow streams."""
        if self._follower is not None:
            self._follower.stop()

    async def _follow(self) -> None:
        while True:
            try:
                now = await in_background(lambda: self._commands.reading(self._service_name))
                self.show_frame(frame(now, self._last_reading))
                self._last_reading = now
                if self._follower is not None:
                    self._follower.follow(now.routers.keys())
            except KubectlFailed as error:
                self._foot.show([f"not up to date: {error}"])
            self._show_streams()
            await asyncio.sleep(self._interval_s)

    def show_frame(self, new: Frame) -> None:
        """Changes the cells that differ from the last frame, and draws them at once."""
        errors = self._follower.errors() if self._follower is not None else []
        with self.batch_update():
            self._table.show_rows(new.rows)
            self._head.show(new.head)
            self._foot.show([*new.foot, *errors])

    def _show_streams(self) -> None:
        """Shows the newest streams, if there are any lists."""
        if self._follower is not None and (lists := self._follower.lists()):
            self.show_streams(stream_frame(lists))

    def show_streams(self, new: StreamFrame) -> None:
        """Changes the cells of the streams that differ from the last frame."""
        with self.batch_update():
            self._streams.show_rows(new.rows)
            self._streams_head.show([new.head])

    def action_streams(self) -> None:
        """Shows the streams of the service, or hides them."""
        if self._follower is None:
            self._follower = self._commands.stream_follower(self._interval_s)
            self._streams_head.show(["reading streams ..."])
        else:
            self._follower.stop()
            self._follower = None
        self.query_one("#view").set_class(self._follower is not None, "with-streams")

    def action_drain(self) -> None:
        """Asks, then drains the group under the cursor."""
        if group := self._table.chosen:
            question = f"Drain {group}? Its streams move to other groups, and a new group replaces it."
            self._ask(question, lambda: self._commands.drain(self._service_name, group))

    def action_move(self) -> None:
        """Asks, then moves a stream of the group under the cursor."""
        if group := self._table.chosen:
            question = f"Move a stream of {group} to the group with the fewest requests?"
            self._ask(question, lambda: self._commands.move(self._service_name, group))

    def action_pause(self) -> None:
        """Asks, then pauses the rollout, or resumes a paused one."""
        if self._last_reading is not None:
            paused = is_paused(self._last_reading.service)
            question = f"{'Resume' if paused else 'Pause'} the rollout of {self._service_name}?"
            self._ask(question, lambda: self._commands.pause_rollout(self._service_name, is_paused=not paused))

    def action_explain(self) -> None:
        """Shows what limits the service."""
        self._execute(lambda: self._commands.explain(self._service_name))

    def action_logs(self) -> None:
        """Follows the logs of the group under the cursor on the terminal until Ctrl-C."""
        if group := self._table.chosen:
            try:
                with self.suspend():
                    self._follow_logs(group)
            except SuspendNotSupported:
                self.notify("this terminal cannot show logs", severity="warning")

    def _follow_logs(self, group: str) -> None:
        try:
            self._commands.logs(self._service_name, group, follow=True, tail=LOG_LINES)
        except KeyboardInterrupt:
            return
        except KubectlFailed as error:
            print(f"error: {error}")
        input("-- press Enter to go back --")

    def _ask(self, question: str, command: Callable[[], str]) -> None:
        self.push_screen(Question(question), lambda is_yes: self._execute(command) if is_yes else None)

    def _execute(self, command: Callable[[], str]) -> None:
        """Runs a command beside the view, and shows its text."""

        async def run() -> None:
            try:
                self.notify((await asyncio.to_thread(command)).strip(), timeout=20, markup=False)
            except KubectlFailed as error:
                self.notify(str(error), severity="error", timeout=20, markup=False)

        self.run_worker(run())
