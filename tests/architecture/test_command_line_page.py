"""docs/command-line.md names commands and flags that exist."""

import pathlib
import re
import shlex

from phalanx_runtime.flags import actions_of, command_parsers, make_parser
from phalanx_runtime.settings import ServeSettings, read_settings

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "command-line.md").read_text()


def test_every_flag_of_the_page_exists() -> None:
    parsers = command_parsers(make_parser()).values()
    flags = {flag for parser in parsers for action in actions_of(parser) for flag in action.option_strings}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) - flags == set()


def test_example_commands_are_valid() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGE, re.M | re.S)
    lines = [re.sub(r"\s([<>#]|\d?>).*", "", line) for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("phalanx-runtime")]
    assert {command[0] for command in commands} == {"run", "chat", "bench", "completion"}
    for command in commands:
        read_settings([word.replace("model.gguf", "org/name") for word in command], {})


def test_the_example_file_is_valid(tmp_path: pathlib.Path) -> None:
    found = re.search(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    assert found is not None
    file = tmp_path / "serve.yaml"
    file.write_text(found[1])
    settings = read_settings(["serve", "--config", str(file)], {})
    assert isinstance(settings, ServeSettings) and settings.model.served_names == ["small", "default"]
