"""Runs the checks of a client and prints one JSON line for each. Standard library only: clients have no other package of ours."""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MARK = "check: "
"""Begins the line of a result; a client may print other lines."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a client connects."""

    url: str  # without /v1
    key: str
    model: str


def server() -> Server:
    return Server(os.environ["CLIENT_URL"], os.environ["CLIENT_KEY"], os.environ["CLIENT_MODEL"])


def run_checks(checks: Mapping[str, Callable[[], Any]]) -> None:
    """Runs all checks, functions and coroutine functions, and exits with 1 if one raises."""
    has_failed = False
    for name, check in checks.items():
        why = ""
        try:
            if inspect.iscoroutinefunction(check):
                asyncio.run(check())
            else:
                check()
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300] or type(error).__name__
            has_failed = True
        print(MARK + json.dumps({"name": name, "why": why}), flush=True)
    sys.exit(1 if has_failed else 0)


def expect(condition: object, found: object) -> None:
    """Raises AssertionError that shows what was found. Unlike `assert` it also holds with -O."""
    if not condition:
        raise AssertionError(f"found {found!r}"[:300])
