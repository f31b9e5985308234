"""`--config FILE` of the commands of `phalanx-runtime`."""

import argparse
from pathlib import Path
from typing import NoReturn

import pytest

from phalanx_runtime.commands import FetchSettings
from phalanx_runtime.flags import actions_of, command_parsers, make_parser
from phalanx_runtime.settings import RunSettings, ServeSettings, read_settings

EVERY_KIND = """
model: org/name
served-model-name: [a, b]
tensor-parallel-size: 2
gpu-memory-utilization: 0.5
enable-prefix-caching: false
cached-only: true
dtype: float32
api-key: [k1, k2]
host: 0.0.0.0
log-format: text
"""


def read(tmp_path: Path, text: str, *arguments: str) -> ServeSettings:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    settings = read_settings(["serve", "--config", str(file), *arguments], {})
    assert isinstance(settings, ServeSettings)
    return settings


def test_each_kind_of_flag_is_read(tmp_path: Path) -> None:
    settings = read(tmp_path, EVERY_KIND)
    assert (settings.model.model, settings.model.served_names, settings.model.cached_only) == ("org/name", ["a", "b"], True)
    assert (settings.group.tensor_parallel_size, settings.http.host, settings.log_format) == (2, "0.0.0.0", "text")
    engine = settings.engine
    assert (engine.gpu_memory_utilization, engine.enable_prefix_caching, engine.dtype) == (0.5, False, "float32")
    assert len(settings.http.api_keys) == 2


def test_the_command_line_wins(tmp_path: Path) -> None:
    line = ["other/name", "--served-model-name", "c", "-tp", "1", "--enable-prefix-caching", "--dtype", "auto", "--api-key", "k3"]
    settings = read(tmp_path, EVERY_KIND, *line)
    assert (settings.model.model, settings.model.served_names, settings.group.tensor_parallel_size) == ("other/name", ["c"], 1)
    assert (settings.engine.enable_prefix_caching, settings.engine.dtype) == (True, "auto"), "a default wins if it is given"
    assert len(settings.http.api_keys) == 1
    assert settings.engine.gpu_memory_utilization == 0.5


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "", "org/name") == read_settings(["serve", "org/name"], {})


class RefusingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def keys_of(command: str) -> dict[str, argparse.Action]:
    """Returns the action of each key."""
    actions = actions_of(command_parsers(make_parser())[command])
    arguments = {action.dest: action for action in actions if not action.option_strings}
    flags = {flag[2:]: action for action in actions for flag in action.option_strings[:1] if flag.startswith("--")}
    return arguments | {name: action for name, action in flags.items() if name != "config"}


@pytest.mark.parametrize(("command", "key"), [(name, key) for name in command_parsers(make_parser()) for key in keys_of(name)])
def test_every_flag_has_a_key(tmp_path: Path, command: str, key: str) -> None:
    """A value that suits its flag alone may contradict another flag, or another may be missing: the file is not at fault."""
    action, file = keys_of(command)[key], tmp_path / "one.yaml"
    plain = {"NAME=PATH": "NAME=PATH", "FILE": "a.png", "JSON": "'{}'", "ORIGIN,...": "'*'"}.get(str(action.metavar), "1")
    value = "true" if action.nargs == 0 else next(iter(action.choices)) if action.choices else plain
    file.write_text(f"{key}: {value}\n")
    try:
        read_settings([command, "--config", str(file)], {}, RefusingParser)
    except ValueError as error:
        assert f"--config {file}" not in str(error)


RUN = "model: org/name\nseed: 7\ntensor-parallel-size: 2\nsystem: be short\n"


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", ("a/b", "hello"), ("a/b", "hello", None)),
        (RUN, ("hello",), ("org/name", "hello", 7)),
        (RUN, ("hello", "--seed", "8"), ("org/name", "hello", 8)),
        (RUN, ("a/b", "--seed=8", "hello"), ("a/b", "hello", 8)),
        (f"{RUN}prompt: hi\n", (), ("org/name", "hi", 7)),
        (f"{RUN}prompt: hi\n", ("a/b",), ("a/b", "hi", 7)),
    ],
    ids=["all given", "prompt", "flag", "all override", "nothing", "model"],
)
def test_arguments_of_a_line_complete_those_of_the_file(
    tmp_path: Path, text: str, line: tuple[str, ...], expected: tuple[str, str, int | None]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    settings = read_settings(["run", "--config", str(file), *line], {})
    assert isinstance(settings, RunSettings)
    assert (settings.model.model.model, settings.prompt, settings.options.seed) == expected
    assert (settings.system, settings.model.group.tensor_parallel_size) == (("be short", 2) if text else ("", 1))


def test_flags_given_several_times_are_lists(tmp_path: Path) -> None:
    file = tmp_path / "fetch.yaml"
    file.write_text("model: org/name\nadapter: [hf://a/b, hf://c/d]\n")
    settings = read_settings(["fetch", "--config", str(file)], {})
    assert isinstance(settings, FetchSettings)
    assert (settings.model, settings.adapters) == ("org/name", ("hf://a/b", "hf://c/d"))
    settings = read_settings(["fetch", "--config", str(file), "--adapter", "hf://e/f"], {})
    assert isinstance(settings, FetchSettings) and settings.adapters == ("hf://e/f",)


def test_values_of_lists_may_begin_with_a_dash(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: org/name\napi-key: [-a, --port, b]\nserved-model-name: [-c]\n")
    settings = read_settings(["serve", "--config", str(file)], {})
    assert isinstance(settings, ServeSettings)
    assert (len(settings.http.api_keys), settings.model.served_names) == (3, ["-c"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (("quantize", "org/name"), "the following arguments are required: --out"),
        (("quantize", "--out", "b"), "the following arguments are required: MODEL"),
        (("quantize", "org/name", "--out", "b", "--tokens", "x"), "argument --tokens: 'x' is not a whole number"),
        (("bench", "http://a"), "scheme is no flag of bench"),
    ],
    ids=["flag", "argument", "value", "other command"],
)
def test_what_is_missing_or_wrong_is_named(
    tmp_path: Path, line: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("scheme: w4a16\n")
    with pytest.raises(SystemExit) as end:
        read_settings([*line, "--config", str(file)], {})
    assert end.value.code == 2 and reason in capsys.readouterr().err


def test_help_shows_defaults_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_settings(["serve", "--config", str(tmp_path), "--help"], {})
    assert end.value.code == 0 and "(default: 8000)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot: 1", "serve.yaml: prot is no flag of serve"),
        ("config: a.yaml", "serve.yaml: config is no flag of serve"),
        ("no-enable-prefix-caching: true", "serve.yaml: no-enable-prefix-caching is no flag of serve"),
        ("port: x", "serve.yaml: port: 'x' is not a port"),
        ("dtype: int3", "serve.yaml: dtype: invalid choice: 'int3'"),
        ("port: [1, 2]", "serve.yaml: port: [1, 2]: expected one value"),
        (
            "port: yes",
            "serve.yaml: port: True: expected one value, and YAML reads on, off, yes and no as true or false: quote them",
        ),
        ("served-model-name: []", "serve.yaml: served-model-name: []: expected one value or several"),
        ("enable-prefix-caching: 3", "serve.yaml: enable-prefix-caching: 3: expected true or false"),
        ("port:", "serve.yaml: port: None: expected one value"),
        ("- port", "serve.yaml: expected flags and their values"),
        ("port: [", "serve.yaml: while parsing"),
        ("port: 1", "the following arguments are required: MODEL"),
    ],
)
def test_bad_file_names_file_key_and_reason(tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read(tmp_path, text)
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["serve", "org/name", "--config", "/no/such.yaml"], {})
    assert "--config /no/such.yaml: " in capsys.readouterr().err
