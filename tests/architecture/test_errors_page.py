"""docs/errors.md lists every error code of the code with its status and class, and each code has a test."""

import ast
import functools
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from phalanx_api.wire.router import HTTP_WRONG_VERSION
from tests.syntax import nodes_of

ROOT = pathlib.Path(__file__).parents[2]
ROWS = re.findall(r"^\| `(\w+)` \| (\d+) \| ([^|]+) \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
POSITIONS = {
    "ApiError": (0, 3),
    "invalid": (None, 2),
    "ImageRefused": (None, 2),
    "BackendError": (0, 1),
    "Refusal": (0, 1),
    "Refused": (None, None),
}
"""Positions of status and code in the arguments; `invalid` makes an ApiError with 400, and `ImageRefused` becomes one."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CONSTANTS = {"HTTP_WRONG_VERSION": HTTP_WRONG_VERSION}


def argument(call: ast.Call, name: str, position: int | None) -> ast.expr | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == name]
    if named:
        return named[0]
    return call.args[position] if position is not None and len(call.args) > position else None


def errors() -> Iterator[tuple[ast.Call, ast.expr | None, ast.expr | None]]:
    """Yields each call that makes an error, with status and code."""
    paths = (ROOT / "runtime").rglob("*.py")
    for call in (node for path in paths for node in nodes_of(path) if isinstance(node, ast.Call)):
        if called(call) in POSITIONS:
            status, code = POSITIONS[called(call)]
            yield call, argument(call, "status", status), argument(call, "code", code)


def called(call: ast.Call) -> str:
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


def number(status: ast.expr | None) -> int:
    """Returns the status; 400 if the call has none."""
    match status:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return CONSTANTS[name]
        case None:
            return 400
    raise ValueError(f"{ast.unparse(status)} is not a constant status; add it to CONSTANTS")


def test_the_page_lists_every_code_with_status_and_class() -> None:
    classes: dict[tuple[str, int], set[str]] = defaultdict(set)
    for call, status, code in errors():
        if isinstance(code, ast.Constant) and isinstance(code.value, str):
            name = called(call)
            classes[code.value, number(status)].add("ApiError" if name in ("invalid", "ImageRefused") else name)
    listed = {(code, int(status)): set(re.findall(r"`(\w+)`", names)) for code, status, names in ROWS}
    assert listed == classes


@pytest.mark.parametrize("code", [code for code, _, _ in ROWS])
def test_every_error_code_has_a_test(code: str) -> None:
    assert code in asserted()


@functools.cache
def asserted() -> frozenset[str]:
    """Returns the strings in assertions, and in the parameters of tests."""
    paths = (path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "architecture")
    nodes = [node for path in paths for node in nodes_of(path)]
    asserts: list[ast.AST] = [node for node in nodes if isinstance(node, ast.Assert)]
    decorators = [part for node in nodes if isinstance(node, FUNCTIONS) for part in node.decorator_list]
    found = [part for root in asserts + decorators for part in ast.walk(root) if isinstance(part, ast.Constant)]
    return frozenset(part.value for part in found if isinstance(part.value, str))


def test_an_error_without_a_code_is_a_400() -> None:
    framework = "ApiError(status, str(error.detail))"  # any status of Starlette
    without = {ast.unparse(call): status for call, status, code in errors() if code is None}
    assert {text for text, status in without.items() if text != framework and number(status) != 400} == set()
