"""The live view of `kubectl phalanx watch`. Only changed cells are sent to the terminal, so a slow ssh line suffices."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from textual.app import App, ComposeResult, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from phalanx_kubectl.commands import Commands
from phalanx_kubectl.frame import COLUMNS, WIDTHS, Frame, Reading, frame, is_paused
from phalanx_kubectl.transport import KubectlFailed

INTERVAL_S = 3.0
"""Between readings: each costs a router 10 to 20 ms for 64 groups."""
LOG_LINES = 100


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


class WatchApp(App[None]):
    """Groups of one service, refreshed every `interval_s` seconds."""

    CSS = "#head { padding: 0 1; } #foot { padding: 0 1; color: $warning; max-height: 8; } DataTable { height: 1fr; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "drain", "drain"),
        Binding("m", "move", "move a stream"),
        Binding("p", "pause", "pause/resume rollout"),
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
        self._shown: Frame | None = None
        self._head = Static("reading ...", id="head", markup=False)
        self._table: DataTable[str] = DataTable(cursor_type="row")
        self._foot = Static("", id="foot", markup=False)

    def compose(self) -> ComposeResult:
        """Yields the parts of the screen, from top to bottom."""
        with Vertical():
            yield from (self._head, self._table, self._foot)
            yield Footer()

    def on_mount(self) -> None:
        """Starts to read."""
        for column, width in zip(COLUMNS, WIDTHS, strict=True):
            self._table.add_column(column, width=width, key=column)
        self.run_worker(self._follow(), exclusive=True)

    @property
    def _chosen_group(self) -> str | None:
        """The group under the cursor."""
        table = self._table
        return None if not table.row_count else table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    async def _follow(self) -> None:
        while True:
            try:
                now = await asyncio.to_thread(self._commands.reading, self._service_name)
                self.show_frame(frame(now, self._last_reading))
                self._last_reading = now
            except KubectlFailed as error:
                self._foot.update(f"not up to date: {error}")
            await asyncio.sleep(self._interval_s)

    def show_frame(self, new: Frame) -> None:
        """Changes the cells that differ from the last frame, and draws them at once."""
        with self.batch_update():
            self._change_rows(self._shown.rows if self._shown is not None else {}, new.rows)
            self._head.update("\n".join(new.head))
            self._foot.update("\n".join(new.foot))
        self._shown = new

    def _change_rows(self, old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> None:
        table = self._table
        for name in old.keys() - new.keys():
            table.remove_row(name)
        for name, row in new.items():
            if name not in old:
                table.add_row(*row, key=name)
                continue
            for column, cell, former in zip(COLUMNS, row, old[name], strict=True):
                if cell != former:
                    table.update_cell(name, column, cell)

    def action_drain(self) -> None:
        """Asks, then drains the group under the cursor."""
        if group := self._chosen_group:
            question = f"Drain {group}? Its streams move to other groups, and a new group replaces it."
            self._ask(question, lambda: self._commands.drain(self._service_name, group))

    def action_move(self) -> None:
        """Asks, then moves a stream of the group under the cursor."""
        if group := self._chosen_group:
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
        if group := self._chosen_group:
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
