"""Keyword arguments of the offline engine: the flags of `phalanx-runtime serve`, with underscores for hyphens."""

import argparse
from collections.abc import Mapping
from typing import NoReturn

from phalanx_runtime.settings import ServeSettings, read_settings


class _Raising(argparse.ArgumentParser):
    """A parser for a library: what is wrong is raised, not printed."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(message)


def settings_of(model: str, options: Mapping[str, object], environment: Mapping[str, str]) -> ServeSettings:
    """The settings of these options; the others, and those that are None, have the flags' defaults. Raises ValueError."""
    arguments = ["serve", model]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments += [f"--{flag}", *(str(item) for item in (value if isinstance(value, list | tuple) else [value]))]
    settings = read_settings(arguments, environment, _Raising)
    assert isinstance(settings, ServeSettings), "the command is serve"
    if settings.nnodes > 1:
        raise ValueError(f"nnodes is {settings.nnodes}; here all ranks are on one machine")
    return settings
