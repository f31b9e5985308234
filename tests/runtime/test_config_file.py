"""`--config FILE` of `phalanx-runtime serve`."""

import argparse
from pathlib import Path
from typing import NoReturn

import pytest

from phalanx_runtime.flags import actions_of, command_parsers, make_parser
from phalanx_runtime.settings import ServeSettings, read_settings

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


def serve_flags() -> dict[str, argparse.Action]:
    actions = actions_of(command_parsers(make_parser())["serve"])
    names = {flag[2:]: action for action in actions for flag in action.option_strings[:1] if flag.startswith("--")}
    return {name: action for name, action in names.items() if name != "config"}


@pytest.mark.parametrize("name", serve_flags())
def test_every_flag_has_a_key(tmp_path: Path, name: str) -> None:
    """A value that suits its flag alone may contradict another flag, which the file is not blamed for."""
    action, file = serve_flags()[name], tmp_path / "one.yaml"
    plain = str(action.metavar) if "=" in str(action.metavar) else "1"
    value = "true" if action.nargs == 0 else next(iter(action.choices)) if action.choices else plain
    file.write_text(f"{name}: {value}\n")
    try:
        read_settings(["serve", "org/name", "--config", str(file)], {}, RefusingParser)
    except ValueError as error:
        assert f"--config {file}" not in str(error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot: 1", "serve.yaml: prot is no flag of serve"),
        ("config: a.yaml", "serve.yaml: config is no flag of serve"),
        ("no-enable-prefix-caching: true", "serve.yaml: no-enable-prefix-caching is no flag of serve"),
        ("port: x", "serve.yaml: port: 'x' is not a port"),
        ("dtype: int3", "serve.yaml: dtype: invalid choice: 'int3'"),
        ("port: [1, 2]", "serve.yaml: port: [1, 2]: expected one value"),
        ("port: true", "serve.yaml: port: True: expected one value"),
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
