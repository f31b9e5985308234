"""docs/reference.md has all flags and HTTP endpoints, generated from the programs."""

import argparse
import pathlib
import re

import pytest

from phalanx_frontend.app import create_app
from phalanx_operator.settings import make_parser as operator_parser
from phalanx_router.settings import make_parser as router_parser
from phalanx_runtime.flags import make_parser as runtime_parser
from tests.frontend.fakes import FakeBackend

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference.md"


def flags(parser: argparse.ArgumentParser, command: str = "") -> list[str]:
    """Returns a table row per flag of a command, or of a program without commands."""
    commands = next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for action in (commands.choices[command] if commands else parser)._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        name = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
        choices = f": {', '.join(f'`{choice}`' for choice in action.choices)}" if action.choices else ""
        default = "" if action.default in (None, [], (), "", argparse.SUPPRESS) else f"`{action.default}`"
        help_text = re.sub(r" \(default %\(default\)s(; )?([^)]*)\)", r" \2", action.help or "").strip()
        rows.append(f"| {name} | {default} | {help_text or 'one of'}{choices} |")
    return rows


def endpoints() -> list[str]:
    """Returns a table row per operation of the API server."""
    rows = ["| endpoint | description |", "|---|---|"]
    for path, operations in create_app(FakeBackend()).openapi()["paths"].items():
        for method, operation in operations.items():
            description = " ".join((operation.get("description") or operation.get("summary", "")).split())
            rows.append(f"| `{method.upper()} {path}` | {description} |")
    return rows


def page() -> str:
    parts = [
        [
            "# Reference",
            "",
            "Generated from the programs by `make golden`. Request fields are in `/openapi.json` of a running server.",
        ],
        ["## HTTP", *endpoints()],
        ["## `phalanx-runtime serve`", *flags(runtime_parser(), "serve")],
        ["## `phalanx-router serve`", *flags(router_parser(), "serve")],
        ["## `phalanx-operator run`", *flags(operator_parser())],
    ]
    return "\n\n".join("\n".join([part[0], "", *part[1:]] if part[0].startswith("## ") else part) for part in parts) + "\n"


def test_the_reference_is_current(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--golden-update", default=False):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run `make golden`"
