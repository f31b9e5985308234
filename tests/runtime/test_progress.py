"""The line of progress: its text, and what commands write to a terminal and to a file."""

import io
import re
from pathlib import Path

import pytest

from phalanx_frontend.logs import ERASE_LINE
from phalanx_runtime.progress import ProgressLine, bar_text, open_line
from tests.polling import wait_until
from tests.runtime.checkpoint.gguf_files import TinyGguf
from tests.runtime.checkpoint.hub import FILES, NAME, running_hub
from tests.runtime.terminal.programs import on_terminal, run


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (0, 2_000_000, "a [                        ] 0 % of 2 MB"),
        (1_000_000, 2_000_000, "a [############            ] 50 % of 2 MB"),
        (3_000_000, 2_000_000, "a [########################] 100 % of 2 MB"),
        (1, 0, "a [                        ] 0 % of 0 MB"),
    ],
)
def test_a_bar_shows_the_share(done: int, total: int, text: str) -> None:
    assert bar_text("a", done, total) == text


def test_the_line_is_rewritten_at_intervals_and_removed() -> None:
    out, now_s = io.StringIO(), [0.0]
    line = ProgressLine(out, lambda: 12, lambda: now_s[0])
    for at_s, done in ((1.0, 1), (1.05, 2), (1.2, 3), (1.21, 10)):
        now_s[0] = at_s
        line.show("a", done, 10)
    line.clear()
    line.clear()
    assert out.getvalue() == f"{ERASE_LINE}a [##      {ERASE_LINE}a [####### {ERASE_LINE}a [########{ERASE_LINE}"


def test_a_timer_counts_until_it_is_cleared() -> None:
    out = io.StringIO()
    line = ProgressLine(out, lambda: 80, lambda: 0.0)
    line.start_timer("loading")
    wait_until(lambda: "loading: 0 s" in out.getvalue())
    line.clear()
    assert out.getvalue().endswith(ERASE_LINE)


def test_a_timer_has_a_bar_once_bytes_are_known() -> None:
    out = io.StringIO()
    line = ProgressLine(out, lambda: 80, lambda: 0.0)
    line.start_timer("loading")
    line.set_loaded(500_000, 2_000_000)
    wait_until(lambda: "loading: 0 s [######                  ] 25 % of 2 MB" in out.getvalue())
    line.start_timer("again")
    wait_until(lambda: "again: 0 s" in out.getvalue())
    line.clear()
    assert "again: 0 s [" not in out.getvalue()


def test_a_file_has_no_line() -> None:
    assert open_line(io.StringIO()) is None


BAR = r"\[#{24}\] 100 % of \d+ MB"


def test_conversion_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    file = TinyGguf().write(tmp_path / "tiny.gguf")
    with on_terminal("convert", str(file), str(tmp_path / "out")) as (terminal, process):
        text = terminal.read_all()
        assert process.wait(60) == 0
    assert re.search(f"converting {BAR}{re.escape(ERASE_LINE)}{re.escape(str(tmp_path))}/out", text)
    silent = run("convert", str(file), str(tmp_path / "again"))
    assert (silent.returncode, silent.stderr) == (0, "")


def test_download_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.add(NAME, FILES)
        arguments = ("fetch", f"hf://{NAME}", "--download-dir")
        with on_terminal(*arguments, str(tmp_path / "a"), HF_ENDPOINT=hub.endpoint) as (terminal, process):
            text = terminal.read_all()
            assert process.wait(60) == 0, text
        piped = run(*arguments, str(tmp_path / "b"), HF_ENDPOINT=hub.endpoint)
    assert re.search(f"downloading {NAME} {BAR}", text)
    assert piped.returncode == 0 and "[#" not in piped.stderr and ERASE_LINE not in piped.stderr
