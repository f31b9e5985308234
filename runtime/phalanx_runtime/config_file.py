"""Flags of `serve` from a YAML file. A key is a long flag without its dashes, or `model`; the command line wins."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from phalanx_runtime.flags import actions_of, command_parsers, make_parser


class ConfigInvalid(Exception):
    """The file cannot be used; the message names file, key and reason."""


class _ConfigParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigInvalid(re.sub(r"^argument [^:]*: ", "", message))


def with_config(flags: argparse.Namespace, arguments: Sequence[str], file: Path) -> argparse.Namespace:
    """Returns the flags of a valid command line of `serve`, with those of the file where it has none. Raises ConfigInvalid."""
    parser = _make_given_parser()
    given = vars(parser.parse_args(arguments))
    return argparse.Namespace(**{**vars(flags), **_values(parser, file, _read(file)), **given})


def _make_given_parser() -> argparse.ArgumentParser:
    """Returns a parser whose results lack flags that are not given."""
    parser = make_parser(_ConfigParser)
    for action in actions_of(command_parsers(parser)["serve"]):
        action.default = argparse.SUPPRESS
    return parser


def _read(file: Path) -> Mapping[object, object]:
    import yaml  # only this flag needs it

    try:
        document = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigInvalid(f"{file}: {' '.join(str(error).split())}") from error
    if document is not None and not isinstance(document, dict):
        raise ConfigInvalid(f"{file}: expected flags and their values, as in `port: 8000`")
    return document or {}


def _values(parser: argparse.ArgumentParser, file: Path, document: Mapping[object, object]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    actions = {flag: action for action in actions_of(command_parsers(parser)["serve"]) for flag in action.option_strings}
    for key, value in document.items():
        action = actions.get(f"--{key}")
        if key != "model" and (action is None or key in ("config", "help") or str(key).startswith("no-")):
            raise ConfigInvalid(f"{file}: {key} is no flag of serve")
        try:
            values |= vars(parser.parse_args(["serve", *_arguments(action, str(key), value)]))
        except ConfigInvalid as error:
            raise ConfigInvalid(f"{file}: {key}: {error}") from None
    return values


def _arguments(action: argparse.Action | None, key: str, value: object) -> list[str]:
    """Returns the command line of one key; null action: the model. Raises ConfigInvalid."""
    is_switch = action is not None and action.nargs == 0
    if is_switch:
        if not isinstance(value, bool):
            raise ConfigInvalid(f"{value!r}: expected true or false")
        has_negation = isinstance(action, argparse.BooleanOptionalAction)
        return [f"--{key}"] if value else [f"--no-{key}"] if has_negation else []
    if isinstance(value, list) and action is not None and action.nargs == "+":
        if not value or not all(_is_scalar(item) for item in value):
            raise ConfigInvalid(f"{value!r}: expected one value or several")
        return [f"--{key}", *map(str, value)]
    if not _is_scalar(value):
        raise ConfigInvalid(f"{value!r}: expected one value")
    return [str(value)] if action is None else [f"--{key}={value}"]


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
