"""The scripts of `phalanx-runtime completion`; bash runs its own."""

import shutil
import subprocess
from pathlib import Path

import pytest

from phalanx_runtime.flags import actions_of, command_parsers, make_parser
from tests.runtime.terminal.programs import run

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "script"
    file.write_text(run("completion", "bash").stdout)
    return file


def completed(script: Path, *words: str) -> list[str]:
    """Returns what bash offers for the last word."""
    code = (
        'source "$1"; shift; COMP_WORDS=(phalanx-runtime "$@"); COMP_CWORD=$#; _phalanx_runtime; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ended = subprocess.run(
        ["bash", "-c", code, "bash", str(script), *words], capture_output=True, text=True, check=True, cwd=script.parent
    )
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ser"], ["serve"]),
        (["serve", "--tensor"], ["--tensor-parallel-size"]),
        (["serve", "m", "--log-format", ""], ["auto", "text", "json"]),
        (["serve", "m", "--log-format", "t"], ["text"]),
        (["chat", "http://x", "--sys"], ["--system"]),
        (["bench", "http://x", "--slo"], ["--slo-ttft", "--slo-itl"]),
        (["serve", "scr"], ["script"]),
        (["serve", "--config", "scr"], ["script"]),
    ],
    ids=" ".join,
)
def test_bash_offers_commands_flags_choices_and_files(script: Path, words: list[str], offered: list[str]) -> None:
    assert completed(script, *words) == offered


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_offers_every_command_and_flag(script: Path) -> None:
    commands = command_parsers(make_parser())
    assert completed(script, "") == list(commands)
    for name, parser in commands.items():
        flags = [flag for action in actions_of(parser) for flag in action.option_strings if flag.startswith("--")]
        assert completed(script, name, "--") == flags


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_accept_their_script(shell: str, tmp_path: Path) -> None:
    ended = run("completion", shell)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "log-format" in ended.stdout and "auto text json" in ended.stdout
    if shutil.which(shell) is not None:
        file = tmp_path / "script"
        file.write_text(ended.stdout)
        subprocess.run([shell, "-n", str(file)], check=True)
