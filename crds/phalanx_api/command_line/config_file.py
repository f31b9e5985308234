"""Flags of a command from a YAML file. A key is a long flag without its dashes, or an argument; the command line wins."""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from phalanx_api.command_line.vllm import dashed

CONFIG_HELP = "YAML file of flags, by long name without dashes, and of arguments; the command line wins"
MakeCommand = Callable[[type[argparse.ArgumentParser]], argparse.ArgumentParser]
"""Returns the parser of one command, of the given class."""


class ConfigInvalid(Exception):
    """The file cannot be used; the message names file, key and reason."""


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigInvalid(message)


def add_config_flag(command: argparse.ArgumentParser) -> None:
    """Adds `--config`."""
    command.add_argument("--config", type=Path, metavar="FILE", help=CONFIG_HELP)


def parse_arguments(
    make_command: MakeCommand,
    arguments: Sequence[str],
    parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser,
    name: str = "",
) -> argparse.Namespace:
    """Returns the flags of a command called `name`, with those of the file of `--config` where the command line has none.

    Calls the parser's `error` for an invalid flag, key or value.
    """
    command = make_command(parser_class)
    is_plain = not any(argument.startswith("--c") for argument in arguments)
    if is_plain or not {"-h", "--help"}.isdisjoint(arguments):
        return command.parse_args(arguments)
    try:
        parser = _make_given_parser(make_command)
        given = vars(parser.parse_intermixed_args(arguments))
        if "config" not in given:
            return command.parse_args(arguments)
        values = _values(parser, given["config"], name or command.prog)
    except ConfigInvalid as error:
        command.error(str(error))
    given = _moved_arguments(command, given, values)
    known = {**values, **given}
    missing = [_name_of(action) for action in command._actions if action.required and action.dest not in known]
    if missing:
        command.error(f"the following arguments are required: {', '.join(missing)}")
    return argparse.Namespace(**{**vars(_optional(make_command(parser_class)).parse_args([])), **known})


def _optional(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Returns the parser without required flags and arguments."""
    for action in command._actions:
        action.required = False
        if not action.option_strings and action.nargs is None:
            action.nargs = "?"
    return command


def _make_given_parser(make_command: MakeCommand) -> argparse.ArgumentParser:
    """Returns a parser whose results lack what is not given."""
    command = _optional(make_command(_RaisingParser))
    for action in command._actions:
        action.default = argparse.SUPPRESS
    return command


def _moved_arguments(command: argparse.ArgumentParser, given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given ones; arguments are those that the file lacks, if they are as many: the prompt, if it has the model."""
    names = [action.dest for action in command._actions if not action.option_strings]
    on_line, lacking = [name for name in names if name in given], [name for name in names if name not in values]
    if len(on_line) != len(lacking):
        return dict(given)
    flags = {name: value for name, value in given.items() if name not in on_line}
    return {**flags, **{lack: given[name] for lack, name in zip(lacking, on_line, strict=True)}}


def _name_of(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def _read(file: Path) -> Mapping[object, object]:
    import yaml  # only this flag needs it

    try:
        document = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigInvalid(f"--config {file}: {' '.join(str(error).split())}") from error
    if document is not None and not isinstance(document, dict):
        raise ConfigInvalid(f"--config {file}: expected flags and their values, as in `port: 8000`")
    return document or {}


def _values(parser: argparse.ArgumentParser, file: Path, name: str) -> dict[str, Any]:
    """Returns the parsed values of the file. Raises ConfigInvalid."""
    values: dict[str, Any] = {}
    actions = {flag: action for action in parser._actions for flag in action.option_strings or (f"--{action.dest}",)}
    actions |= {flag: action for action in parser._actions for flag in action.option_strings}
    for key, value in _read(file).items():
        action = actions.get(dashed(f"--{key}"))
        if action is None or key in ("config", "help") or str(key).startswith("no-"):
            raise ConfigInvalid(f"--config {file}: {key} is no flag of {name}")
        try:
            values |= _parsed(parser, action, dashed(f"--{key}")[2:], value)
        except ConfigInvalid as error:
            reason = re.sub(r"^argument [^:]*: ", "", str(error))
            raise ConfigInvalid(f"--config {file}: {key}: {reason}") from None
    return values


def _parsed(parser: argparse.ArgumentParser, action: argparse.Action, key: str, value: object) -> dict[str, Any]:
    """Returns the value of one key by its destination. Raises ConfigInvalid."""
    if isinstance(value, list) and action.nargs == "+":
        return _positional(action, _listed(value), nargs="+")
    if action.option_strings:
        return vars(parser.parse_args(_arguments(action, key, value)))
    if not _is_scalar(value):
        raise ConfigInvalid(_no_value(value))
    return _positional(action, [value])


def _positional(action: argparse.Action, items: Sequence[object], nargs: str | None = None) -> dict[str, Any]:
    """Returns the values as those of an argument: they may begin with a dash."""
    argument = _RaisingParser()
    argument.add_argument(action.dest, nargs=nargs, type=action.type or str, choices=action.choices)
    return vars(argument.parse_args(["--", *map(str, items)]))


def _listed(value: Sequence[object]) -> Sequence[object]:
    """Returns the items of a list. Raises ConfigInvalid."""
    if not value or not all(_is_scalar(item) for item in value):
        raise ConfigInvalid(f"{value!r}: expected one value or several")
    return value


def _arguments(action: argparse.Action, key: str, value: object) -> list[str]:
    """Returns the command line of one flag. Raises ConfigInvalid."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigInvalid(f"{value!r}: expected true or false")
        has_negation = isinstance(action, argparse.BooleanOptionalAction)
        return [f"--{key}"] if value else [f"--no-{key}"] if has_negation else []
    if isinstance(value, list) and isinstance(action, argparse._AppendAction) and action.nargs is None:
        return [f"--{key}={item}" for item in _listed(value)]
    if isinstance(value, dict) and (action.metavar == "JSON" or action.help == argparse.SUPPRESS):  # or a flag of vLLM
        value = json.dumps(value)
    if not _is_scalar(value):
        raise ConfigInvalid(_no_value(value))
    return [f"--{key}={value}"]


def _no_value(value: object) -> str:
    hint = ", and YAML reads on, off, yes and no as true or false: quote them" if isinstance(value, bool) else ""
    return f"{value!r}: expected one value{hint}"


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
